"""Constraints on a CUDA device: masks reach captured and eager steps, and nothing is compiled for them after ready."""

import random

import pytest

from bladellm_runtime import LLM
from tests.engine.constrained import GREEDY, answers, check, random_asked
from tests.support.late_kernels import no_late_kernels

pytestmark = pytest.mark.gpu

OPTIONS = {"device": "cuda", "kv_cache_gib": 0.5, "max_running_requests": 11}
GRAPHS = {"cuda_graph_batch_sizes": [1, 2, 5, 9], "cuda_graph_prefill_tokens": [64, 256]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_satisfy_their_constraints(demo_model, dtype):
    rng = random.Random()
    with LLM(str(demo_model), dtype=dtype, **OPTIONS, **GRAPHS) as llm:
        asked = random_asked(rng, 60, llm.ready.vocab_size)
        for one, answer in zip(asked, answers(llm, asked, rng), strict=True):
            check(one, answer)
        assert llm.stats().guided_masks > 100


def test_no_kernel_is_compiled_for_the_first_constraint(demo_model):
    with LLM(str(demo_model), dtype="bfloat16", **OPTIONS, **GRAPHS) as llm, no_late_kernels():
        answers(llm, random_asked(random.Random(5), 30, llm.ready.vocab_size))


def test_every_way_gives_the_same_greedy_tokens(demo_model):
    found = []
    ways = (GRAPHS, {"disable_cuda_graph": True}, {"disable_overlap": True, **GRAPHS}, {"prefill_chunk_tokens": 7})
    for options in ways:
        with LLM(str(demo_model), dtype="float32", **OPTIONS, **options) as llm:
            asked = random_asked(random.Random(8), 24, llm.ready.vocab_size, GREEDY, tokens=(6, 40))
            found.append([(answer.tokens, answer.finish) for answer in answers(llm, asked)])
    assert all(each == found[0] for each in found[1:])
