"""The report of `blade_llm_check`: one line a check, a last line of counts, and the exit code."""

import sys
from collections import Counter

import msgspec

from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.catalog import chosen
from bladellm_tools.check.finding import Finding, Status
from bladellm_tools.check.runner import run_checks
from bladellm_tools.console import GREEN, RED, YELLOW, one_line, styled, table

STYLES = {Status.PASS: GREEN, Status.WARNING: YELLOW, Status.FAILED: RED}
STATUS_WIDTH = max(len(status) for status in Status)


def run(args: CheckArgs) -> int:
    """Run the chosen checks and print them. Returns 1 when one FAILED (with --strict also for a WARNING), else 0."""
    names = chosen(args)
    width = max(len(name) for name in names)
    findings: dict[str, Finding] = {}

    def on_finding(name: str, finding: Finding) -> None:
        findings[name] = finding
        if not args.json:
            print(line(name, finding, width), flush=True)

    run_checks(names, args, on_finding)
    if args.json:
        print(to_json(findings))
    else:
        for finding in findings.values():
            if finding.table:
                print("\n".join(table(finding.table)))
        print(counts_line(findings))
    return exit_code(findings, args.strict)


def line(name: str, finding: Finding, width: int) -> str:
    """`     check_shm WARNING - detail; hint`, on one line whatever the detail holds."""
    status = styled(f"{finding.status:<{STATUS_WIDTH}}", STYLES[finding.status], sys.stdout)
    text = f"{finding.detail}; {finding.hint}" if finding.hint else finding.detail
    return f"{name:>{width}} {status} - {one_line(text)}"


def count(findings: dict[str, Finding]) -> dict[str, int]:
    """How many checks have each status."""
    found = Counter(finding.status for finding in findings.values())
    return {status.value: found[status] for status in Status}


def counts_line(findings: dict[str, Finding]) -> str:
    """`PASS n, WARNING n, FAILED n`."""
    return ", ".join(f"{status} {number}" for status, number in count(findings).items())


def exit_code(findings: dict[str, Finding], strict: bool) -> int:
    """0 when nothing FAILED; with `strict` a WARNING counts as well."""
    bad = {Status.FAILED, Status.WARNING} if strict else {Status.FAILED}
    return int(any(finding.status in bad for finding in findings.values()))


def to_json(findings: dict[str, Finding]) -> str:
    """One JSON object: the checks in order, and the counts."""
    checks = [{"name": name, **msgspec.to_builtins(finding)} for name, finding in findings.items()]
    return msgspec.json.encode({"checks": checks, "counts": count(findings)}).decode()
