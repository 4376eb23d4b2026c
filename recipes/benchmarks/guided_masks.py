"""Time of guided decoding on the processor: to compile a constraint, to fill one mask row, and a batch of them.

    python recipes/benchmarks/guided_masks.py FOLDER_WITH_TOKENIZER [--vocab_size 151936] [--texts 20] [--tokens 200]

Follows random allowed tokens (mostly short ones, so that structures close) and prints, for each constraint and back
end, the first compilation in ms and the median, 99th percentile and longest time of a row in microseconds, and the
99th percentile of its processor time, which other work on the machine lengthens less. "profile" is the schema of the
documented sample client. Then batches of 64 sequences a step: all of one schema, each of its own, and each in a string
of 5 characters or fewer, which is the most expensive place; wall and processor time of the call that fills the batch,
and of accepting 64 tokens.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import cast

import numpy as np

from bladellm_runtime.guided.backend import Backend, Compiled, MatcherError
from bladellm_runtime.guided.constraint import ConstraintError, constraint_of
from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import allowed_tokens, vocabulary_of
from bladellm_runtime.text.tokenizer import Tokenizer

TEXT, NUMBER = {"type": "string"}, {"type": "number"}
PLACE = {
    "type": "object",
    "properties": {"company": TEXT, "duration": TEXT, "position": TEXT},
    "required": ["company", "position"],
}
BATCH = 64
CONSTRAINTS: dict[str, dict[str, object]] = {
    "any object": {"response_format": {"type": "json_object"}},
    "profile": {
        "guided_json": {
            "type": "object",
            "properties": {
                "name": TEXT,
                "age": {"type": "integer"},
                "skills": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 3},
                "work history": {"type": "array", "items": PLACE},
            },
            "required": ["name", "age", "skills", "work history"],
        }
    },
    "formats": {
        "guided_json": {
            "type": "object",
            "properties": {name: {"type": "string", "format": name} for name in ("date-time", "email", "uuid", "ipv4")},
            "required": ["date-time", "email", "uuid", "ipv4"],
            "additionalProperties": False,
        }
    },
    "50 fields": {
        "guided_json": {"type": "object", "properties": {f"field_{i}": [TEXT, NUMBER][i % 2] for i in range(50)}}
    },
    "1000 values": {"guided_json": {"type": "array", "items": {"enum": [f"value {i}" for i in range(1000)]}}},
    "address": {"guided_regex": r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"},
    "words": {"guided_regex": r"(\w+ )*\w+\."},
    "free text": {"guided_regex": ".*"},
    "choice": {"guided_choice": ["positive", "negative", "neutral"]},
}


def main() -> None:
    flags = _flags()
    vocabulary = vocabulary_of(Tokenizer.load(flags.folder), flags.vocab_size)
    short = np.fromiter((0 < len(piece) < 3 for piece in vocabulary.pieces), np.bool_, len(vocabulary.pieces))
    heads = ("compile ms", 11), ("rows", 7), ("p50 us", 9), ("p99 us", 9), ("max us", 10), ("cpu p99", 9)
    print(f"{'constraint':14}{'back end':12}" + "".join(f"{head:>{width}}" for head, width in heads))
    everything: dict[str, list[tuple[float, float]]] = {}
    for make in (LlguidanceBackend, FsmBackend):
        backend: Backend = make(vocabulary)
        for name, fields in CONSTRAINTS.items():
            measured = measure(backend, fields, short, flags.texts, flags.tokens)
            if measured is not None:
                seconds, rows = measured
                everything.setdefault(backend.name, []).extend(rows)
                print(f"{name:14}{backend.name:12}{seconds * 1e3:11.1f}{_columns(rows)}", flush=True)
    for backend_name, rows in everything.items():
        print(f"{'all':14}{backend_name:12}{'':11}{_columns(rows)}")
    _batches(LlguidanceBackend(vocabulary), short, flags.tokens)


def measure(
    backend: Backend, fields: dict[str, object], short: np.ndarray, texts: int, tokens: int
) -> tuple[float, list[tuple[float, float]]] | None:
    """(seconds to compile, (seconds, processor seconds) of each row); None where the constraint is not taken."""
    constraint, row = constraint_of(fields), np.zeros(backend.vocabulary.words, np.int32)
    assert constraint is not None
    began = time.perf_counter()
    try:
        ready = backend.compile(constraint, time.monotonic() + 60)
    except ConstraintError:
        return None
    compiled_in, rows = time.perf_counter() - began, list[tuple[float, float]]()
    for seed in range(texts):
        rng, matcher = random.Random(seed), ready.matcher()
        for _ in range(tokens):
            began, worked = time.perf_counter(), time.thread_time()
            try:
                matcher.fill_mask(row)
            except MatcherError as error:
                print(f"  a text ended early: {error}")
                break
            rows.append((time.perf_counter() - began, time.thread_time() - worked))
            matcher.accept(_choice(row, short, rng))
            if matcher.is_done:
                break
    return compiled_in, rows


def _batches(backend: Backend, short: np.ndarray, steps: int) -> None:
    print(f"\n{f'batch of {BATCH}, ms a step':32}{'p50':>9}{'p99':>9}{'max':>9}{'mean':>9}")
    same, different = [profile(0)] * BATCH, [profile(number) for number in range(BATCH)]
    bounded = {"type": "array", "items": {"type": "string", "minLength": 5, "maxLength": 5}}
    for name, schemas in (("one schema", same), (f"{BATCH} schemas", different), ("short strings", [bounded] * BATCH)):
        times = batch(backend, schemas, short, steps)
        for part, seconds in zip(
            ("fill, wall", "fill, processor", "accept, wall"), zip(*times, strict=True), strict=True
        ):
            values = [*np.percentile(seconds, [50, 99, 100]), np.mean(seconds)]
            print(f"{f'{name}: {part}':32}" + "".join(f"{value * 1e3:9.2f}" for value in values), flush=True)


def profile(number: int) -> dict[str, object]:
    """The sample's schema; with a number above 0, one unlike all others."""
    schema = json.loads(json.dumps(CONSTRAINTS["profile"]["guided_json"]))
    if number:
        schema["properties"][f"note {number}"] = {"type": "string", "maxLength": 4 + number}
        schema["required"].append(f"note {number}")
    return cast(dict[str, object], schema)


def batch(
    backend: Backend, schemas: list[dict[str, object]], short: np.ndarray, steps: int
) -> list[tuple[float, float, float]]:
    """Seconds of each step: to fill, in wall and in processor time of all threads, and to accept. Texts begin anew."""
    known: dict[str, Compiled] = {}
    for schema in schemas:
        constraint = constraint_of({"guided_json": schema})
        assert constraint is not None
        known[json.dumps(schema)] = backend.compile(constraint, time.monotonic() + 60)
    ready = [known[json.dumps(schema)] for schema in schemas]
    matchers, rng, times = [one.matcher() for one in ready], random.Random(0), []
    masks = np.zeros((len(ready), backend.vocabulary.words), np.int32)
    for _ in range(steps):
        began, worked = time.perf_counter(), time.process_time()
        errors = backend.fill_masks(matchers, masks, range(len(ready)))
        filled, worked = time.perf_counter() - began, time.process_time() - worked
        assert not any(errors)
        tokens = [_choice(row, short, rng) for row in masks]
        began = time.perf_counter()
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.accept(token)
        times.append((filled, worked, time.perf_counter() - began))
        matchers = [ready[index].matcher() if one.is_done else one for index, one in enumerate(matchers)]
    return times


def _choice(row: np.ndarray, short: np.ndarray, rng: random.Random) -> int:
    allowed = allowed_tokens(row)
    closing = allowed[short[allowed]]
    chosen = closing if len(closing) and rng.random() < 0.7 else allowed
    return int(chosen[rng.randrange(len(chosen))])


def _columns(rows: list[tuple[float, float]]) -> str:
    wall, worked = np.array(rows).T * 1e6
    middle, high, most = np.percentile(wall, [50, 99, 100])
    return f"{len(rows):7}{middle:9.1f}{high:9.1f}{most:10.1f}{np.percentile(worked, 99):9.1f}"


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab_size", type=int, default=151_936)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
