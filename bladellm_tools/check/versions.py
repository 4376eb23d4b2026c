"""Probe of installed packages against what the project requires."""

import platform
import re
import sys
from importlib import metadata

from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.finding import Finding, failed, passed, warned

PACKAGE = "bladellm-open"
SHOWN = ("torch", "triton", "transformers")
LEAST_PYTHON = (3, 11)


def check_versions(_: CheckArgs) -> Finding:
    """Python and the required packages, without importing them."""
    try:
        requirements = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return warned(f"{summary()}; {PACKAGE} is not installed, versions not compared", "pip install -e .")
    return judge_versions(requirements, {name: version_of(name) for name, _ in minimums(requirements)})


def judge_versions(requirements: list[str], installed: dict[str, str | None]) -> Finding:
    """Every requirement's least version against what is installed."""
    wrong = []
    for name, least in minimums(requirements):
        found = installed.get(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif as_numbers(found) < as_numbers(least):
            wrong.append(f"{name} {found} is older than {least}")
    if sys.version_info < LEAST_PYTHON:
        wrong.append("Python is older than 3.11")
    if wrong:
        return failed(f"{summary()}; {', '.join(wrong)}", "pip install -c constraints.txt -e .")
    return passed(summary())


def minimums(requirements: list[str]) -> list[tuple[str, str]]:
    """(name, least version) of the requirements that are not extras."""
    parsed = (re.match(r"([\w.-]+)>=([\w.]+)", item) for item in requirements if "extra ==" not in item)
    return [(match[1], match[2]) for match in parsed if match]


def as_numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def version_of(name: str) -> str | None:
    """A package's version, or None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def summary() -> str:
    """Versions worth knowing in a bug report."""
    shown = [f"{name} {version_of(name) or 'none'}" for name in SHOWN]
    return ", ".join([f"python {platform.python_version()}", *shown])
