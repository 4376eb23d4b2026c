"""The vocabulary of Qwen2 (151,643 tokens), where its tokenizer lies beside the repository; random tokens."""

import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import allowed_tokens, vocabulary_of
from bladellm_runtime.text.tokenizer import Tokenizer
from tests.guided.samples import IPV4, PROFILE, compiled
from tests.guided.test_short_strings import follow

FOLDER = Path(__file__).parents[3] / "shared" / "tokenizers" / "qwen2"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ../shared/tokenizers/qwen2")]


@pytest.mark.parametrize(
    "fields", [{"guided_json": json.dumps(PROFILE)}, {"guided_regex": IPV4}], ids=["json", "regex"]
)
def test_random_tokens_satisfy_the_sample_client(fields: dict) -> None:
    tokenizer = Tokenizer.load(FOLDER)
    vocabulary = vocabulary_of(tokenizer, 151_936)
    ready, ended = compiled(LlguidanceBackend(vocabulary), **fields), 0
    for seed in range(20):
        rng, matcher, row, tokens = random.Random(seed), ready.matcher(), np.zeros(vocabulary.words, np.int32), []
        while not matcher.is_done and len(tokens) < 2000:
            matcher.fill_mask(row)
            allowed = allowed_tokens(row)
            closing = [token for token in (1, 92, 60, 13, 25, 11) if row[token // 32] >> (token % 32) & 1]
            token = rng.choice(closing) if closing and rng.random() < 0.5 else int(allowed[rng.randrange(len(allowed))])
            assert matcher.accept(token)
            tokens.append(token)
        if not matcher.is_done:
            continue
        ended += 1
        text = tokenizer.decode(tokens)
        if "guided_regex" in fields:
            assert re.fullmatch(IPV4, text)
        else:
            jsonschema.validate(json.loads(text), PROFILE)
    assert ended > 3


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string", "maxLength": 12}},
        {"type": "array", "items": {"type": "string", "pattern": "[a-z]cole", "minLength": 6}},
        {"type": "array", "items": {"type": "string", "format": "uri"}},
    ],
    ids=["short", "pattern", "format"],
)
def test_rows_are_the_librarys(schema: dict) -> None:
    rng = random.Random()
    backend = LlguidanceBackend(vocabulary_of(Tokenizer.load(FOLDER), 151_936))
    assert (follow(backend, schema, rng, 60) > 20) == ("maxLength" in schema["items"])
