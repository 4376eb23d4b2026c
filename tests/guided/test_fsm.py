"""The automaton against Python's `re` on random texts, and its mask rows against llguidance's, bit for bit."""

import random
import re
import time

import numpy as np
import pytest

from bladellm_runtime.guided.backend import MatcherError
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.fsm.automaton import AutomatonError, automaton, utf8_ranges
from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.regex_syntax import full_match, search
from bladellm_runtime.guided.vocabulary import allowed_tokens, forced_token
from tests.guided.samples import IPV4, compiled, spelled

ALPHABET = "ab1.é日-\n "
ATOMS = ("a", "b", "1", r"\.", "é", "日", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"[^\d\s]", "[a-cé-日]", r"\S", "-")


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(6) if depth else 0
    if kind <= 1:
        return "".join(rng.choice(ATOMS) for _ in range(rng.randint(1, 3)))
    if kind == 2:
        return "|".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3)))
    if kind == 3:
        return random_pattern(rng, depth - 1) + random_pattern(rng, depth - 1)
    suffix = rng.choice(("*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}?"))
    return f"({rng.choice(('', '?:'))}{random_pattern(rng, depth - 1)}){suffix}"


def takes(pattern: str, text: str, searching: bool) -> bool:
    machine = automaton(search(pattern) if searching else full_match(pattern), time.monotonic() + 20)
    state = 0
    for byte in text.encode():
        state = int(machine.table[state, byte])
        if state < 0:
            return False
    return bool(machine.accepting[state])


def check_against_re(seeds: range) -> None:
    """Patterns that need too many states may be refused, if they are few."""
    refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        pattern = random_pattern(rng, 1)
        anchored = rng.choice(("{}", "^(?:{})$", "^(?:{})", "(?:{})$")).format(pattern)
        for _ in range(6):
            text = "".join(rng.choice(ALPHABET.replace("\n", "")) for _ in range(rng.randint(0, 6)))
            try:
                taken, found = takes(pattern, text, False), takes(anchored, text, True)
            except AutomatonError:
                refused += 1
                break
            assert taken == bool(re.fullmatch(pattern, text, re.ASCII)), (pattern, text)
            assert found == bool(re.search(anchored, text, re.ASCII)), (anchored, text)
    assert refused <= len(seeds) / 20


def check_rows(fsm: FsmBackend, llguidance: LlguidanceBackend, seeds: range) -> None:
    """Both back ends along one random text: the same rows, ends and refusals, and after going back again."""
    (ours, theirs), refused = np.zeros((2, fsm.vocabulary.words), np.int32), 0
    for seed in seeds:
        rng = random.Random(seed)
        pattern = random_pattern(rng)
        try:
            first, second = (compiled(backend, guided_regex=pattern).matcher() for backend in (fsm, llguidance))
        except ConstraintError:
            refused += 1
            continue
        for _ in range(rng.randint(1, 12)):
            first.fill_mask(ours)
            second.fill_mask(theirs)
            assert np.array_equal(ours, theirs), pattern
            assert (first.is_done, first.may_end) == (second.is_done, second.may_end), pattern
            stray = rng.randrange(len(fsm.vocabulary.pieces))
            if not ours[stray // 32] >> (stray % 32) & 1:
                assert not first.accept(stray)
                assert not second.accept(stray)
            token = int(rng.choice(allowed_tokens(ours)))
            assert first.accept(token)
            assert second.accept(token)
            if token in fsm.vocabulary.end_ids:
                assert first.is_done
                assert second.is_done
                first.rollback(1)
                second.rollback(1)
    assert refused <= len(seeds) / 20


def test_texts_are_taken_as_by_re() -> None:
    check_against_re(range(60))


def test_rows_equal_those_of_llguidance(fsm: FsmBackend, llguidance: LlguidanceBackend) -> None:
    check_rows(fsm, llguidance, range(150))


@pytest.mark.slow
def test_rows_and_texts_of_many_patterns(fsm: FsmBackend, llguidance: LlguidanceBackend) -> None:
    check_rows(fsm, llguidance, range(1000, 3000))
    check_against_re(range(1000, 2000))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0x10FFFF), (0x41, 0x7FF), (0x7F, 0x80), (0xE000, 0xFFFE), (0x3B1, 0x1F600)]
)
def test_utf8_ranges_are_the_characters(low: int, high: int) -> None:
    for code in {low, high, (low + high) // 2, low + 1, high - 1, 0x800, 0xFFFF, 0x10000, 0x10FFFF, 0x7E}:
        if 0xD800 <= code <= 0xDFFF:
            continue
        text = chr(code).encode()
        parts = [
            part
            for a, b in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high))
            if a <= b
            for part in utf8_ranges(a, b)
        ]
        fits = [
            len(part) == len(text) and all(a <= byte <= b for byte, (a, b) in zip(text, part, strict=False))
            for part in parts
        ]
        assert sum(fits) == (low <= code <= high)


def test_an_address_and_choices(fsm: FsmBackend, llguidance: LlguidanceBackend) -> None:
    for backend in (fsm, llguidance):
        address = compiled(backend, guided_regex=IPV4)
        assert [spelled(address.matcher(), text) for text in (b"192.168.0.1", b"256.1.1.1", b"1.2.3", b"")] == [
            True, False, False, False,
        ]  # fmt: skip
        choice = compiled(backend, guided_choice=["yes", "yes.", "(no|a)*"])
        assert [spelled(choice.matcher(), text) for text in (b"yes", b"yes.", b"(no|a)*", b"no", b"yesx", b"ye")] == [
            True, True, True, False, False, False,
        ]  # fmt: skip


def test_the_only_allowed_token_is_forced(fsm: FsmBackend) -> None:
    row = np.zeros(fsm.vocabulary.words, np.int32)
    for text in ("1", "\x7f", "z"):
        compiled(fsm, guided_choice=[text]).matcher().fill_mask(row)
        assert forced_token(row) == 10 + ord(text)
    compiled(fsm, guided_choice=["x", "z"]).matcher().fill_mask(row)
    assert forced_token(row) is None
    row[:] = 0
    row[3] = -(2**31)
    assert forced_token(row) == 127


def test_rows_stay_within_their_bytes(fsm: FsmBackend) -> None:
    small = FsmBackend(fsm.vocabulary, row_bytes=5 * 4 * fsm.vocabulary.words)
    matcher, row = compiled(small, guided_regex="[a-c]{40}").matcher(), np.zeros(fsm.vocabulary.words, np.int32)
    for _ in range(40):
        matcher.fill_mask(row)
        assert small.rows.byte_count <= small.rows.max_bytes
        assert matcher.accept(10 + ord("b"))


def test_a_vocabulary_without_the_wanted_bytes_ends_only_the_request(fsm: FsmBackend) -> None:
    from bladellm_runtime.guided.vocabulary import Vocabulary

    lacking = FsmBackend(Vocabulary((b"", b"a"), (0,)))
    matcher = compiled(lacking, guided_regex="ab").matcher()
    assert matcher.accept(1)
    with pytest.raises(MatcherError):
        matcher.fill_mask(np.zeros(1, np.int32))


@pytest.mark.parametrize(
    "pattern", ["[ab]*a[ab]{13}", "(?:(?:a?){99}){99}", "((a{1,100}){1,100}){1,100}", r"(\w{1,300}){9}"]
)
def test_what_explodes_is_refused_soon(fsm: FsmBackend, pattern: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConstraintError):
        compiled(fsm, guided_regex=pattern)
    assert time.monotonic() - began < 5


def test_schemas_need_the_other_back_end(fsm: FsmBackend) -> None:
    with pytest.raises(ConstraintError, match="llguidance"):
        compiled(fsm, guided_json={"type": "object"})
