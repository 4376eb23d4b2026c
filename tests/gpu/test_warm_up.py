"""Every kernel that steps of an engine may need is there before it is ready."""

import random

import pytest

from bladellm_runtime import LLM, SamplingParams
from tests.support.late_kernels import no_late_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [{"cuda_graph_prefill_tokens": [64, 256]}, {"disable_cuda_graph": True}])
def test_no_kernel_is_compiled_for_many_decodes_beside_prompts(demo_model, graphs):
    """As files of prompts make them: long steps that no graph serves, beside any number of decodes."""
    slots = random.choice([150, 256, 300])
    options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 2.0, "max_running_requests": slots}
    with LLM(str(demo_model), ragged_flash_max_batch_tokens=2048, **options, **graphs) as llm, no_late_kernels():
        vocab = llm.ready.vocab_size
        prompts = [[random.randrange(vocab) for _ in range(random.randint(1, 400))] for _ in range(2 * slots)]
        answers = llm.generate(prompts, SamplingParams(max_tokens=random.randint(20, 90), ignore_eos=True))
        assert len(answers) == len(prompts)
