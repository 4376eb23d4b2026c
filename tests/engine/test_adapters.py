"""Adapters in the engine: tokens are those of merged weights, whatever else goes on, for all mixes and many of them."""

import copy
import random
import shutil
import time
from typing import Any

import pytest
import regex
import torch

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.memory import graph_bytes, workspace_bytes
from bladellm_runtime.engine.step_adapters import SlotAdapters
from bladellm_runtime.engine.step_graphs import StepGraphs
from bladellm_runtime.errors import ConfigError, ParameterError
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.request import FinishReason
from bladellm_runtime.wire.messages import MoveAdapter, one_by_one
from tests.conftest import DEMO
from tests.engine import reference
from tests.engine.adapted import GREEDY, TOKENS, Family, ask, logprobs, make_family
from tests.engine.captured import Again, captured_llm
from tests.engine.test_cascade import always  # noqa: F401
from tests.engine.test_equality import token_bytes
from tests.engine.test_quantized import SCHEMES, WEIGHT_ONLY, make_pair
from tests.lora import folders
from tests.support.cases import sample_of, some_of

ADAPTERS, SLOTS = 4, 2
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1, "enable_lora": True, "max_loras": SLOTS,
    "max_cpu_loras": SLOTS + 1,
}  # fmt: skip
PROMPTS = [reference.PROMPTS[number % 5] for number in range(12)]
MIX = [number % (ADAPTERS + 1) - 1 for number in (0, 1, 3, 2, 4, 1, 0, 4, 2, 3, 3, 1)]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return make_family(reference.load(DEMO)[0], tmp_path_factory.mktemp("adapters"), ADAPTERS)


MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "chunks of 7, no overlap": {
        "disable_overlap": True, "prefill_chunk_tokens": 7, "ragged_flash_max_batch_tokens": 32,
    },
    "no overlap": {"disable_overlap": True},
    "chunks of 7": {"prefill_chunk_tokens": 7, "ragged_flash_max_batch_tokens": 32},
    "few slots": {"max_running_requests": 3},
    "paged": {"attn_cls": "paged"},
    "relocating": {"kv_arena": "relocating"},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "all at once": {"max_loras": ADAPTERS, "max_cpu_loras": ADAPTERS},
}  # fmt: skip
SOME = ("overlap", "chunks of 7, no overlap")


@pytest.mark.turns
@pytest.mark.parametrize(
    "mode", [mode if mode in SOME else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_a_mix_of_adapters_gives_the_tokens_of_merged_weights(family, mode):
    """More adapters than slots: they wait, evict each other and come back; twice, the second time from the cache."""
    with LLM(str(DEMO), **OPTIONS | MODES[mode]) as llm:
        for _ in range(2):
            ask(llm, family, PROMPTS, MIX)
        stats = llm.stats()
        slots = MODES[mode].get("max_loras", SLOTS)
        assert (stats.lora_slots, stats.lora_used, stats.lora_waiting) == (slots, 0, 0)
        assert stats.lora_loads >= ADAPTERS
        assert stats.lora_evictions == stats.lora_loads - slots
        assert stats.lora_load_seconds > 0


@pytest.mark.parametrize("prefills", [[16, 64, 200], pytest.param([0], marks=pytest.mark.slow)])
def test_captured_steps_serve_any_mix(family, prefills):
    sizes = {"cuda_graph_batch_sizes": [1, 4, 12], "cuda_graph_prefill_tokens": prefills}
    with captured_llm(str(DEMO), capture := Again(), **OPTIONS, **sizes) as llm:
        runner = llm._engine.core._runner
        assert runner.captured[3:] == (1, int(prefills != [0]))
        adapted = count_adapted(runner)
        for graphs in (runner._graphs, runner._mixed):
            poison(graphs)
        ask(llm, family, PROMPTS, [-1] * len(PROMPTS))
        assert not adapted["decode"]
        assert not adapted["mixed"]
        assert capture.replays > TOKENS
        ask(llm, family, PROMPTS, MIX)
        assert adapted["decode"] > TOKENS
        assert bool(adapted["mixed"]) == (prefills != [0])


def poison(graphs) -> None:
    """What no plan has written is far outside of everything."""
    if graphs is not None:
        method = "_upload" if isinstance(graphs, StepGraphs) else "send"
        write = getattr(graphs.inputs, method)

        def poisoned(*given):
            graphs.inputs._static.fill_(2**40)
            return write(*given)

        setattr(graphs.inputs, method, poisoned)


def count_adapted(runner) -> dict[str, int]:
    """Replays of steps with adapters from now on."""
    counts = {"decode": 0, "mixed": 0}
    for kind, graphs in (("decode", runner._graphs), ("mixed", runner._mixed)):
        for size, work in [] if graphs is None else list(graphs._adapted.items()):

            def counted(kind=kind, work=work):
                counts[kind] += 1
                work()

            graphs._adapted[size] = counted
    return counts


def test_only_rows_without_adapters_read_once_what_they_share(family, always):  # noqa: F811
    """Of one prompt, side by side: `always` counts the reads."""
    long = list(range(40, 140))
    prompts = [[*long, number] for number in range(6)]
    with captured_llm(str(DEMO), Again(), **OPTIONS, cuda_graph_batch_sizes=[4, 12]) as llm:
        for adapters in ([0] * 6, [-1] * 6, [0, -1, 0, -1, 0, 1]):
            before = always.call_count
            ask(llm, family, prompts, adapters)
            assert (always.call_count > before) == (adapters == [-1] * 6)


def test_log_probabilities_are_those_of_merged_weights(family):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(DEMO), **OPTIONS | {"prefill_chunk_tokens": 11}) as llm:
        outputs = llm.generate(PROMPTS, params, lora=[family.folder(adapter) for adapter in MIX])
    for adapter, output in zip(MIX, outputs, strict=True):
        choice = output.outputs[0]
        entries = [*output.prompt_logprobs, *choice.logprobs]
        found = torch.tensor([entry.logprobs[0] for entry in entries])
        model, ids = family.model(adapter), output.prompt_token_ids + choice.token_ids
        wanted = logprobs(copy.deepcopy(model).double(), ids)
        # Some random adapters make rounding ten times larger than it is in the base model.
        rounding = float((logprobs(model, ids) - wanted).abs().max())
        torch.testing.assert_close(found.double(), wanted, atol=max(1e-4, 5 * rounding), rtol=0)


def test_cached_prompts_are_shared_within_an_adapter_alone(family, tmp_path):
    folder = tmp_path / "changing"
    shutil.copytree(family.folders[0], folder)
    own = Family(family.base)
    own.add(folder)
    own.add(family.folders[1])
    prompt = [list(range(100, 180))]
    with LLM(str(DEMO), **OPTIONS) as llm:

        def cached(adapter: int) -> int:
            return ask(llm, own, prompt, [adapter])[0].cached_tokens

        def move(load: bool) -> Any:
            core = llm._engine.core
            deltas = core.move_adapter(MoveAdapter(10**6, str(folder), load))
            while not deltas:
                time.sleep(0.001)  # the thread that reads adapters needs the interpreter too
                deltas = list(one_by_one(core.step()))
            return deltas[0]

        assert [cached(adapter) for adapter in (0, 1, -1)] == [0, 0, 0]
        assert all(cached(adapter) >= 64 for adapter in (1, -1, 0))
        # Another adapter in the folder: the old one answers until it is unloaded, the new one never from its cache.
        folders.save_adapter(folder, own.base, rank=3)
        assert cached(0) >= 64
        assert move(load=False).finish is FinishReason.STOP
        assert move(load=True).finish is FinishReason.STOP
        own.merged[0] = folders.merged(own.base, folder)
        own._greedy.clear()
        assert [cached(0) >= 64 for _ in range(2)] == [False, True]


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_gives_way_goes_on_with_its_adapter(family, overlap):
    options = {"kv_cache_gib": 64 * token_bytes(DEMO) / 2**30, "max_model_len": 48, "disable_overlap": not overlap}
    with LLM(str(DEMO), **OPTIONS | {"max_loras": ADAPTERS, "max_cpu_loras": ADAPTERS} | options) as llm:
        ask(llm, family, PROMPTS[:ADAPTERS], range(ADAPTERS))
        # All adapters are there: all requests run from the first step on, and their answers need more than is left.
        ask(llm, family, [[random.randrange(50, 1000) for _ in range(3)] for _ in MIX], MIX)
        assert llm.stats().preemptions > 0


QUANTIZED = [(method, name) for method, name in WEIGHT_ONLY if name in ("w4a16", "w8a16")]
SAMPLE = [next(pair for pair in QUANTIZED if pair[1] == name) for name in ("w4a16", "w8a16")]


@pytest.mark.parametrize("quantized", some_of(QUANTIZED, sample_of(SAMPLE, 1)))
def test_adapters_of_quantized_models(tmp_path, quantized):
    method, scheme = quantized
    pair = make_pair(DEMO, tmp_path, method, SCHEMES[scheme])
    family = make_family(reference.load(pair.plain)[0], tmp_path, 2)
    with LLM(str(pair.quantized), **OPTIONS) as llm:
        ask(llm, family, PROMPTS[:6], [0, -1, 1, 1, 0, -1])


def test_constraints_and_adapters_together(family, tmp_path):
    """A request has both: the tokens are those of an engine with the merged weights under the same constraint."""
    pattern = "[A-Z][a-z]{2,9}( [a-z]{1,8}){2,9}\\."
    shutil.copytree(DEMO, tmp_path / "merged", ignore=shutil.ignore_patterns("*.safetensors"))
    family.merged[0].save_pretrained(tmp_path / "merged")
    found = []
    for model, lora in ((tmp_path / "merged", None), (DEMO, family.folders[0])):
        with LLM(str(model), **OPTIONS) as llm:
            outputs = llm.generate(PROMPTS[:5], GREEDY, guided_regex=pattern, lora=lora)
            found.append([output.outputs[0].text for output in outputs])
    assert found[0] == found[1]
    assert all(regex.fullmatch(pattern, text, partial=True) for text in found[0])


def test_an_adapter_that_cannot_be_loaded_refuses_its_requests_alone(family, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(family.folders[0], broken)
    (broken / folders.TENSORS).write_bytes(b"no tensors")
    lora = [broken, family.folders[0], None, broken, family.folders[1], tmp_path / "nowhere"]
    with LLM(str(DEMO), **OPTIONS) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS[:6], GREEDY, lora=lora)
            for number in (0, 3, 5):
                completion = outputs[number].outputs[0]
                assert (completion.finish_reason, completion.error) == (FinishReason.ERROR, "adapter_refused")
                assert str(tmp_path) not in completion.message
            assert folders.TENSORS in outputs[0].outputs[0].message
            for number, adapter in ((1, 0), (2, -1), (4, 1)):
                family.check(adapter, outputs[number])
        assert llm.stats().lora_used == 0
        with pytest.raises(ParameterError, match="2 prompts need as many adapters in lora, got 1"):
            llm.generate(PROMPTS[:2], GREEDY, lora=[None])


def test_without_slots_adapters_are_refused(family):
    with LLM(str(DEMO), dtype="float32", device="cpu", kv_cache_gib=0.1) as llm:
        [output] = llm.generate(PROMPTS[:1], GREEDY, lora=family.folders[0])
        assert output.outputs[0].error == "adapter_refused"
        assert "--enable_lora" in output.outputs[0].message
        ask(llm, family, PROMPTS[:1], [-1])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"max_loras": 2}, "--max_loras 2 is for LoRA adapters; add --enable_lora"),
        ({"lora_dtype": "float16"}, "--lora_dtype float16 is for LoRA adapters"),
        ({"enable_lora": True, "max_loras": 17}, "--max_cpu_loras 16 is below --max_loras 17"),
        ({"enable_lora": True, "precompute_first_layer": True}, "--precompute_first_layer serves no --enable_lora"),
        ({"enable_lora": True, "max_lora_rank": 0}, "--max_lora_rank must be between 1 and 512, got 0"),
        ({"enable_lora": True, "lora_dtype": "int8"}, "--lora_dtype must be one of auto, "),
    ],
)
def test_flags_are_checked(flags, sentence):
    with pytest.raises(ConfigError, match=f"^{regex.escape(sentence)}"):
        LLM(str(DEMO), device="cpu", **flags)


def test_the_start_warms_up_steps_with_adapters_and_leaves_nothing(monkeypatch):
    ran = []
    of = SlotAdapters.of

    def watched(adapters, plan):
        found = of(adapters, plan)
        ran.append((found is not None, plan.num_decode < len(plan.slots)))
        return found

    monkeypatch.setattr(SlotAdapters, "of", watched)
    with LLM(str(DEMO), **OPTIONS) as llm:
        assert {*ran} == {(False, False), (False, True), (True, False), (True, True)}
        stats = llm.stats()
        assert (stats.steps, stats.kv_granules_used, stats.kv_granules_cached, stats.lora_loads) == (0, 0, 0, 0)


def test_memory_is_set_aside_for_steps_with_adapters():
    spec = read_model_spec(DEMO)
    for term in (workspace_bytes, graph_bytes):
        sizes = [
            term(EngineArgs(enable_lora=bool(rank), max_lora_rank=rank or 16, kv_cache_gib=1.0), spec, torch.bfloat16)
            for rank in (0, 16, 64)
        ]
        assert sizes[0] < sizes[1] <= sizes[2]


def test_slots_are_of_the_type_and_the_number_asked_for(family):
    taken = {}
    for dtype in ("auto", "bfloat16"):
        with LLM(str(DEMO), **OPTIONS | {"lora_dtype": dtype, "max_lora_rank": 16}) as llm:
            taken[dtype] = dict(llm.ready.memory)["LoRA adapters"]
            lora = llm._engine.core._runner._model.lora
            assert taken[dtype] == sum(matrices.nbytes for matrices in lora.matrices) + lora.scales.nbytes
            assert len(lora.matrices) == (1 + len(lora.layout.places) if dtype == "auto" else 1)
            numbers = lora.numbers
            assert numbers.dtype == (torch.float32 if dtype == "auto" else torch.bfloat16)
            outputs = llm.generate(PROMPTS[:2], GREEDY, lora=family.folders[0])
            assert [len(output.outputs[0].token_ids) for output in outputs] == [TOKENS] * 2
    assert 1.9 < taken["auto"] / taken["bfloat16"] < 2


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_adapters_come_and_go_under_load(family, tmp_path, count):
    """No request is lost, and the host keeps no more than it may."""
    many = Family(family.base)
    for number in range(count):
        many.folders.append(
            folders.save_adapter(tmp_path / str(number), family.base, rank=random.randint(1, 4), targets=("q_proj",))
        )
    adapters = [random.randrange(-1, count) for _ in range(2 * count)] + list(range(count))
    prompts = [[random.randrange(50, 1000) for _ in range(random.randint(1, 20))] for _ in adapters]
    with LLM(str(DEMO), **OPTIONS, max_running_requests=8) as llm:
        loader = llm._engine.core._adapters._store._loader
        outputs = llm.generate(prompts, GREEDY, lora=[many.folder(adapter) for adapter in adapters])
        assert [len(output.outputs[0].token_ids) for output in outputs] == [TOKENS] * len(adapters)
        stats = llm.stats()
        assert stats.lora_loads >= count
        assert (stats.lora_used, stats.lora_waiting) == (0, 0)
        assert len(loader._copies) + len(loader._spare) == SLOTS + 1
        for number in random.sample(range(len(adapters)), 4):
            adapter = adapters[number]
            model = family.base if adapter < 0 else folders.merged(family.base, many.folders[adapter])
            Family(model).check(-1, outputs[number])
        llm._engine.core.check()


RANKS: dict[str, dict[str, Any]] = {
    "2 ranks": {"tensor_parallel_size": 2},
    "2 stages": {"pipeline_parallel_size": 2},
    "3 ranks": {"tensor_parallel_size": 3},
    "2 stages of 2, no overlap": {
        "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "disable_overlap": True,
    },
    "2 ranks, chunks of 7": {
        "tensor_parallel_size": 2, "prefill_chunk_tokens": 7, "ragged_flash_max_batch_tokens": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("ranks", some_of(RANKS, []))
def test_ranks_give_the_tokens_of_merged_weights(family, tmp_path, ranks):
    """Each has its share of every adapter; one that a single rank cannot have is refused, and others go on."""
    broken = tmp_path / "broken"
    shutil.copytree(family.folders[0], broken)
    last = f"{folders.PREFIX}model.layers.{family.base.config.num_hidden_layers - 1}.self_attn.q_proj.lora_B.weight"
    matrix = folders.load_file(broken / folders.TENSORS)[last]
    matrix[-1, 0] = torch.nan  # what the last rank holds
    folders.edit_tensors(broken, **{last: matrix})
    with LLM(str(DEMO), **OPTIONS, **RANKS[ranks]) as llm:
        for _ in range(2):
            ask(llm, family, PROMPTS, MIX)
            lora = [broken, *(family.folders[number] for number in range(ADAPTERS)), broken]
            outputs = llm.generate(PROMPTS[:6], GREEDY, lora=lora)
            for output in (outputs[0], outputs[-1]):
                assert output.outputs[0].error == "adapter_refused"
                assert "finite" in output.outputs[0].message
            for adapter, output in enumerate(outputs[1:-1]):
                family.check(adapter, output)
        assert llm.stats().lora_used == 0
