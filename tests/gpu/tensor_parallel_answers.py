"""What a process with an engine of its own does in the tests of tensor-parallel GPUs.

A process exchanges memory with other ranks for one engine only: the next one's ranks would be new processes.
"""

import json
from pathlib import Path
from typing import Any

from bladellm_runtime import LLM, SamplingParams
from tests.engine import reference
from tests.engine.test_equality import TOKENS

PROMPTS = [reference.PROMPTS[i % len(reference.PROMPTS)] for i in range(13)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1)
SIZES = {"cuda_graph_batch_sizes": [1, 2, 5, 9], "max_running_requests": 11}


def answers(model: str, **options: Any) -> dict[str, Any]:
    """Tokens of prompts together, and again from the cache; log-probabilities of the likeliest tokens."""
    with LLM(model, device="cuda", kv_cache_gib=0.5, **(SIZES | options)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, GREEDY)
        scored = [output.outputs[0] for output in llm.generate(PROMPTS, SCORED)]
        runner: Any = llm._engine.core._runner
        runner = getattr(runner, "_runner", runner)
        group = runner._model._communicator
        return {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "scored": [one.token_ids for one in scored],
            "logprobs": [[entry.logprobs[0] for entry in one.logprobs or []] for one in scored],
            "captured": runner.captured,
            "fast_rows": 0 if group is None else group._sums.fast_rows,
            "fast_gathered_rows": 0 if group is None else group._sums.fast_gathered_rows,
            "copied_sums": 0 if group is None or group._sums._copies is None else group._sums._copies._sends,
            "memory": dict(llm.ready.memory),
        }


def write_answers(_rank: int, _ranks: int, file: str, model: str, options: str) -> None:
    """The same to a file. options: JSON."""
    Path(file).write_text(json.dumps(answers(model, **json.loads(options))))
