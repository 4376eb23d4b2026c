"""Guided decoding against the public JSON-Schema test suite: what is refused and why, what is wrongly accepted, times.

    python recipes/benchmarks/guided_suite.py SUITE/tests/draft2020-12 FOLDER_WITH_TOKENIZER [--vocab_size 151936]

SUITE is a copy of https://github.com/json-schema-org/JSON-Schema-Test-Suite. Every schema is compiled; every instance
of those that compile is written as JSON (keys as they are and in the schema's order, compact and with spaces) and fed
to a matcher, byte by byte. Accepted ones are also fed as the tokenizer's tokens, a mask row each. Prints Markdown; ends
with status 1 if an invalid instance was accepted. `format` counts as a constraint here, and in some files of the suite
as a remark: texts that are valid there only for that reason are not accepted.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bladellm_runtime.guided.backend import Compiled
from bladellm_runtime.guided.constraint import ConstraintError, constraint_of
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import vocabulary_of
from bladellm_runtime.text.tokenizer import Tokenizer

REASONS = (
    (r"Unimplemented keys: \[\"(\w+)|^guided_json cannot be used: (\$id)|(\$dynamicRef)", "keyword not supported: {}"),
    (r"oneOf", "keyword not supported: oneOf with choices that overlap"),
    (r"Unknown format: ([\w-]+)", "format not supported: {}"),
    (r"\$ref|Resource", "reference that leads out of the schema, or by $id or $anchor"),
    (r"a pattern|patternProperty", "pattern: look-around, \\p, control letters, or patternProperties that overlap"),
    (r"[Uu]nsatisfiable", "nothing satisfies it"),
    (r"must be a JSON schema", "true or false instead of an object"),
    (r"digits|float range|64-bit", "number too large"),
    (r"minProperties", "minProperties above the number of required properties"),
    (r"control character", "control character in a value or name"),
)


@dataclass
class Found:
    """Counts, and seconds of every compilation and of every mask row."""

    refused: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    not_accepted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compiled: list[tuple[float, float]] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)


def main() -> None:
    flags = _flags()
    tokenizer = Tokenizer.load(flags.tokenizer)
    backend = LlguidanceBackend(vocabulary_of(tokenizer, flags.vocab_size))
    found = Found()
    for path in sorted(flags.suite.rglob("*.json")):
        for group in json.loads(path.read_text()):
            ready = compiled(backend, group["schema"], found)
            for test in group["tests"] if ready is not None else ():
                check(backend, tokenizer, ready, group["schema"], test, path.stem, found)
    report(found)
    sys.exit(bool(found.wrong))


def compiled(backend: LlguidanceBackend, schema: Any, found: Found) -> Compiled | None:
    """None where the schema is refused."""
    began, worked = time.perf_counter(), time.thread_time()
    try:
        constraint = constraint_of({"guided_json": json.loads(json.dumps(schema))})
        assert constraint is not None
        ready = backend.compile(constraint, time.monotonic() + 60)
    except ConstraintError as error:
        found.refused[reason(str(error))] += 1
        return None
    found.compiled.append((time.perf_counter() - began, time.thread_time() - worked))
    return ready


def check(
    backend: LlguidanceBackend, tokenizer: Tokenizer, ready: Compiled, schema: Any, test: Any, name: str, found: Found
) -> None:
    """Feed an instance, and follow it by the tokenizer's tokens if it is accepted."""
    texts = [text for text in spellings(test["data"], schema) if spelled(backend, ready, text.encode())]
    kind = "valid" if test["valid"] else "invalid"
    found.instances[f"{kind}, {'' if texts else 'not '}accepted"] += 1
    if test["valid"] and not texts:
        found.not_accepted[name] += 1
    if texts and not test["valid"]:
        found.wrong.append(f"{name}: {json.dumps(schema)} takes {texts[0]}")
    matcher, row = ready.matcher(), np.zeros(backend.vocabulary.words, np.int32)
    for token in tokenizer.encode(texts[0], add_special_tokens=False) if texts else ():
        began, worked = time.perf_counter(), time.thread_time()
        matcher.fill_mask(row)
        found.rows.append((time.perf_counter() - began, time.thread_time() - worked))
        if not matcher.accept(token):
            break


def spelled(backend: LlguidanceBackend, ready: Compiled, text: bytes) -> bool:
    matcher, pieces = ready.matcher(), backend.vocabulary.pieces
    return all(matcher.accept(pieces.index(bytes([byte]))) for byte in text) and matcher.may_end


def spellings(instance: Any, schema: Any) -> Iterator[str]:
    text = json.dumps(schema, ensure_ascii=False)
    for value in (instance, _ordered(instance, text)):
        yield json.dumps(value, ensure_ascii=False)
        yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _ordered(value: Any, text: str) -> Any:
    """With the keys of objects in the order in which the schema's text names them."""
    if isinstance(value, list):
        return [_ordered(part, text) for part in value]
    if not isinstance(value, dict):
        return value
    places = {name: text.find(json.dumps(name, ensure_ascii=False) + ": ") % 2**31 for name in value}
    return {name: _ordered(value[name], text) for name in sorted(value, key=places.__getitem__)}


def reason(sentence: str) -> str:
    for pattern, label in REASONS:
        if match := re.search(pattern, sentence):
            return label.format(next((group for group in match.groups() if group), ""))
    return sentence


def report(found: Found) -> None:
    schemas = len(found.compiled) + found.refused.total()
    print(f"{schemas} schemas: {len(found.compiled)} compiled, {found.refused.total()} refused.\n")
    print("| instances | count |\n| --- | ---: |")
    for kind in ("valid, accepted", "valid, not accepted", "invalid, not accepted", "invalid, accepted"):
        print(f"| {kind} | {found.instances[kind]} |")
    for title, counts in (("refused because of", found.refused), ("valid, not accepted, by file", found.not_accepted)):
        print(f"\n| {title} | count |\n| --- | ---: |")
        for name, count in counts.most_common():
            print(f"| {name.replace('|', '/')} | {count} |")
    print("\n| processor time | count | p50 | p99 | most |\n| --- | ---: | ---: | ---: | ---: |")
    for name, unit, scale, times in (("compile", "ms", 1e3, found.compiled), ("mask row", "us", 1e6, found.rows)):
        worked = np.array(times)[:, 1] * scale
        middle, high, most = np.percentile(worked, [50, 99, 100])
        print(f"| {name}, {unit} | {len(times)} | {middle:.1f} | {high:.1f} | {most:.1f} |")
    for line in found.wrong:
        print(f"\nwrong: {line}")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--vocab_size", type=int, default=151_936)
    return parser.parse_args()


if __name__ == "__main__":
    main()
