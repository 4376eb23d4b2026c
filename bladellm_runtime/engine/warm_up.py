"""Requests that run before ready, so that no user's is the first to need a kernel, a plan or a buffer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.inputs import WANTED_SHARE
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.wire.messages import AddRequest

ANSWER = 3
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, seed=0, ignore_eos=True)
LENGTHS = (1, 2, 16, 24, 37, 64, 80, 100, 129, 180, 200, 250, 300, 1024)
"""Single tokens, lengths that triton compiles apart, divisible by 16 or not, beside the sizes of tiles, and some of
each range for which 4- and 8-bit weights, or clusters, have a schedule."""
SCORED = replace(GREEDY, logprobs=0, prompt_logprobs=0)
MOSTLY_WANTED = ([(200, SCORED)], [(100, GREEDY), (200, SCORED)], [(300, SCORED)])
"""Steps whose last layer is computed for all tokens, since many of them are wanted: few enough for the final norm
to add what the layer in front does not, yet more than packed weights are for; and more, of a few rows and of many."""
TOGETHER = (2, 4, 8, 16, 32, 64)
"""Prompts that end in one step: its head has other kernels for as many rows, and no captured step runs them all."""
WAYS = (
    replace(GREEDY, temperature=1.0),
    replace(GREEDY, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    replace(GREEDY, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    replace(GREEDY, logit_bias={0: 1.0}, min_tokens=1, ignore_eos=False),
    SCORED,
    replace(GREEDY, logprobs=5, prompt_logprobs=5),
)
"""Every way of sampling that has work of its own."""

DECODING = replace(GREEDY, max_tokens=4)
"""Of those that decode while another prompt comes: a step more, as the next one may be planned by then."""

Group = list[tuple[int, SamplingParams]]
"""Prompt lengths and parameters of requests that run together."""


def warm_up(
    core: EngineCore,
    limits: SchedulerLimits,
    *,
    thorough: bool,
    micro_batches: int = 1,
    decode_rows: Sequence[int] = (),
    slots: int = 0,
    adapted: bool = False,
) -> None:
    """Run a short request; if `thorough`, steps of every kind. Leaves no trace in counters and prompt cache.

    decode_rows: of steps that no graph serves, see `thorough_groups`. slots: of requests that may decode while another
    prompt comes. adapted: do so again with the adapter in the first slot, which is still empty.
    """
    first = 0
    groups = thorough_groups(limits, micro_batches, decode_rows) if thorough else [[(16, GREEDY)]]
    beside = beside_prompts(slots, limits, micro_batches) if thorough else []
    for prepared in (None, Prepared(adapter=0)) if adapted else (None,):
        for waves in [*([group] for group in groups), *beside]:
            for wave in waves:
                for request in _requests(wave, limits, first):
                    core.add(request) if prepared is None else core.add(request, prepared)
                first += len(wave)
                core.step()
            while not core.idle:
                core.step()
    core.reset_prompt_cache()
    core.reset_counters()


def thorough_groups(limits: SchedulerLimits, micro_batches: int = 1, decode_rows: Sequence[int] = ()) -> list[Group]:
    """Prompts of every kind of length alone, some of two chunks, as many as a step has room for, several that end
    together, and all ways of sampling alone and side by side. micro_batches: that share out what runs together.
    decode_rows: how many decode together, too."""
    chunk = min(limits.prefill_chunk_tokens, limits.max_batch_tokens)
    lengths = sorted({*LENGTHS, chunk, chunk + 21, chunk + 600})
    longest = max(1, min(chunk, limits.max_model_len - ANSWER - 1))
    full = [(longest, GREEDY)] * (limits.max_batch_tokens // longest * micro_batches)
    return [
        *([(length, GREEDY)] for length in lengths),
        *([(3, GREEDY)] * (count * micro_batches) for count in sorted({*TOGETHER, *decode_rows})),
        *([(5, way)] for way in WAYS),
        [(5 + index, way) for index, way in enumerate((GREEDY, *WAYS))],
        [(length, GREEDY) for length in (chunk + 21, 40, 3, 1)],
        *MOSTLY_WANTED,
        *([full] if len(full) > 1 else []),
    ]


def beside_prompts(slots: int, limits: SchedulerLimits, micro_batches: int = 1) -> list[list[Group]]:
    """Requests that decode while prompts come after them, as many as kernels that plan attention are compiled for, by
    powers of two: so many tokens of prompts that of the step few are wanted, whose last layer has a plan of its own."""
    most = min(slots // micro_batches, limits.max_batch_tokens) - 1
    counts = sorted({most, *(1 << place for place in range(most.bit_length()))}) if most > 0 else []
    longest = max(1, limits.max_model_len - ANSWER - 1)
    waves = []
    for count in counts:
        tokens = min(WANTED_SHARE * (count + 1), limits.max_batch_tokens) - count
        prompts = [(min(tokens, longest), GREEDY)] * -(-tokens // longest)
        waves.append([[(3, DECODING)] * (count * micro_batches), prompts])
    return waves


def _requests(group: Sequence[tuple[int, SamplingParams]], limits: SchedulerLimits, first: int) -> Iterator[AddRequest]:
    """Requests of the group, with prompts that no other request's begins with, as long as the model allows."""
    longest = limits.max_model_len - ANSWER - 1
    for number, (length, params) in enumerate(group, first):
        prompt = [(number + place) % limits.vocab_size for place in range(max(1, min(length, longest)))]
        yield AddRequest(request_id=-1 - number, prompt=prompt, params=params, choice=0, arrival=0.0)
