"""The judge of tokens that differ: it takes the engine's own, of every kind of sampling, and no others."""

import random

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import build_engine
from tests.engine import reference
from tests.engine.test_step_graphs import drive, random_requests
from tests.engine.ties import ROUNDING, assert_alike, shortfalls


def test_tokens_of_the_engine_are_the_best_and_others_are_not(demo_model):
    engine = build_engine(EngineArgs(model=str(demo_model), device="cpu", dtype="float32", kv_cache_gib=0.05))
    requests = random_requests(random.Random(), 16, engine.ready.vocab_size)
    in_turn = random.Random()
    in_turn.random = lambda: 0.5
    found, _ = drive(engine, requests, in_turn)
    engine.core.close()
    model, _ = reference.load(demo_model)
    for request in requests:
        tokens, params = found[request.request_id], request.params
        assert len(tokens) == params.max_tokens
        assert max(shortfalls(model, request.prompt, params, tokens)) <= ROUNDING / (params.temperature or 1.0)
        place = random.randrange(len(tokens))
        wrong = [*tokens[:place], (tokens[place] + random.randrange(1, 999)) % engine.ready.vocab_size]
        with pytest.raises(AssertionError):
            assert_alike(model, request.prompt, params, tokens, wrong)
