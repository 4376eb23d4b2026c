"""Tokens of parts are those of the whole, for every tokenizer that is taken apart, and others are left whole."""

import functools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bladellm_runtime.text.text_cuts import PATTERNS, TextCuts, parts_of
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.text.samples import DEMO, any_text, demo, sentencepiece_backend

NFC = normalizers.NFC()
LLAMA3 = next(pattern for pattern in PATTERNS if "{1,3}" in pattern)
PIECES = [
    "a", "Z", "he's", "'", "'ll", "ſ", "\u212a", "é", "e\u0301", "\u0301", "你好", "好", "，", "。", "、", " ", "  ",
    "\u3000", "\xa0", "\n", "\r\n", "\t", "7", "1234", "!", "?!\n", "-", "_", "😀", "<|im_end|>", "<|im_start|>user\n",
    "ı", "ª", "\u0345",
]  # fmt: skip


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WORDS = {"GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False)} | {
    f"pattern {index}": by_pattern(pattern) for index, pattern in enumerate(sorted(PATTERNS))
}


@functools.cache
def backend_of(words: str, normalizes: bool = False) -> Backend:
    """The demo model's vocabulary behind other words."""
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    backend.pre_tokenizer = WORDS[words]
    if normalizes:
        backend.normalizer = NFC
    return backend


def parts_ids(backend: Backend, text: str, characters: int) -> list[int]:
    parts = parts_of(text, characters, len(text) + 1)
    assert "".join(parts) == text
    return [token for part in parts for token in backend.encode(part, add_special_tokens=False).ids]


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("words", WORDS)
@given(text=st.lists(st.sampled_from(PIECES), max_size=60).map("".join) | any_text, characters=st.integers(1, 5))
@example(text="he said it's 好，好 then", characters=1)
def test_parts_have_the_tokens_of_the_whole(words, normalizes, text, characters):
    backend = backend_of(words, normalizes)
    assert parts_ids(backend, text, characters) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("words", WORDS)
def test_each_pair_of_characters_may_stand_beside_a_cut(words):
    """Letters of many scripts, marks and all kinds of white space before and behind both sides of every cut."""
    rng, backend = random.Random(0), backend_of(words)
    common = [chr(code) for code in [*range(0x20, 0x250), *range(0x300, 0x370), *range(0x2000, 0x2070), 0x1F600]]
    for _ in range(300):
        text = "".join(rng.choices([*common, *"aZ好是" * 30, *" ，。、" * 30], k=200))
        assert parts_ids(backend, text, 1) == backend.encode(text, add_special_tokens=False).ids


def test_there_are_cuts_in_prose():
    prose = "A sentence of some words, which goes on for a while. " * 100
    assert [round(len(part), -2) for part in parts_of(prose, 1000, 16)] == [1000, 1000, 1000, 1000, 1300]
    assert len(parts_of("这是一个句子，它有几个词。" * 1000, 1000, 4)) == 4


@pytest.mark.parametrize("text", ["", "a", "x" * 9000, " " * 9000, "1 2 3 " * 3000, "\n" * 9000])
def test_what_has_no_cuts_stays_whole(text):
    assert parts_of(text) == [text]


@pytest.mark.parametrize("length", [2047, 2048, 5000, 70_001])
def test_long_prompts_have_the_tokens_of_the_backend(length):
    rng = random.Random(length)
    words = ["the", "Ein", "don't", "好的，", "x7", "\n\n", "end.", "<|im_end|>", "  two", "É"]
    text = " ".join(rng.choices(words, k=length))[:length]
    for special in (False, True):
        expected = backend_of("GPT-2").encode(text, add_special_tokens=special).ids
        assert Tokenizer(backend_of("GPT-2")).encode(text, add_special_tokens=special) == expected


@pytest.mark.parametrize("template", ["<s> $A", "$A </s>", "<s> <s> $A </s>", "$A"])
def test_what_stands_around_a_text_stands_there_once(template):
    backend = Backend.from_str(backend_of("GPT-2").to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    text = "some words and more " * 500
    assert Tokenizer(backend).encode(text) == backend.encode(text).ids
    assert (
        Tokenizer(backend).encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
    )


def changed(**parts) -> Backend:
    backend = Backend.from_str(backend_of("GPT-2").to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def with_token(**options) -> Backend:
    backend = changed()
    backend.add_tokens([AddedToken(**options)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        sentencepiece_backend(),
        sentencepiece_backend("metaspace"),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(pre_tokenizer=by_pattern(r"\s?\w+|.")),
        changed(normalizer=normalizers.NFKC()),
        changed(normalizer=normalizers.Sequence([NFC, normalizers.Lowercase()])),
        with_token(content="end of turn"),
        with_token(content="of "),
        with_token(content="of，"),
        with_token(content="\u212a x", normalized=True),
        with_token(content="word", rstrip=True),
        with_token(content="word", lstrip=True),
        with_token(content="word", single_word=True),
    ],
)
def test_other_tokenizers_are_left_whole(backend):
    assert TextCuts.of(backend) is None
    text = "the end of turn is a word " * 400
    assert Tokenizer(backend).encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("content", ["<|im_end|>", "end", " turn", "好"])
def test_tokens_that_no_cut_divides_do_not_keep_a_tokenizer_whole(content):
    backend = with_token(content=content)
    assert TextCuts.of(backend) is not None
    text = "the end of turn is 好 a word" * 40
    assert parts_ids(backend, text, 1) == backend.encode(text, add_special_tokens=False).ids


def test_the_tokenizer_of_the_demo_is_one_of_those():
    assert TextCuts.of(Backend.from_file(str(DEMO / "tokenizer.json"))) is not None
    assert LLAMA3.replace("{1,3}", "") in PATTERNS
    assert demo().encode("so " * 5000) == Backend.from_file(str(DEMO / "tokenizer.json")).encode("so " * 5000).ids
