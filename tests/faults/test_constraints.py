"""Rows 25 to 30 of the fault table: constraints that are wrong, hostile, many, or lead nowhere."""

import itertools
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.asking import BOTH_ROUTES, CHAT, COMPLETIONS, ask, refused, text_of
from tests.faults.conftest import GUIDED_CACHE_MIB
from tests.guided.answers import check_answer
from tests.guided.samples import IPV4
from tests.support.live import LiveServer, OpenStream

pytestmark = pytest.mark.usefixtures("beside")
COMPILE_SECONDS = 5.0
"""The deadline of compilations; an answer takes little longer."""


def refused_constraint(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    """The error of a constraint that must be refused, naming the field and soon enough."""
    began = time.monotonic()
    error = refused(server, path, **fields)
    assert time.monotonic() - began < 2 * COMPILE_SECONDS + 2  # asked twice, streamed and not
    assert error["param"] in fields
    assert error["code"] == "constraint_refused"
    assert len(error["message"]) > 20
    return error


def constrained(server: LiveServer, path: str = COMPLETIONS, *, max_tokens: int = 60, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of an answer that must keep to its constraint."""
    answer = text_of(ask(server, path, max_tokens=max_tokens, temperature=1, seed=random.randrange(2**60), **fields))
    check_answer(fields, *answer)
    return answer


@BOTH_ROUTES
def test_row_25_two_constraints(server, path):
    error = refused_constraint(server, path, guided_json={"type": "object"}, guided_regex="a+")
    assert "guided_json and guided_regex" in error["message"]
    refused_constraint(server, path, guided_choice=["a"], response_format={"type": "json_object"})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


NOT_SCHEMAS = ("{", "", "not json", '{"type": "object"', "true", True, "[1]", [1], 5, "5", '{"a": NaN}',
               '{"a":1,"a":2}', {"type": "foo"}, {"properties": 3}, '{"const": "\\ud800"}')  # fmt: skip
UNSATISFIABLE = (
    {"type": "integer", "minimum": 5, "maximum": 4}, {"type": "string", "enum": [1]}, {"not": {}},
    {"type": "string", "minLength": 3, "maxLength": 2}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
)  # fmt: skip


def test_row_26_what_is_not_a_schema_or_has_no_text(server):
    for schema in (*NOT_SCHEMAS, *UNSATISFIABLE):
        refused_constraint(server, COMPLETIONS, guided_json=schema)
    for schema in UNSATISFIABLE[:2]:
        holder = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        refused_constraint(server, CHAT, response_format=holder)


def test_row_26_recursion_with_an_end_is_served(server):
    tree = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constrained(server, guided_json=tree)


def test_row_26_a_remote_reference_is_not_followed(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        for schema in ({"$ref": url}, {"$schema": url, "items": {"$ref": f"{url}#/a"}}, {"$ref": "file:///etc/passwd"}):
            assert "leads out" in refused_constraint(server, COMPLETIONS, guided_json=schema)["message"]
        with pytest.raises(TimeoutError):
            listener.accept()


@BOTH_ROUTES
def test_row_26_too_large_and_too_deep(server, path):
    for schema in (
        json.dumps({"enum": ["x" * 900_000]}),
        {"enum": ["x" * 900_000]},
        {"properties": {f"p{number}": {} for number in range(20_000)}},
        json.dumps(nested(65)),
        "[" * 60_000,
        {"const": "x" * 2**16},
    ):
        refused_constraint(server, path, guided_json=schema)
    assert refused(server, path, guided_json=nested(65))["code"] == "body_too_complex"
    assert refused(server, path, status=413, guided_json="x" * 5_000_000)


REGEXES = ("(a", "[a", "a**", "a{3,1}", ".{1,100000}", "(?<=a)b", "(?<!a)b", "(?=a)b", r"(a)\1", r"(?P<n>a)(?P=n)",
           "a\0b", r"\x00", r"\q", "", 5, ["a"], "a" * 20_000, "((((a{1,5000}){1,5000}){1,5000}){1,5000})")  # fmt: skip


def test_row_27_expressions_that_are_refused(server):
    for pattern in REGEXES:
        refused_constraint(server, COMPLETIONS, guided_regex=pattern)


def test_row_27_cheap_ones_are_served(server):
    for pattern in ("(a+)+b", "[ab]*a[ab]{13}", "(a|a)*b", "(x+x+)+y", IPV4):
        began = time.monotonic()
        constrained(server, guided_regex=pattern, max_tokens=24)
        assert time.monotonic() - began < COMPILE_SECONDS


def heavy_schema() -> dict[str, Any]:
    """It compiles for half a second; no two are the same."""
    names = ["".join(random.choices("cdefgh", k=6)) for _ in range(180)]
    return {"type": "object", "patternProperties": {f"^{name}[ab]*a[ab]{{9}}": {"type": "integer"} for name in names}}


def longest_gap(arrivals: list[float], start: float, end: float) -> float:
    inside = [start, *(time for time in arrivals if start < time < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(inside))


def test_row_27_others_get_their_tokens_while_a_constraint_compiles(server):
    stream = OpenStream(server, {"prompt": "Once upon a time", "max_tokens": 3900, "ignore_eos": True})
    arrivals: list[float] = []

    def read() -> None:
        while stream.response.readline():
            arrivals.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert any(goes_on(server, arrivals) for _ in range(4)), "no token came while constraints were compiled"
    finally:
        stream.abandon()
        reader.join()
        stream.close()


def goes_on(server: LiveServer, arrivals: list[float]) -> bool:
    """Whether tokens keep coming in while a constraint compiles, which is most of the time that its answer takes."""
    start = time.monotonic()
    ask_with(server, heavy_schema())
    end = time.monotonic()
    return longest_gap(arrivals, start, end) < (end - start) / 2


def test_row_35_a_client_leaves_while_its_constraint_compiles(server):
    """The engine is idle soon, and the next one who asks for the same finds it compiled."""
    schema = heavy_schema()
    for _ in range(3):
        stream = OpenStream(server, {"prompt": "Hi", "guided_json": schema, "max_tokens": 3900})
        stream.close()
    ask_with(server, schema)


@pytest.mark.slow
def test_the_back_end_of_automata_refuses_what_it_has_not():
    with LiveServer("real", kv_cache_gib=0.0625, guided_backend="fsm") as server:
        constrained(server, guided_regex=IPV4)
        constrained(server, guided_choice=["red", "green"])
        for fields in ({"guided_json": {}}, {"guided_grammar": 'start: "a"'}, {"guided_regex": "(?=a)b"}):
            refused_constraint(server, COMPLETIONS, **fields)


def distinct_schema(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [1, pytest.param(167, marks=pytest.mark.slow)])
def test_row_28_many_distinct_schemas(server, rounds):
    """Rounds of 60 schemas, twice what the cache holds, beside a text under way, which keeps its own."""
    for _ in range(rounds):
        salt = random.randrange(10**15)
        kept = {"type": "array", "items": {"const": f"kept {salt}"}, "minItems": 2000}
        live = OpenStream(server, {"prompt": "Hi", "guided_json": kept, "max_tokens": 3900})
        live.read(1)
        before = server.metrics()
        with ThreadPoolExecutor(4) as threads:
            for first in range(0, 60, 15):
                schemas = [distinct_schema(salt + first + number) for number in range(15)]
                list(threads.map(lambda schema: ask_with(server, schema), schemas))
                assert server.metrics()["blade_llm:guided_cache_bytes"] <= GUIDED_CACHE_MIB * 2**20
        middle = server.metrics()
        assert middle["blade_llm:guided_misses_total"] - before["blade_llm:guided_misses_total"] == 60
        ask_with(server, kept)
        after = server.metrics()
        live.close()
        assert after["blade_llm:guided_misses_total"] == middle["blade_llm:guided_misses_total"], "it was evicted"
        assert after["blade_llm:guided_hits_total"] == middle["blade_llm:guided_hits_total"] + 1


def ask_with(server: LiveServer, schema: dict[str, Any]) -> None:
    """Two tokens of an answer, of which the test does not look at the text."""
    assert text_of(ask(server, COMPLETIONS, guided_json=schema, max_tokens=2))[1] in ("length", "stop")


def test_row_29_a_constraint_that_leads_nowhere_ends_its_own_request_only(fake_server):
    """The back end gives such an expression up after some tokens."""
    letter = random.choice("cdefghijklm")
    pattern = f"(?:(?:(?:{letter}b?){{1,99}}){{1,99}}){{{random.randint(90, 99)}}}"
    chunks = fake_server.stream(COMPLETIONS, {"prompt": "Hi", "guided_regex": pattern, "max_tokens": 400})
    error = chunks[-1]["error"]
    assert (error["code"], error["type"], error["param"]) == ("constraint_failed", "server_error", None)
    assert not any("error" in chunk for chunk in chunks[:-1])
    constrained(fake_server, guided_regex="[ab]{3}")


def test_row_30_a_text_without_an_end_is_cut(server):
    for fields in ({"guided_regex": r"a[^\n]{2000,}"}, {"guided_json": {"type": "string", "minLength": 2000}}):
        assert constrained(server, max_tokens=30, **fields)[1] == "length"
    text, finish = constrained(server, guided_regex=".*", max_tokens=30)
    assert finish in ("stop", "length")
    assert "\n" not in text
