"""The text of special tokens in constraints: it is written like any other text."""

import json
import random

import pytest

from bladellm_runtime.guided.fsm.backend import FsmBackend
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import Vocabulary, vocabulary_of
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.guided.samples import compiled, write

TEXTS = ("<|im_end|>", "<|im_end|>x", "a<|endoftext|>", "<|im_start|>user\n", "<<|pad|>|im_end|>")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(Tokenizer.load(DEMO), 8192, [2, 0])


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_special_token_is_text(vocabulary: Vocabulary, text: str) -> None:
    rng = random.Random()
    for backend in (LlguidanceBackend(vocabulary), FsmBackend(vocabulary)):
        constraint = compiled(backend, guided_choice=[text])
        assert write(constraint.matcher(), vocabulary, rng, 100) == text.encode()
    constant = compiled(LlguidanceBackend(vocabulary), guided_json={"const": text})
    answer = write(constant.matcher(), vocabulary, rng, 1000)
    assert answer is not None
    assert json.loads(answer) == text


def test_plain_text_has_no_special_tokens() -> None:
    tokenizer = Tokenizer.load(DEMO)
    for text in (*TEXTS, "plain <|im_ end|>", ""):
        ids = tokenizer.encode_plain(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.special_ids.isdisjoint(ids)
