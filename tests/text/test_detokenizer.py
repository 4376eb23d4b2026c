import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.text.detokenizer import Detokenizer
from tests.text.samples import any_text, demo, sentencepiece, split_randomly

TOKENIZERS = [demo, sentencepiece, lambda: sentencepiece("metaspace")]
token_ids = st.lists(st.integers(0, 300) | st.integers(0, 8200), max_size=60)


def stream(tokenizer, ids, seed, skip=True, at_start=True):
    detokenizer = Detokenizer(tokenizer, skip, at_start)
    return [detokenizer.feed(piece) for piece in split_randomly(ids, seed)], detokenizer.flush()


@given(token_ids, st.integers(0, 9), st.booleans())
def test_random_tokens_give_the_full_decode(ids, seed, skip):
    texts, rest = stream(demo(), ids, seed, skip)
    assert "".join(texts) + rest == demo().decode(ids, skip)


@pytest.mark.parametrize("make", TOKENIZERS)
@given(any_text, st.integers(0, 9), st.booleans())
def test_random_text_gives_the_full_decode(make, text, seed, skip):
    ids = make().encode(text)
    texts, rest = stream(make(), ids, seed, skip)
    assert "".join(texts) + rest == make().decode(ids, skip)
    assert not rest
    if "�" not in text:
        assert "�" not in "".join(texts)


@pytest.mark.parametrize("make", [*TOKENIZERS, lambda: sentencepiece("old decoder")])
@given(any_text.filter(bool), any_text, st.booleans())
def test_an_answer_is_the_text_after_the_prompt(make, prompt, answer, skip):
    before, after = make().encode("x" + prompt), make().encode(answer)
    texts, rest = stream(make(), after, 0, skip, at_start=False)
    assert make().decode(before + after, skip) == make().decode(before, skip) + "".join(texts) + rest


@given(st.binary(max_size=40))
def test_random_bytes_are_decoded_as_a_whole(data):
    texts, rest = stream(sentencepiece(), [3 + byte for byte in data], 1, at_start=False)
    assert "".join(texts) + rest == data.decode(errors="replace")


@pytest.mark.parametrize("make", TOKENIZERS)
def test_an_emoji_over_several_tokens_comes_at_once(make):
    ids = make().encode("a👩🏽‍🚀b")
    detokenizer = Detokenizer(make())
    texts = [detokenizer.feed([token]) for token in ids]
    assert "".join(texts).lstrip() == "a👩🏽‍🚀b"
    assert "" in texts
    assert all("�" not in text for text in texts)


def test_flush_shows_an_unfinished_character():
    detokenizer = Detokenizer(sentencepiece())
    assert detokenizer.feed([3 + 0xF0, 3 + 0x9F]) == ""
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_impossible_bytes_are_not_held_back():
    detokenizer = Detokenizer(sentencepiece())
    assert detokenizer.feed([3 + 0xFF]) == "�"
    assert detokenizer.feed([3 + 0xF0] * 1000) == "�" * 999


def test_special_tokens_are_skipped_or_shown_also_inside_a_character():
    end = demo().encode("<|im_end|>")
    first, *rest = demo().encode("\U0001f9ff")
    assert Detokenizer(demo(), True).feed([first, *end, *rest]) == "\U0001f9ff"
    assert Detokenizer(demo(), False).feed(end) == "<|im_end|>"


@settings(max_examples=20)
@given(token_ids)
def test_padding_ids_of_the_model_have_no_text(ids):
    padded = [token for pair in zip(ids, [100_000] * len(ids), strict=True) for token in pair]
    assert stream(demo(), padded, 0)[0] is not None
    assert "".join(stream(demo(), padded, 3)[0]) == "".join(stream(demo(), ids, 5)[0])
