"""Captured steps with prefill chunks: padding and work lists change no token and touch nobody's memory."""

import logging
import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from bladellm_kernels import listed_prefill_attention, prefill_tiles
from bladellm_kernels.prefill_routes import Routes

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine import mixed_graphs, mixed_inputs
from bladellm_runtime.engine.build import build_engine
from bladellm_runtime.engine.cuda_capture import Work
from bladellm_runtime.engine.inputs import SlotTokens, flatten
from bladellm_runtime.engine.memory import graph_bytes
from bladellm_runtime.engine.mixed_graphs import MixedGraphs, mixed_sizes
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.prompt_tree import pack
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.plan import SlotLoad
from tests.engine import reference
from tests.engine.captured import Again, captured_llm
from tests.engine.test_equality import WAYS, assert_equal, greedy_params, token_bytes
from tests.engine.test_step_graphs import FAMILIES, FORMATS, PROMPTS, assert_same, drive, random_requests
from tests.models.harness import Sequences, load_tiny, random_prompt, save_tiny
from tests.support.cases import drawn_of
from tests.support.step_plans import step_plan

SIZES = {"cuda_graph_batch_sizes": [9], "cuda_graph_prefill_tokens": [8, 20, 64, 200]}
SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("no overlap", "relocating", "overlap")]


def count_mixed(llm_or_engine) -> list[int]:
    """The sizes of the captured steps with chunks from now on."""
    core = getattr(llm_or_engine, "_engine", llm_or_engine).core
    sizes, mixed = [], core._runner._mixed
    forward = mixed.forward

    def counted(flat, size):
        sizes.append(size)
        return forward(flat, size)

    mixed.forward = counted
    return sizes


@pytest.mark.parametrize("way", ["chunks of 7", "paged", *SLOW])
def test_tokens_are_those_of_transformers(demo_model, way, monkeypatch):
    """16 requests in 11 slots: steps of decode rows beside one chunk and several, and of chunks alone."""
    monkeypatch.setattr(prefill_tiles, "PART_KEYS", 16)
    options = {"max_running_requests": 11, "kv_cache_gib": 0.25, **WAYS[way], **SIZES}
    with captured_llm(str(demo_model), Again(), dtype="float32", device="cpu", **options) as llm:
        sizes = count_mixed(llm)
        params = [greedy_params() for _ in PROMPTS]
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert len(sizes) > 1
    assert_equal(demo_model, PROMPTS, found)


@pytest.mark.parametrize("taken", drawn_of(["all", "some"], 1))
def test_attention_in_one_pass_gives_the_tokens_of_transformers(demo_model, taken, monkeypatch):
    """Steps whose chunks it takes all have their own graphs; adapters' and others' have those of both kinds."""
    monkeypatch.setattr(mixed_inputs, "one_pass_programs", lambda tokens, kv, dtype: 40 * (tokens >= 20))
    monkeypatch.setattr(listed_prefill_attention, "one_pass_routes", routes_of(taken))
    options = {"max_running_requests": 11, "kv_cache_gib": 0.25, "prefill_chunk_tokens": 60, **SIZES}
    with captured_llm(str(demo_model), Again(), dtype="float32", device="cpu", **options) as llm:
        sizes, graphs = count_mixed(llm), llm._engine.core._runner._mixed
        assert sorted(graphs._one_pass) == [20, 64, 200]
        used = count_calls(graphs._one_pass)
        params = [greedy_params() for _ in PROMPTS]
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    large = [size for size in sizes if size >= 20]
    assert used == large if taken == "all" else len(used) < len(large)
    assert_equal(demo_model, PROMPTS, found)


def routes_of(taken: str):
    """All chunks in one pass, or some of those that are several in a step."""

    def routes(spans, heads):
        one_pass = tuple(span for span in spans if taken == "all" or span.first % 2 == 0)
        return (Routes(one_pass=one_pass, stored=tuple(span for span in spans if span not in one_pass)),)

    return routes


def count_calls(graphs: dict[int, Work]) -> list[int]:
    """The sizes of these that are replayed from now on."""
    used: list[int] = []

    def counted(size: int, replay: Work) -> None:
        used.append(size)
        replay()

    for size, replay in list(graphs.items()):
        graphs[size] = partial(counted, size, replay)
    return used


@pytest.mark.parametrize("format", drawn_of(FORMATS, 1))
def test_every_kv_format_gives_the_tokens_of_eager_steps(demo_model, format):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "kv_cache_quant": format, "kv_cache_gib": 0.1}
    found = []
    for way in ({"disable_cuda_graph": True}, {**SIZES, "prefill_chunk_tokens": 13}):
        with captured_llm(str(demo_model), Again(), **options, **way) as llm:
            sizes = [] if "disable_cuda_graph" in way else count_mixed(llm)
            for _ in range(2):
                found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS[:7], params)])
    assert sizes
    assert found[0] == found[1] == found[2] == found[3]


def test_prompts_of_a_bfloat16_model_are_attended_to_before_they_are_stored_in_12_bits(demo_model, monkeypatch):
    """By eager steps and captured ones; prompts found in the cache, and later chunks, read what is stored."""
    monkeypatch.setattr(mixed_inputs, "one_pass_programs", lambda tokens, kv, dtype: 40 * (tokens >= 20))
    monkeypatch.setattr(listed_prefill_attention, "one_pass_routes", routes_of("all"))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"dtype": "bfloat16", "device": "cpu", "kv_cache_gib": 0.1, "max_running_requests": 3}
    found = []
    for format, way in (
        ("no_quant", {"disable_cuda_graph": True}),
        ("fp12_e4m7", {"disable_cuda_graph": True}),
        ("fp12_e4m7", {**SIZES, "prefill_chunk_tokens": 60}),
    ):
        with captured_llm(str(demo_model), Again(), kv_cache_quant=format, **options, **way) as llm:
            used = [] if "disable_cuda_graph" in way else count_calls(llm._engine.core._runner._mixed._one_pass)
            for _ in range(2):
                found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS[:7], params)])
    assert used, "some steps have whole prompts alone"
    equal = [sum(one == other for one, other in zip(found[0], each, strict=True)) for each in found]
    assert min(equal) >= 6, "sums in another order may change a token, seldom"


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_touches_no_memory_and_reads_nothing(tmp_path: Path, family):
    """Logits equal the eager ones although the memory around is NaN, and only the rows' own places are written."""
    save_tiny(tmp_path, family, **FAMILIES[family])
    model = load_tiny(tmp_path)
    eager, captured = Sequences(model, slots=6), Sequences(model, slots=6)
    tokens = [SlotTokens.of(SlotLoad(slot, 0, pack(random_prompt(150)), 150, SamplingParams(), 0)) for slot in range(6)]
    last_token = torch.zeros(7, dtype=torch.int64)
    graphs = MixedGraphs([8, 40, 70], model, captured.arena, last_token, None, None)
    capture = Again()
    assert graphs.capture_all(capture)
    capture.before = lambda: graphs.hidden.fill_(torch.nan)
    used = set()
    for step in range(14):
        ready = [slot for slot in range(6) if captured.lengths[slot]]
        decodes = random.sample(ready, random.randint(0, min(3, len(ready)))) if step else []
        chunks = random.sample([slot for slot in range(6) if slot not in decodes], random.randint(1, 2))
        lengths = [1] * len(decodes) + [random.choice((1, 2, 5, 17)) if step else 17 for _ in chunks]
        slots, starts = decodes + chunks, [captured.lengths[slot] for slot in decodes + chunks]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        rows = [tokens[s].ids[a:b].tolist() for s, a, b in zip(slots, starts, ends, strict=True)]
        expected = eager.step(list(zip(slots, rows, strict=True)), decode=False)
        last_token[:] = torch.randint(97, (7,))
        last_token[decodes] = torch.tensor([row[0] for row in rows[: len(decodes)]], dtype=torch.int64)
        plan = step_plan(step, slots=slots, starts=starts, query_lens=lengths, num_decode=len(decodes))
        plan.samples = [True] * len(decodes) + random.choices((True, False), k=len(chunks))
        wanted = [row[-1] for row, samples in zip(expected, plan.samples, strict=True) if samples]
        before = captured.arena.rows.clone()
        found, size = run_poisoned(graphs, flatten(plan, tokens, captured.arena))
        used.add(size)
        logits = torch.stack(wanted) if wanted else torch.empty(0, 97)
        torch.testing.assert_close(model.logits(found), logits, atol=1e-4, rtol=1e-4)
        for slot, start, end in zip(slots, starts, ends, strict=True):
            base = captured.arena.base_row(slot)
            before[base + start : base + end] = captured.arena.rows[base + start : base + end]
            captured.lengths[slot] = end
        assert torch.equal(captured.arena.rows.view(torch.int32), before.view(torch.int32))
    assert len(used) > 1


@pytest.mark.parametrize("family", drawn_of(list(FAMILIES), 1))
def test_padding_is_zeros_behind_all_layers(tmp_path: Path, family):
    """Whatever the step before left: products of zeros take less power."""
    save_tiny(tmp_path, family, **FAMILIES[family])
    sequences = Sequences(load_tiny(tmp_path), slots=6)
    graphs = MixedGraphs([8], sequences.model, sequences.arena, torch.zeros(7, dtype=torch.int64), None, None)
    assert graphs.capture_all(Again())
    tokens = [SlotTokens.of(SlotLoad(slot, 0, pack(random_prompt(8)), 8, SamplingParams(), 0)) for slot in range(6)]
    for length in (8, random.randint(1, 7)):
        plan = step_plan(0, slots=[3], starts=[0], query_lens=[length], num_decode=0)
        plan.samples = [True]
        graphs.hidden.fill_(torch.nan)
        run_poisoned(graphs, flatten(plan, tokens, sequences.arena))
        assert graphs.hidden[:length].any(1).all()
        assert not graphs.hidden[length:].any()


@pytest.mark.parametrize(("size", "scored", "sent"), [(8, True, True), (40, True, False), (40, False, True)])
def test_scored_tokens_are_not_left_out(tmp_path: Path, size, scored, sent):
    """Of 6 slots at most 6 tokens of 40 are wanted: that graph's last layer gives no others, unlike that of 8."""
    save_tiny(tmp_path, "llama")
    sequences = Sequences(load_tiny(tmp_path), slots=6)
    graphs = MixedGraphs([size], sequences.model, sequences.arena, torch.zeros(7, dtype=torch.int64), None, None)
    assert graphs.capture_all(Again())
    params = SamplingParams(prompt_logprobs=0 if scored else None)
    tokens = [SlotTokens.of(SlotLoad(slot, 0, pack(random_prompt(20)), 20, params, 0)) for slot in range(6)]
    plan = step_plan(0, slots=[3], starts=[0], query_lens=[7], num_decode=0)
    plan.samples = [True]
    assert (graphs.send(flatten(plan, tokens, sequences.arena)) is not None) == sent


def run_poisoned(graphs: MixedGraphs, flat) -> tuple[torch.Tensor, int]:
    """A step whose arrays, on the host too, were far outside of everything before they were written."""
    with torch.inference_mode():
        graphs.inputs._static.fill_(2**40)
        for buffer in graphs.inputs._host._buffers:
            buffer.array[:] = 2**40
        size = graphs.send(flat)
        return graphs.forward(flat, size), size


@pytest.mark.turns("captured traffic")
@pytest.mark.parametrize(
    "options",
    [
        {"attn_cls": "paged", "prefill_chunk_tokens": 7},
        # test_step_graphs.py has it
        pytest.param({"prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.01}, marks=pytest.mark.slow),
        pytest.param({"kv_arena": "relocating", "disable_overlap": True}, marks=pytest.mark.slow),
    ],
)
def test_random_traffic_gives_the_tokens_of_eager_steps(demo_model, options):
    """Arrivals, aborts, preemption, prefix hits, all kinds of sampling, poison before every replay.

    Not with quantized KV: what gave way is computed again in other batches, and a rounding there may flip a code.
    """
    rng = random.Random()
    shape = {"dtype": "float32", "device": "cpu", "max_model_len": 152, "max_running_requests": 8}
    gib = 160 * token_bytes(demo_model) / GIB
    requests, found = None, []
    for way in ({**SIZES, "kv_cache_gib": gib}, {"disable_cuda_graph": True, "kv_cache_gib": 0.1}):
        capture = Again()
        engine = build_engine(EngineArgs(model=str(demo_model), **(shape | options | way)), capture)
        requests = requests or random_requests(rng, 32, engine.ready.vocab_size)
        if way.get("disable_cuda_graph"):
            assert engine.core._runner._mixed is None
        else:
            sizes = count_mixed(engine)
            poison(capture, engine.core._runner._mixed)
        found.append(drive(engine, requests, rng))
        preemptions = engine.core.stats(time.monotonic()).preemptions
        engine.core.close()
        assert preemptions > 0 or "disable_cuda_graph" in way
    assert len(sizes) > 5
    assert_same(reference.load(demo_model)[0], requests, *found)


def poison(capture: Again, graphs: MixedGraphs) -> None:
    """Before a plan is sent, the arrays are far outside of everything; before a replay, what it leaves is NaN."""
    send = graphs.inputs.send

    def before() -> None:
        graphs.hidden.fill_(torch.nan)
        graphs._last_token[-1] = random.randrange(97)

    def poisoned_send(flat, size) -> bool:
        graphs.inputs._static.fill_(2**40)
        return send(flat, size)

    capture.before, graphs.inputs.send = before, poisoned_send


def test_scores_of_prompts_are_those_of_eager_steps(demo_model):
    """Scored chunks beside others and beside decode rows, with log-probabilities of what is sampled."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=index % 3, prompt_logprobs=scored)
        for index, scored in enumerate((None, 2, 0, None, 3, None, 1))
    ]
    found = []
    for way in ({"disable_cuda_graph": True}, {**SIZES, "prefill_chunk_tokens": 9}):
        options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1, "disable_prompt_cache": True, **way}
        with captured_llm(str(demo_model), Again(), **options) as llm:
            sizes = [] if "disable_cuda_graph" in way else count_mixed(llm)
            found.append(llm.generate(PROMPTS[:7], params))
    assert sizes
    for one, other in zip(*found, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for entry, expected in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert entry.token_ids[0] == expected.token_ids[0]
            assert entry.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_steps_that_do_not_fit_are_eager(demo_model, monkeypatch):
    """Above the sizes, with more chunks than a list has room for, and where attention takes long."""
    options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1, "max_running_requests": 200}
    options["disable_prompt_cache"] = True
    with captured_llm(str(demo_model), Again(), **options, cuda_graph_prefill_tokens=[64, 128]) as llm:
        sizes = count_mixed(llm)
        for prompts, expected in (([[5] * 129], []), ([[5] * 30], [64]), ([[5] * 65], [128])):
            sizes.clear()
            llm.generate(prompts, SamplingParams(max_tokens=1))
            assert sizes == expected
        sizes.clear()
        llm.generate([[index + 3] for index in range(120)], SamplingParams(max_tokens=1))
        assert 120 not in sizes
        assert len(sizes) < 2
        monkeypatch.setattr(mixed_graphs, "LAUNCHES", 0.0)
        sizes.clear()
        llm.generate([[7] * 30], SamplingParams(max_tokens=1))
        assert sizes == []


def test_sizes_end_at_the_tokens_of_a_step():
    def sizes(**options) -> list[int]:
        return mixed_sizes(EngineArgs(model="m", **options))

    assert sizes()[:6] == [32, 64, 96, 128, 160, 192]
    assert sizes()[-1] == 2048
    assert sizes(ragged_flash_max_batch_tokens=200) == [32, 64, 96, 128, 160, 192, 200]
    assert sizes(ragged_flash_max_batch_tokens=8192)[-1] == 2048
    assert sizes(cuda_graph_prefill_tokens=[3, 3000]) == [3, 2048]
    assert sizes(cuda_graph_prefill_tokens=[0]) == []
    assert sizes(cuda_graph_prefill_tokens=[5], disable_cuda_graph=True) == []
    with pytest.raises(ConfigError, match="--cuda_graph_prefill_tokens must be ascending, each size once; got 4 2"):
        sizes(cuda_graph_prefill_tokens=[4, 2])


def test_memory_is_set_aside_for_the_tokens_of_the_largest(demo_model):
    spec = read_model_spec(demo_model)

    def needed(*sizes: int, **options) -> int:
        args = EngineArgs(model="m", cuda_graph_prefill_tokens=list(sizes), **options)
        return graph_bytes(args, spec, torch.float16)

    assert needed(2048, disable_cuda_graph=True) == 0
    # The residual stream, its norms and the MLP's numbers, at least.
    row = 2 * (3 * spec.hidden_size + 2 * spec.intermediate_size)
    assert needed(2048) - needed(1024) >= 1024 * row
    assert needed(32, 2048) - needed(2048) < 1 << 24


def test_what_cannot_be_captured_is_named_and_decode_graphs_stay(demo_model, caplog, monkeypatch):
    def boom(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("bladellm_runtime.layers.attention.listed_prefill_attention", boom)
    options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1, **SIZES}
    with caplog.at_level(logging.WARNING), captured_llm(str(demo_model), Again(), **options) as llm:
        outputs = llm.generate([reference.PROMPTS[0]], greedy_params())
        runner = llm._engine.core._runner
        assert runner._mixed is None
        assert runner._graphs is not None
    assert_equal(demo_model, [reference.PROMPTS[0]], [outputs[0].outputs[0].token_ids])
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    said = "steps with prefill chunks run without CUDA graphs: attention._attend_listed cannot be captured"
    assert said in warnings[0]


def test_graphs_end_with_the_engine_whoever_holds_them(demo_model):
    """What NCCL has in a graph keeps it from ending: steps that are watched must not keep theirs."""
    options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1, **SIZES}
    with captured_llm(str(demo_model), Again(), **options) as llm:
        runner = llm._engine.core._runner
        held = [runner._graphs, runner._mixed]
        assert all(graphs._graphs for graphs in held)
    assert not any(graphs._graphs for graphs in held)


def test_steps_with_chunks_are_launched_eagerly_when_asked_to(demo_model):
    options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1, "disable_prompt_cache": True, **SIZES}
    with captured_llm(str(demo_model), Again(), **options) as llm:
        runner, found, replayed = llm._engine.core._runner, [], []
        sizes = count_mixed(llm)
        for on in (True, False, True):
            runner.use_mixed_graphs(on)
            before = len(sizes)
            outputs = llm.generate([reference.PROMPTS[0]], greedy_params())
            found.append(outputs[0].outputs[0].token_ids)
            replayed.append(len(sizes) > before)
    assert replayed == [True, False, True]
    assert found[0] == found[1] == found[2]
