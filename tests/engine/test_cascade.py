"""Captured decode steps that read shared beginnings once give the tokens of those that read them for each row."""

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from bladellm_kernels.kv_format import NO_QUANT

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine import cascade
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.engine.cascade import Cascade, cascade_sizes, make_cascade, sharing_rule
from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.layers import attention
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest
from tests.engine import reference
from tests.engine.captured import Again
from tests.engine.cascade_support import BothReads
from tests.engine.test_equality import token_bytes
from tests.engine.test_step_graphs import FAMILIES, FORMATS, SPARED, assert_same, drive, poison
from tests.engine.ties import assert_alike
from tests.models.harness import save_tiny
from tests.support.cases import drawn_of, some_pairs

SIZES = {"cuda_graph_batch_sizes": [2, 4, 7], "cuda_graph_prefill_tokens": [0]}
SHAPE = {"dtype": "float32", "device": "cpu", "max_running_requests": 8, "kv_cache_gib": 0.1}
IN_TURN = mock.Mock(random=lambda: 0.5)
"""All requests come at once, and nobody aborts one."""


@pytest.fixture
def always(monkeypatch) -> Iterator[mock.Mock]:
    """Whatever is shared is read once, in steps of three captured sizes; counts the calls of the operator."""
    for name, value in {"LEAST_ROWS": 2, "SIZE_STEP": 1, "STEP_BYTES": 1, "GROUP_BYTES": 1}.items():
        monkeypatch.setattr(cascade, name, value)
    monkeypatch.setattr("bladellm_kernels.prefix_groups.ALIGNED", 1)
    with mock.patch.object(attention, "cascade_decode_attention", wraps=attention.cascade_decode_attention) as operator:
        yield operator


def random_requests(
    count: int, vocab: int, lengths: tuple[int, ...], longest: int = 70, alike: int = 0
) -> list[AddRequest]:
    """Prompts that begin with one of some system prompts, or with an earlier one, under two salts; the first `alike`
    begin with the same one under the same salt, and ask for much. So do those that nothing aborts."""
    systems = [[random.randrange(vocab) for _ in range(length)] for length in lengths]
    systems.append(systems[-1] + [random.randrange(vocab) for _ in range(20)])
    requests = []
    for index in range(count):
        system, tokens, salt = random.choice(systems), random.choice((5, 12, longest)), random.choice(["", "", "salt"])
        if index < alike:
            system, tokens, salt = systems[-1], longest, ""
        tokens = longest if index >= count - SPARED else tokens
        prompt = system + [random.randrange(vocab) for _ in range(random.randrange(1, 20))]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        requests.append(AddRequest(index, prompt, params, 0, time.monotonic(), salt))
    return requests


def engine_of(model, capture: Again | None = None, **options) -> Engine:
    engine = build_engine(EngineArgs(model=str(model), **SHAPE | SIZES | options), capture)
    if engine.core._runner._graphs is not None:
        poison(capture, engine.core._runner._graphs)
    return engine


def answer(engine: Engine, requests: list[AddRequest], rng: random.Random) -> tuple[dict[int, list[int]], set[int]]:
    found = drive(engine, requests, rng)
    engine.core.close()
    return found


def answer_behind_first(engine: Engine, requests: list[AddRequest]) -> dict[int, list[int]]:
    """The first alone, whose beginning is cached when all others come at once, no more than the largest captured size:
    those that begin alike share it."""
    found, _ = drive(engine, requests[:1], IN_TURN)
    return found | answer(engine, requests[1:], IN_TURN)[0]


def common(one: list[int], other: list[int]) -> int:
    """Tokens up to the first difference."""
    return next((index for index, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1), len(one))


@pytest.mark.parametrize(
    "options", [{}, {"attn_cls": "paged"}, pytest.param({"disable_overlap": True}, marks=pytest.mark.slow)]
)
def test_a_system_prompt_gives_the_tokens_of_transformers(demo_model, always, options):
    """Eleven requests in eight slots: rows join and leave, and steps above the largest size are eager."""
    vocab = read_model_spec(demo_model).vocab_size
    system = [random.randrange(vocab) for _ in range(70)]
    prompts = [system + [random.randrange(vocab) for _ in range(1 + 3 * index)] for index in range(11)]
    engine = engine_of(demo_model, Again(), **options)
    requests = [
        AddRequest(index, prompt, SamplingParams(temperature=0.0, max_tokens=6 + index, ignore_eos=True), 0, 0.0)
        for index, prompt in enumerate(prompts)
    ]
    captured = always.call_count
    tokens, _ = answer(engine, requests, IN_TURN)
    assert always.call_count > captured + 20
    for request, prompt in zip(requests, prompts, strict=True):
        found = tokens[request.request_id]
        assert len(found) == request.params.max_tokens
        best = reference.greedy(demo_model, prompt, len(found))
        assert_alike(reference.load(demo_model)[0], prompt, request.params, found, best)


@pytest.mark.turns("captured traffic")
@pytest.mark.parametrize(("count", "longest"), [(28, 50), pytest.param(40, 70, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [{"prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.01}, pytest.param({}, marks=pytest.mark.slow)],
)
def test_random_traffic_gives_the_tokens_of_eager_steps(demo_model, always, options, count, longest):
    """Arrivals, aborts, preemption and swap; several groups, and rows that share with nobody."""
    requests = random_requests(count, read_model_spec(demo_model).vocab_size, (20, 33, 48), longest, alike=6)
    gib = 180 * token_bytes(demo_model) / GIB
    engine = engine_of(demo_model, Again(), max_model_len=152, **{"kv_cache_gib": gib} | options)
    captured = always.call_count
    found = drive(engine, requests, random.Random())
    assert engine.core.stats(0.0).preemptions > 0
    engine.core.close()
    assert always.call_count > captured
    eager = engine_of(demo_model, max_model_len=152, disable_cuda_graph=True, disable_prompt_cache=True)
    assert_same(reference.load(demo_model)[0], requests, found, answer(eager, requests, random.Random()))


@pytest.mark.parametrize("format", drawn_of(FORMATS, 1))
def test_every_kv_format_gives_the_tokens_of_eager_steps(demo_model, always, format):
    """But for a rounding that flips a code, and with it a token later on: that is rare."""
    requests = random_requests(8, read_model_spec(demo_model).vocab_size, (48,), longest=30, alike=6)
    found: list[dict[int, list[int]]] = []
    for way in ({}, {"disable_cuda_graph": True}):
        engine = engine_of(demo_model, Again(), kv_cache_quant=format, **way)
        captured = always.call_count
        found.append(answer_behind_first(engine, requests))
        assert (always.call_count > captured) == (not way)
    agreed = sum(common(tokens, found[1][request]) for request, tokens in found[0].items())
    assert agreed > (0.8 if format != "no_quant" else 0.999) * sum(map(len, found[1].values()))


@pytest.mark.turns
@pytest.mark.parametrize(("format", "attn_cls"), some_pairs(FORMATS, ["ragged_flash", "paged"], 2))
def test_logits_are_those_of_rows_that_read_alone(demo_model, always, format, attn_cls):
    """In the same step, on the same memory."""
    engine = engine_of(demo_model, Again(), kv_cache_quant=format, attn_cls=attn_cls)
    both = BothReads.watch(engine)
    vocab = read_model_spec(demo_model).vocab_size
    answer_behind_first(engine, random_requests(8, vocab, (48,), longest=24, alike=6))
    differences = both.differences()
    # A code that is rounded the other way changes logits, of few tokens.
    assert differences.quantile(0.9 if format != "no_quant" else 1.0) < 1e-5


@pytest.mark.parametrize("family", drawn_of(FAMILIES, 1, always=["mistral"]))
def test_every_family_gives_the_tokens_of_eager_steps(tmp_path, always, family):
    """Layers with a window read for each row; a model of such layers alone has no captured steps of this kind."""
    model = save_tiny(tmp_path, family, **FAMILIES[family])
    requests = random_requests(12, 97, (96, 128))
    engine = engine_of(tmp_path, Again(), max_model_len=240)
    assert (engine.core._runner.shared_rows > 0) == (family != "mistral")
    found = answer(engine, requests, random.Random())
    assert bool(always.call_count) == (family != "mistral")
    assert_same(model, requests, found, answer(engine_of(tmp_path, disable_cuda_graph=True), requests, random.Random()))


@pytest.mark.parametrize("options", [{"disable_prompt_cache": True}, {"kv_arena": "relocating"}])
def test_nothing_is_captured_where_nothing_is_shared(demo_model, always, options):
    engine = engine_of(demo_model, Again(), **options)
    assert engine.core._runner.shared_rows == 0
    assert engine.core._scheduler._planner.shared_reads is None
    assert not always.called
    engine.core.close()


def test_what_cannot_be_captured_is_read_for_each_row(demo_model, always, caplog):
    always.side_effect = RuntimeError("no room")
    engine = engine_of(demo_model, Again())
    assert "no room" in caplog.text
    assert engine.core._runner._graphs is not None
    assert engine.core._runner.shared_rows == 0
    always.side_effect = None
    always.reset_mock()
    answer(engine, random_requests(6, 50, (48,)), random.Random())
    assert not always.called


def test_few_sizes_are_captured():
    assert cascade_sizes([1, 2, 4, *range(8, 257, 8)]) == list(range(32, 257, 32))
    assert cascade_sizes([*range(8, 101, 8), 100]) == [32, 64, 100]
    assert cascade_sizes([1, 16, 24]) == []
    assert cascade_sizes([]) == []


def test_the_rule_counts_bytes():
    """Of an 8B model: 4 KiB a token and layer in bfloat16, of which 48 Ki tokens have to be saved."""
    groups = tuple(KvGroup(tuple(range(first, first + 4)), 4 * 4096) for first in range(0, 32, 4))
    spec = KvSpec(groups, 128, 1000, 256, 4096)
    rule = sharing_rule(Cascade(4, None), spec, 256)
    assert (rule.members, rule.least_rows, rule.most_rows) == (4, 32, 256)
    assert (rule.step_tokens, rule.group_tokens) == (49152, 1024)
    # What the benchmark measured: 64 rows of 2,048 tokens gain, 64 of 512 and 16 of 2,048 do not.
    assert 48 * 2048 >= rule.step_tokens > 48 * 512 == 12 * 2048


def test_heads_that_fill_a_tile_share_no_read(demo_model):
    arena = SimpleNamespace(shares=True, device=torch.device("cpu"))
    spec = read_model_spec(demo_model)
    args, shape = EngineArgs(model=""), KvShape(2, 32, torch.bfloat16, NO_QUANT)
    assert make_cascade(args, spec, arena, shape, [64]).members == 5
    assert make_cascade(args, spec, arena, shape, [16]) is None
    with mock.patch.object(cascade, "tile_members", return_value=1):
        assert make_cascade(args, spec, arena, shape, [64]) is None
