import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.request import FinishReason
from bladellm_runtime.text.stream import TextStream
from bladellm_runtime.wire.messages import RequestDelta
from tests.text.samples import add_request, any_text, demo, sentencepiece

token_ids = st.lists(st.integers(0, 300) | st.integers(0, 8200) | st.just(100_000), max_size=60)


def follow(tokenizer, ids, skip, *, look_up):
    """The answer of these tokens in a stream at the start of a text, looked up where that may be, and how many were."""
    stream = TextStream(tokenizer, add_request([1], skip_special_tokens=skip))
    table, text, found = tokenizer.token_json(skip), "", 0
    for token in ids:
        said = table[token] if look_up and stream.independent else None
        if said is None:
            text += stream.feed(RequestDelta(1, [token])).text
        else:
            text += json.loads(said)
            found += 1
    return text + stream.feed(RequestDelta(1, [], FinishReason.LENGTH)).text, found


@pytest.mark.parametrize("make", [demo, sentencepiece, lambda: sentencepiece("metaspace")])
@given(token_ids, st.booleans())
def test_random_tokens_say_the_same_whether_looked_up_or_fed(make, ids, skip):
    assert follow(make(), ids, skip, look_up=True)[0] == follow(make(), ids, skip, look_up=False)[0]


@pytest.mark.parametrize("make", [demo, sentencepiece])
@given(any_text, st.booleans())
def test_random_texts_say_the_same_whether_looked_up_or_fed(make, text, skip):
    ids = make().encode(text, add_special_tokens=False)
    assert follow(make(), ids, skip, look_up=True)[0] == follow(make(), ids, skip, look_up=False)[0]


def test_every_token_of_plain_words_is_looked_up():
    ids = demo().encode("just some words, and no characters in pieces")
    assert follow(demo(), ids, True, look_up=True) == ("just some words, and no characters in pieces", len(ids))


def test_what_is_kept_stays_as_small_as_the_vocabulary():
    table = demo().token_json(True)
    assert [table[token] for token in (100_000, -1, 2**40)] == [None] * 3
    assert not {100_000, -1, 2**40} & set(table)


def test_special_tokens_and_half_characters_have_no_text_of_their_own():
    [end] = demo().encode("<|im_end|>")
    half = demo().encode("\U0001f9ff")[0]
    assert demo().token_json(True)[end] is None
    assert json.loads(demo().token_json(False)[end]) == "<|im_end|>"
    assert demo().token_json(False)[half] is None
