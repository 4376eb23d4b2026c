"""Adapters in a CUDA device's steps, captured and eager: slots are filled beside them, no kernel is compiled late."""

import random

import pytest
import torch

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from tests.conftest import DEMO
from tests.engine import reference
from tests.engine.adapted import GREEDY, Family, ask, logprobs, make_family
from tests.engine.test_adapters import MIX, PROMPTS, count_adapted

pytestmark = pytest.mark.gpu

OPTIONS = {
    "device": "cuda", "kv_cache_gib": 0.5, "max_running_requests": 12, "enable_lora": True, "max_loras": 2,
    "max_cpu_loras": 3,
}  # fmt: skip
GRAPHS = {"cuda_graph_batch_sizes": [1, 2, 5, 12], "cuda_graph_prefill_tokens": [64, 256]}
WAYS = {
    "graphs": GRAPHS,
    "graphs, no overlap": GRAPHS | {"disable_overlap": True},
    "graphs, chunks of 7": GRAPHS | {"prefill_chunk_tokens": 7},
    "eager": {"disable_cuda_graph": True},
}


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return make_family(reference.load(DEMO)[0], tmp_path_factory.mktemp("adapters"), 4)


@pytest.mark.parametrize("way", WAYS)
def test_a_mix_gives_the_tokens_of_merged_weights(family, way):
    """More adapters than slots: they come and go while others decode."""
    with LLM(str(DEMO), dtype="float32", **OPTIONS, **WAYS[way]) as llm:
        adapted = count_adapted(llm._engine.core._runner)
        for _ in range(4):
            order = random.sample(range(len(MIX)), len(MIX))
            ask(llm, family, [PROMPTS[number] for number in order], [MIX[number] for number in order])
        assert bool(adapted["decode"]) == bool(adapted["mixed"]) == (way != "eager")
        assert llm.stats().lora_evictions > 0


@pytest.mark.parametrize("lora_dtype", ["auto", "float32"])
def test_scores_in_bf16_are_close_to_those_of_merged_weights(family, lora_dtype):
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    prompts = [[random.randrange(3, 500) for _ in range(length)] for length in (530, 90, 257, 601, 1)]
    adapters = [0, 1, -1, 2, 3]
    with LLM(str(DEMO), dtype="bfloat16", lora_dtype=lora_dtype, **OPTIONS, **GRAPHS) as llm:
        outputs = llm.generate(prompts, params, lora=[family.folder(adapter) for adapter in adapters])
    for adapter, output in zip(adapters[:-1], outputs, strict=False):
        found = torch.tensor([entry.logprobs[0] for entry in output.prompt_logprobs])
        wanted, base = (logprobs(model, output.prompt_token_ids) for model in (family.model(adapter), family.base))
        far = (wanted - base).abs().mean() if adapter >= 0 else 1.0
        assert (found - wanted).abs().mean() < 0.1 * far


@pytest.mark.parametrize("way", ["graphs", "eager"])
def test_no_kernel_is_compiled_for_the_first_adapter(family, way):
    before = len(KERNEL_COMPILES.late_names)  # of other tests in this process
    with LLM(str(DEMO), dtype="bfloat16", **OPTIONS, **WAYS[way]) as llm:
        prompts = [[random.randrange(3, 500) for _ in range(random.randint(1, 300))] for _ in range(60)]
        adapters = [random.randrange(-1, 4) for _ in prompts]
        llm.generate(prompts, GREEDY, lora=[family.folder(adapter) for adapter in adapters])
        assert KERNEL_COMPILES.late_names[before:] == []
