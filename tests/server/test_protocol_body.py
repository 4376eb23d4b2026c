"""parse_body: what a hostile client may send, and what must come through unchanged."""

import json
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.server import body as body_module
from bladellm_runtime.server.body import parse_body
from bladellm_runtime.server.errors import ApiError

MIB = 1 << 20
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\[]{}:,\x00'), max_size=12)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=5)


def refused(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(raw)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    assert len(caught.value.body()) < 1000
    return caught.value


def parsed_or_error(raw: bytes) -> dict | ApiError:
    try:
        return parse_body(raw)
    except ApiError as error:
        return error


@given(OBJECTS, st.booleans())
def test_a_valid_object_comes_through_unchanged(value, ascii_only):
    assert parse_body(json.dumps(value, ensure_ascii=ascii_only).encode()) == value
    assert parse_body(json.dumps(value, indent=3).encode()) == value


@pytest.mark.parametrize(("raw", "place"), [(b'{"prompt": "\xff"}', 12), ("{}".encode("utf-16"), 0)])
def test_bytes_that_are_not_utf_8_are_called_that(raw, place):
    assert refused(raw).message == f"The request body is not valid UTF-8 at byte {place}"


@given(OBJECTS, TEXT, VALUES, st.data())
def test_a_duplicate_key_is_refused_at_any_depth(value, key, inner, data):
    twice = f"{{{json.dumps(key)}: {json.dumps(inner)}, {json.dumps(key, ensure_ascii=False)}: 1}}"
    marker = "\ue000duplicate"
    holder = data.draw(st.sampled_from(["object", "list", "top"]))
    if holder == "top":
        assert refused(twice.encode()).code == "duplicate_key"
        return
    outer = {**value, marker: marker if holder == "object" else [1, marker]}
    raw = json.dumps(outer, ensure_ascii=False)
    place = raw.rindex(json.dumps(marker, ensure_ascii=False))
    raw = raw[:place] + twice + raw[place + len(marker) + 2 :]
    assert refused(raw.encode()).code == "duplicate_key"


@given(OBJECTS, st.data())
def test_a_truncated_document_is_refused(value, data):
    raw = json.dumps(value).encode()
    refused(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(st.binary(max_size=60))
def test_random_bytes_raise_nothing_but_400(raw):
    result = parsed_or_error(raw)
    assert isinstance(result, dict) or result.status == 400


@pytest.mark.parametrize("depth", [1, 2, 63, 64, 65, 66, 1023, 10_000, 1_000_000])
@pytest.mark.parametrize("pair", ["[]", "{}", "mixed"])
def test_depth_limit_is_exact(depth, pair):
    opening = {"[]": "[", "{}": '{"k":', "mixed": '[{"k":'}[pair]
    closing = {"[]": "]", "{}": "}", "mixed": "}]"}[pair]
    levels = len(closing)
    inner = opening * ((depth - 1) // levels) + "0" + closing * ((depth - 1) // levels)
    actual = 1 + (depth - 1) // levels * levels
    raw = f'{{"a": {inner}, "b": "]]]]}}}}[[[["}}'.encode()
    if actual <= 64:
        assert parse_body(raw)["b"] == "]]]]}}[[[["
    else:
        refused(raw)


def test_brackets_in_text_are_only_text():
    text = '{["\\' * 50_000
    assert parse_body(orjson.dumps({"prompt": text}))["prompt"] == text


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 10**6, "0x10", "01", "+1", ".5"])
def test_numbers_json_does_not_have_are_refused(literal):
    refused(f'{{"temperature": {literal}}}'.encode())


@pytest.mark.parametrize(
    "raw",
    [b"", b"  \n", b"null", b"1", b'"text"', b"[]", b'[{"a":1}]', b'{"a":1} x', b'{"a":1,}', b"{'a':1}",
     b'{"a":"\xff"}', b'{"a":"\\ud800"}', b'{"a":"\\udc00\\ud800"}', b"\xef\xbb\xbf{}", b'{"a":"\n"}'],
)  # fmt: skip
def test_other_documents_are_refused(raw):
    refused(raw)


def test_nul_and_astral_characters_are_text():
    assert parse_body(b'{"a":"\\u0000\\ud83d\\ude00"}') == {"a": "\0😀"}


HOSTILE = {
    "objects": lambda: b'{"a":[' + b"{}," * (8 * MIB // 3) + b"0]}",
    "deep": lambda: b"[" * (4 * MIB) + b"]" * (4 * MIB),
    "half deep": lambda: b"[" * (8 * MIB),
    "wide and deep": lambda: b'{"a":[' + (b"[" * 60 + b"]" * 60 + b",") * (8 * MIB // 121) + b"0]}",
    "keys": lambda: b"{" + b",".join(b'"%x":0' % number for number in range(MIB)) + b"}",
    "same key": lambda: b"{" + b",".join([b'"a":0'] * MIB) + b"}",
    "digits": lambda: b'{"a":' + b"1" * (8 * MIB) + b"}",
    "escapes": lambda: b'{"a":"' + b"\\n" * (4 * MIB) + b'"}',
    "escaped quotes": lambda: b'{"a":"' + b'\\"' * (4 * MIB) + b'"}',
    "quoted brackets": lambda: b'{"a":[' + b'"[",' * (2 * MIB) + b"0]}",
    "one digit tokens": lambda: b'{"a":[' + b"1," * (4 * MIB) + b"0]}",
    "text": lambda: b'{"a":"' + b"x y " * (2 * MIB) + b'"}',
}


def cpu_seconds(raw: bytes) -> float:
    """CPU time of one parse, the best of three."""
    best = 9.0
    for _ in range(3):
        start = time.thread_time()
        result = parsed_or_error(raw)
        best = min(best, time.thread_time() - start)
        assert isinstance(result, dict) or len(result.body()) < 1000
    return best


@pytest.mark.turns
@pytest.mark.parametrize("name", HOSTILE)
def test_eight_mebibytes_cost_no_more_than_a_fraction_of_a_second(name):
    # A wide bound: this catches a quadratic path, not a slow machine.
    assert cpu_seconds(HOSTILE[name]()) < 0.5


def test_deep_long_and_repeated_documents_are_refused_within_100_ms():
    for raw in (b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}", b'{"a":' + b"1" * 10**6 + b"}", b'{"a":1,"a":2}'):
        refused(raw)
        assert cpu_seconds(raw) < 0.1


def test_limits_count_what_they_say():
    most = body_module.MAX_CONTAINERS
    assert parse_body(b'{"a":[' + b"{}," * (most - 2) + b"0]}")
    assert refused(b'{"a":[' + b"{}," * (most - 1) + b"0]}").code == "body_too_complex"
    keys = body_module.MAX_KEYS
    assert len(parse_body(b"{" + b",".join(b'"%x":0' % number for number in range(keys)) + b"}")) == keys
    assert refused(b"{" + b",".join(b'"%x":0' % number for number in range(keys + 1)) + b"}").code == "body_too_complex"
