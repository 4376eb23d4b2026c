import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bladellm_runtime.text.stop import StopMatcher

texts = st.text("ab😀", max_size=40)
stop_lists = st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=4)


def expected(text, stops, include):
    """The definition: check after every character; the longest stop string that ends there counts."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces, stops, include):
    matcher, out = StopMatcher(stops, include), ""
    for piece in pieces:
        safe, stop = matcher.feed(piece)
        out += safe
        if stop is not None:
            return out, stop
    return out + matcher.flush(), None


@given(st.lists(texts, max_size=12), stop_lists, st.booleans())
@example(["a", "b"], ["ab", "b"], False)
@example(["aab"], ["ab", "aab"], False)
@example(["ab"], ["abba", "b"], False)
def test_cuts_like_the_definition_however_the_text_is_split(pieces, stops, include):
    assert run(pieces, stops, include) == expected("".join(pieces), stops, include)


@given(texts, stop_lists)
def test_holds_back_exactly_what_may_become_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    out = ""
    for end, char in enumerate(text, start=1):
        safe, stop = matcher.feed(char)
        if stop is not None:
            return
        out += safe
        seen = text[:end]
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert out == seen[: end - longest]


def test_holds_nothing_back_when_the_stop_string_is_shown():
    matcher = StopMatcher(["abc"], include=True)
    assert matcher.feed("xab") == ("xab", None)
    assert matcher.feed("cd") == ("c", "abc")
    assert matcher.flush() == ""


def test_a_stop_string_that_does_not_count_yet_passes():
    matcher = StopMatcher(["ab", "bcd"])
    assert matcher.feed("xab", armed=False) == ("x", None)
    assert matcher.feed("cd") == ("a", "bcd")
    matcher = StopMatcher(["ab"])
    assert matcher.feed("a", armed=False) == ("", None)
    assert matcher.feed("b") == ("", "ab")


@pytest.mark.parametrize(
    ("stops", "unit"),
    [(["a" * 1023 + "b"], "a"), (["ab" * 511 + "c", "ab" * 500 + "d", "ba" * 512, "b" * 1024], "ab")],
)
def test_time_is_linear_for_the_worst_stop_strings(stops, unit):
    # A matcher that starts again at every character would need 10^9 steps here.
    matcher = StopMatcher(stops)
    begin = time.perf_counter()
    for _ in range(100):
        matcher.feed(unit * (10_000 // len(unit)))
    assert time.perf_counter() - begin < 20
