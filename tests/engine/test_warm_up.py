"""The requests before ready run in every engine, however small, and leave nothing behind."""

import random
from itertools import chain, pairwise

import pytest
from bladellm_kernels import packed_linear
from bladellm_kernels.linear_schedules import MAX_ROWS
from bladellm_kernels.power_of_two import power_of_two
from bladellm_kernels.row_schedule import FEW_ROWS
from bladellm_kernels.unit_schedules import SCHEDULES

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import build_engine
from bladellm_runtime.engine.inputs import are_few
from bladellm_runtime.engine.step_graphs import eager_sizes
from bladellm_runtime.engine.warm_up import ANSWER, LENGTHS, MOSTLY_WANTED, beside_prompts, thorough_groups, warm_up
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import one_by_one
from tests.models.harness import save_tiny


def limits_of(engine, batch_tokens: int, chunk: int) -> SchedulerLimits:
    ready = engine.ready
    return SchedulerLimits(batch_tokens, chunk, ready.max_model_len, frozenset(ready.eos_token_ids), ready.vocab_size)


@pytest.mark.parametrize(("length", "batch_tokens", "chunk"), [(8, 1, None), (40, 64, 16), (2048, 512, 100)])
def test_every_kind_of_step_runs_and_leaves_nothing(demo_model, tmp_path, monkeypatch, length, batch_tokens, chunk):
    save_tiny(tmp_path, "llama", vocab_size=8192, max_position_embeddings=2048)
    engine = build_engine(
        EngineArgs(
            model=str(tmp_path), tokenizer_dir=str(demo_model), device="cpu", kv_cache_gib=0.05,
            max_model_len=length, max_running_requests=3,
            ragged_flash_max_batch_tokens=batch_tokens, prefill_chunk_tokens=chunk,
        )
    )  # fmt: skip
    core, prompts, finished = engine.core, [], []
    add, step = core.add, core.step

    def watched():
        deltas = step()
        finished.extend(delta.finish for delta in one_by_one(deltas) if delta.finish)
        return deltas

    monkeypatch.setattr(core, "add", lambda request: (prompts.append(request.prompt), add(request))[1])
    monkeypatch.setattr(core, "step", watched)
    limits = limits_of(engine, batch_tokens, chunk or batch_tokens)
    warm_up(core, limits, thorough=True, slots=3)
    groups = [*thorough_groups(limits), *chain(*beside_prompts(3, limits))]
    count = sum(map(len, groups))
    assert len(prompts) == len(finished) == count
    assert set(finished) == {"length"}
    assert max(map(len, prompts)) == min(length - ANSWER - 1, max(*LENGTHS, (chunk or batch_tokens) + 21))
    stats = core.stats(0.0)
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens) == (0, 0, 0, 0)
    assert (stats.kv_granules_used, stats.kv_granules_cached, stats.running, stats.waiting) == (0, 0, 0, 0)
    core.close()


def test_lengths_are_of_every_kind():
    chunk = random.randint(17, 5000)
    limits = SchedulerLimits(random.choice([chunk, 9000]), chunk, 10**6, frozenset(), 50)
    lengths = {length for group in thorough_groups(limits) for length, _ in group}
    assert {1, chunk} <= lengths
    assert any(length % 16 == 0 for length in lengths)
    assert any(length > 64 and length % 16 for length in lengths)
    assert max(lengths) > chunk


def test_every_schedule_of_quantized_layers_has_a_length():
    """Without captured steps nothing else would compile its kernel before ready."""
    ends = [0, *SCHEDULES]
    groups = thorough_groups(SchedulerLimits(8192, 8192, 10**6, frozenset(), 50))
    steps = [sum(length for length, _ in group) for group in groups]
    for before, most in pairwise(ends):
        assert any(before < tokens <= most for tokens in steps), most
    assert max(steps) > ends[-1]


def test_steps_that_no_graph_serves_have_their_rows_before_ready(demo_model):
    """Fused layers of decode steps have kernels by how many rows there are, up to `MAX_ROWS` of them."""
    limits = SchedulerLimits(8192, 8192, 10**6, frozenset(), 50)
    slots = random.randint(100, 400)
    flags = {"model": str(demo_model), "max_running_requests": slots}
    rows = eager_sizes(EngineArgs(**flags, disable_cuda_graph=True))
    most = min(slots, MAX_ROWS)
    assert {1, 24, 40, 96, most} <= set(rows)
    assert max(rows) == most
    together = {len(group) for group in thorough_groups(limits, decode_rows=rows)}
    assert set(rows) <= together
    captured = random.randint(2, most - 1)
    beyond = eager_sizes(EngineArgs(**flags, cuda_graph_batch_sizes=[1, captured]))
    assert beyond == [size for size in rows if size > captured]
    assert eager_sizes(EngineArgs(**flags)) == []


def test_steps_want_few_rows_and_many_of_all():
    wanted = [sum(length if params.logprobs is not None else 1 for length, params in group) for group in MOSTLY_WANTED]
    tokens = [sum(length for length, _ in group) for group in MOSTLY_WANTED]
    assert not any(map(are_few, wanted, tokens))
    long = [rows for rows, count in zip(wanted, tokens, strict=True) if count > MAX_ROWS]
    assert min(long) <= FEW_ROWS < max(long)
    assert any(packed_linear.MAX_ROWS < count <= MAX_ROWS for count in tokens)


@pytest.mark.parametrize(
    ("batch_tokens", "chunk", "length"), [(8192, 8192, 10**6), (8192, 512, 4096), (3000, 3000, 99)]
)
def test_one_step_is_full(batch_tokens, chunk, length):
    """Of chunks or of short sequences: few steps afterwards have more rows than were there before ready."""
    groups = thorough_groups(SchedulerLimits(batch_tokens, chunk, length, frozenset(), 50))
    sums = [sum(min(prompt, chunk, length - ANSWER - 1) for prompt, _ in group) for group in groups]
    assert max(sums) > 0.9 * batch_tokens


def test_any_number_of_rows_has_decoded_beside_a_prompt_before_ready(demo_model, tmp_path, monkeypatch):
    """Operator by operator attention's plan has a kernel for every power of two: 1,024 slots had none of their own."""
    save_tiny(tmp_path, "llama", vocab_size=8192, max_position_embeddings=2048)
    slots = random.randint(5, 70)
    engine = build_engine(
        EngineArgs(
            model=str(tmp_path), tokenizer_dir=str(demo_model), device="cpu", kv_cache_gib=0.05, max_model_len=512,
            max_running_requests=slots, ragged_flash_max_batch_tokens=512,
        )
    )  # fmt: skip
    decoding, wanted = set(), set()
    plan = Scheduler.plan

    def watched(scheduler):
        made = plan(scheduler)
        if made is not None and 0 < made.num_decode < len(made.slots):
            decoding.add(power_of_two(made.num_decode))
            if are_few(made.samples.sum(), made.query_lens.sum()):
                wanted.add(power_of_two(int(made.samples.sum())))
        return made

    monkeypatch.setattr(Scheduler, "plan", watched)
    warm_up(engine.core, limits_of(engine, 512, 512), thorough=True, slots=slots)
    engine.core.close()
    sizes = {power_of_two(rows) for rows in range(1, slots)}
    assert decoding >= sizes
    # With the token of a prompt that ends there are two at least.
    assert wanted >= sizes - {1}
