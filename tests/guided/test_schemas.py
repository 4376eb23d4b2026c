"""Random schemas, instances and numbers, and the public JSON-Schema test suite where it lies beside the repository:
nothing that `jsonschema`, the suite or exact arithmetic calls invalid is ever accepted."""

import json
import random
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest

from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from tests.guided.random_schemas import instance_near, random_schema, spellings
from tests.guided.samples import compiled, spelled

ROOT = Path(__file__).parents[2]
SUITE = ROOT.parent / "shared" / "json-schema-test-suite" / "tests" / "draft2020-12"
TOKENIZER = ROOT.parent / "shared" / "tokenizers" / "qwen2"
CHECKER = jsonschema.FormatChecker()


def check_random(llguidance: LlguidanceBackend, seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            ready = compiled(llguidance, guided_json=json.loads(json.dumps(schema)))
        except ConstraintError:
            counts["refused"] += 1
            continue
        counts["compiled"] += 1
        validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
        for _ in range(8):
            instance = instance_near(rng, schema)
            taken = any(spelled(ready.matcher(), text.encode()) for text in spellings(instance))
            valid = validator.is_valid(instance)
            assert valid or not taken, (seed, schema, instance)
            counts[f"{'valid' if valid else 'invalid'}, {'taken' if taken else 'not taken'}"] += 1
    return counts


def test_no_invalid_instance_of_a_random_schema_is_accepted(llguidance: LlguidanceBackend) -> None:
    counts = check_random(llguidance, range(250))
    assert counts["compiled"] > 100
    assert counts["valid, taken"] > 0.7 * (counts["valid, taken"] + counts["valid, not taken"])
    assert counts["invalid, not taken"] > 100


@pytest.mark.slow
def test_no_invalid_instance_of_many_random_schemas_is_accepted(llguidance: LlguidanceBackend) -> None:
    assert check_random(llguidance, range(10_000, 14_000))["compiled"] > 2000


def random_bounds(rng: random.Random) -> dict[str, float]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    values = [rng.randint(-(10**4), 10**4) / 10 ** rng.randint(0, 4) for _ in names]
    rounded = [round(value, rng.randint(1, 3)) if rng.random() < 0.7 else int(value) for value in values]
    return {name: value for name, value in zip(names, rounded, strict=True) if rng.random() < 0.5}


def holds(bounds: dict[str, float], value: Decimal) -> bool:
    fits = {
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "exclusiveMaximum": lambda bound: value < bound,
    }
    return all(fits[name](Decimal(repr(bound))) for name, bound in bounds.items())


def check_bounds(llguidance: LlguidanceBackend, seeds: range) -> Counter[str]:
    """Numbers at and around the bounds, written in several ways."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        bounds = random_bounds(rng)
        schema = rng.choice(({"allOf": [{"type": "number"}, bounds]}, {"type": "number", **bounds}))
        try:
            ready = compiled(llguidance, guided_json=json.loads(json.dumps(schema)))
        except ConstraintError:
            counts["refused"] += 1
            continue
        for bound in bounds.values():
            for step in ("0", "1", "-1", "0.1", "-0.1", "0.0000005", "-0.0000005", "0.5", "-0.5"):
                text = format(Decimal(repr(bound)) + Decimal(step), "f")
                for written in (text, text + ("0" if "." in text else ".0"), "0", "-0"):
                    taken = spelled(ready.matcher(), written.encode())
                    assert holds(bounds, Decimal(written)) or not taken, (seed, schema, written)
                    counts["taken" if taken else "not taken"] += 1
    return counts


def test_bounds_of_numbers_are_exact(llguidance: LlguidanceBackend) -> None:
    counts = check_bounds(llguidance, range(60))
    assert counts["taken"] > 200
    assert counts["not taken"] > 200


@pytest.mark.slow
def test_bounds_of_many_numbers_are_exact(llguidance: LlguidanceBackend) -> None:
    assert check_bounds(llguidance, range(10_000, 11_500))["taken"] > 8_000


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "1"),
        ({"type": "number", "minimum": -0.25, "exclusiveMaximum": 0}, "-0"),
        ({"allOf": [{"type": "number", "maximum": 0.5}, {"exclusiveMinimum": 0}]}, "0"),
    ],
)
def test_an_excluded_bound_stays_out(llguidance: LlguidanceBackend, schema: dict, text: str) -> None:
    assert not spelled(compiled(llguidance, guided_json=json.loads(json.dumps(schema))).matcher(), text.encode())
    near = f"{text}.1"
    assert spelled(compiled(llguidance, guided_json=schema).matcher(), near.encode())


@pytest.mark.slow
@pytest.mark.skipif(not SUITE.is_dir() or not TOKENIZER.is_dir(), reason="needs ../shared/json-schema-test-suite")
def test_no_invalid_instance_of_the_public_suite_is_accepted() -> None:
    script = ROOT / "recipes" / "benchmarks" / "guided_suite.py"
    done = subprocess.run([sys.executable, script, SUITE, TOKENIZER], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "| invalid, accepted | 0 |" in done.stdout
