"""Engines with LoRA adapters answer as merged models do, whatever else goes on."""

import copy
import random
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.config import EngineArgs, check_lora
from bladellm_runtime.errors import ConfigError, ParameterError
from bladellm_runtime.request import FinishReason
from bladellm_runtime.wire.messages import AddRequest, MoveAdapter, RequestDelta
from tests.engine import reference
from tests.engine.captured import Again, captured_llm
from tests.engine.test_equality import token_bytes
from tests.engine.test_quantized import SCHEMES, make_pair
from tests.lora.folders import TENSORS, edit_tensors, merged, save_adapter

TOKENS = 10
LIMIT = 1e-4
SCORED = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PLAIN = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
SHAPE: dict[str, Any] = {"dtype": "float32", "kv_cache_gib": 0.1, "enable_lora": True}
GRAPHS = {"cuda_graph_batch_sizes": [2, 5, 9], "cuda_graph_prefill_tokens": [8, 40, 100]}
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"disable_overlap": True},
    "chunks of 7": {"prefill_chunk_tokens": 7, "ragged_flash_max_batch_tokens": 24},
    "paged": {"attn_cls": "paged"},
    "relocating": {"kv_arena": "relocating"},
    "no prompt cache": {"disable_prompt_cache": True},
}


class Family:
    """The demo model and adapters for it; `models[None]` is the base, others are merged ones by their folders."""

    def __init__(self, folder: Path, home: Path, count: int = 5) -> None:
        base, tokenizer = reference.load(folder)
        self.tokenizer = tokenizer
        self.home = home
        self.adapters = [
            save_adapter(home / f"a{number}", base, rank=random.randint(1, 8), use_rslora=number % 2 == 1)
            for number in range(count)
        ]
        self.models: dict[Path | None, PreTrainedModel] = {None: base}
        self.models |= {adapter: merged(base, adapter) for adapter in self.adapters}

    @torch.inference_mode()
    def check(self, output: Any, adapter: Path | None, prompt_too: bool = False) -> None:
        """An answer's tokens are the likeliest by the model, but for ties, and so are its log-probabilities."""
        choice = output.outputs[0]
        assert choice.error is None, choice.message
        ids, prompt = output.prompt_token_ids + choice.token_ids, len(output.prompt_token_ids)
        logits = self.models[adapter](torch.tensor([ids])).logits[0].float()
        scores = logits.log_softmax(-1)
        best = scores[prompt - 1 : -1]
        assert len(choice.token_ids) == TOKENS
        found = torch.tensor([entry.logprobs[0] for entry in choice.logprobs])
        own = best.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        limit = LIMIT * max(1.0, float(logits.abs().max()))
        assert (found - own).abs().max() <= 2 * limit
        assert (best.max(1).values - own).max() <= 2 * limit
        if prompt_too and prompt > 1:
            wanted = scores[: prompt - 1].gather(1, torch.tensor(ids[1:prompt])[:, None])[:, 0]
            given = torch.tensor([entry.logprobs[0] for entry in output.prompt_logprobs])
            assert (given - wanted).abs().max() <= 2 * limit


@pytest.fixture(scope="module")
def family(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(demo_model, tmp_path_factory.mktemp("adapters"))


def ask(llm: LLM, family: Family, prompts: list[Any], adapters: list[Path | None], params: Any = PLAIN) -> list[Any]:
    """Have prompts answered and check them all."""
    outputs = llm.generate(prompts, params, lora=adapters)
    for output, adapter in zip(outputs, adapters, strict=True):
        family.check(output, adapter, params is SCORED)
    return outputs


def mix(family: Family, count: int) -> tuple[list[str], list[Path | None]]:
    """Prompts, and as many adapters or none, all of them in random order."""
    adapters: list[Path | None] = [None, *family.adapters]
    chosen = [*adapters, *(random.choice(adapters) for _ in range(count - len(adapters)))]
    random.shuffle(chosen)
    return [random.choice(reference.PROMPTS) for _ in chosen], chosen


SAMPLE = [("overlap", True), ("chunks of 7", False)]
EVERY = [(way, captured) for way in WAYS for captured in (False, True)]


@pytest.mark.parametrize(
    ("way", "captured"), [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]
)
def test_any_mix_answers_as_merged_models(demo_model, device, family, way, captured):
    """Five adapters and the base in two slots: they come and go, and nobody notices."""
    capture = Again() if captured and device == "cpu" else None
    options = SHAPE | WAYS[way] | {"max_loras": 2, "max_cpu_loras": 3, "device": device}
    with captured_llm(str(demo_model), capture, **options, **(GRAPHS if captured else {})) as llm:
        for params in (PLAIN, SCORED):
            ask(llm, family, *mix(family, 8), params)
        stats = llm.stats()
        assert stats.lora_slots == 2
        assert stats.lora_loads >= 5
        assert stats.lora_evictions == stats.lora_loads - 2
        assert (stats.lora_used, stats.lora_waiting) == (0, 0)
        assert stats.lora_load_seconds > 0
        if capture is not None:
            assert capture.replays > 0


def test_steps_without_adapters_replay_the_plain_graphs(demo_model, family, monkeypatch):
    calls = []
    from bladellm_runtime.layers import lora as layers

    shrink = layers.lora_shrink
    monkeypatch.setattr(layers, "lora_shrink", lambda *given: (calls.append(1), shrink(*given))[1])
    with captured_llm(str(demo_model), Again(), **SHAPE, device="cpu", **GRAPHS) as llm:
        calls.clear()
        ask(llm, family, ["The", "A"], [None, None])
        assert not calls
        ask(llm, family, ["The", "A"], [None, family.adapters[0]])
        assert calls


def test_adapters_never_share_cached_prompts_and_one_shares_with_itself(demo_model, device, family):
    prompt = list(range(5, 90))
    one, two = family.adapters[:2]
    with LLM(str(demo_model), device=device, **SHAPE) as llm:
        for adapter, cached in ((None, 0), (one, 0), (two, 0), (one, 1), (None, 1), (two, 1)):
            found = ask(llm, family, [prompt], [adapter])[0].cached_tokens
            assert (found > 64) == bool(cached), (adapter, found)
        llm._engine.core.check()


def test_a_clients_salt_is_no_adapter(family):
    from bladellm_runtime.request import check_cache_salt
    from bladellm_runtime.scheduler.admission import cache_key

    adapter = str(family.adapters[0])
    key = cache_key("", f"{adapter}\0001")
    with pytest.raises(ParameterError):
        check_cache_salt(key)
    assert len({key, cache_key("a", f"{adapter}\0001"), cache_key("", f"{adapter}\0002"), cache_key("a", ""), ""}) == 5


def test_preemption(demo_model, device, family):
    """Memory for a few sequences: those that give way keep their adapters' slots, and go on with them."""
    options = SHAPE | {"kv_cache_gib": 96 * token_bytes(demo_model) / 2**30, "max_model_len": 64, "max_loras": 3}
    if device == "cuda":
        options |= {"attn_cls": "paged"}
    prompts = [[random.randrange(3, 900) for _ in range(20)] for _ in range(8)]
    with LLM(str(demo_model), device=device, **options) as llm:
        ask(llm, family, prompts, [random.choice([None, *family.adapters[:3]]) for _ in prompts])
        assert llm.stats().preemptions > 0


def drain(llm: LLM, deltas: list[RequestDelta] | None = None) -> list[RequestDelta]:
    """All deltas until the engine is idle, behind those given."""
    found = list(deltas or [])
    while not llm._engine.core.idle:
        found += llm._engine.core.step()
    return found


def terminal(deltas: list[RequestDelta]) -> dict[int, RequestDelta]:
    ended = [delta for delta in deltas if delta.finish is not None]
    assert len({delta.request_id for delta in ended}) == len(ended)
    return {delta.request_id: delta for delta in ended}


def request(number: int, adapter: Path | str, tokens: int = TOKENS, prompt: list[int] | None = None) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return AddRequest(number, prompt or [7, 8, number % 90 + 3], params, 0, time.monotonic(), adapter=str(adapter))


def test_what_cannot_be_loaded_is_refused_and_the_others_go_on(demo_model, device, family, tmp_path):
    good = family.adapters[0]
    broken, gone = (Path(shutil.copytree(good, tmp_path / name)) for name in ("broken", "gone"))
    edit_tensors(broken, **{key: torch.full_like(value, torch.nan) for key, value in first_tensor(broken).items()})
    with LLM(str(demo_model), device=device, **SHAPE | {"max_loras": 2, "max_cpu_loras": 2}) as llm:
        ask(llm, family, ["The"], [good])
        (gone / TENSORS).unlink()
        prompts, adapters = ["The", "A", "One", "Two", "It"], [broken, good, gone, None, broken]
        outputs = llm.generate(prompts, PLAIN, lora=adapters)
        for output, adapter in zip(outputs, adapters, strict=True):
            if adapter in (good, None):
                family.check(output, adapter)
            else:
                choice = output.outputs[0]
                assert (choice.error, choice.token_ids) == ("adapter_refused", [])
                assert ("not finite" if adapter is broken else "missing") in choice.message
                assert str(tmp_path) not in choice.message
        assert llm.stats().lora_used == 0
        ask(llm, family, ["The"] * 3, family.adapters[1:4])


def first_tensor(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict([next(iter(load_file(folder / TENSORS).items()))])


def test_a_waiting_adapter_is_not_kept_away_by_others(demo_model, family):
    """One slot, and requests for the adapter in it that never stop: the other one's request gets its turn."""
    one, two = family.adapters[:2]
    with LLM(str(demo_model), device="cpu", **SHAPE | {"max_loras": 1}) as llm:
        core, ended = llm._engine.core, []
        core.add(request(1, one))
        core.add(request(2, two))
        for number in range(3, 30):
            core.add(request(number, one))
            ended += [delta.request_id for delta in core.step() if delta.finish is not None]
        ended += [delta.request_id for delta in drain(llm) if delta.finish is not None]
        assert len(ended) == 29
        assert ended.index(2) <= 3


def test_requests_that_end_while_their_adapter_is_on_its_way(demo_model, family):
    with LLM(str(demo_model), device="cpu", **SHAPE | {"max_loras": 1}) as llm:
        core = llm._engine.core
        deltas = []
        for number in range(1, 17):
            deltas += core.add(request(number, random.choice(family.adapters)))
            if number % 2:
                deltas += core.step()
                deltas += core.abort([random.randint(1, number)])
        ended = terminal(drain(llm, deltas))
        assert sorted(ended) == list(range(1, 17))
        assert {delta.finish for delta in ended.values()} == {FinishReason.ABORT, FinishReason.LENGTH}
        assert llm.stats().lora_used == 0
        ask(llm, family, ["The"], [family.adapters[3]])


def test_adapters_are_moved_on_demand(demo_model, device, family, tmp_path):
    """Loaded ahead, not unloaded in use, read anew afterwards; what is cached of the old one is not the new one's."""
    folder = Path(shutil.copytree(family.adapters[0], tmp_path / "adapter"))
    family.models[folder] = family.models[family.adapters[0]]
    prompt = list(range(5, 90))
    with LLM(str(demo_model), device=device, **SHAPE | {"max_loras": 1}) as llm:
        core = llm._engine.core
        assert core.move_adapter(MoveAdapter(1, str(folder), True)) == []
        [delta] = drain(llm)
        assert (delta.request_id, delta.finish) == (1, FinishReason.STOP)
        assert (llm.stats().lora_loads, llm.stats().lora_used) == (1, 0)
        ask(llm, family, [prompt], [folder])
        core.add(request(2, folder))
        core.step()
        [delta] = core.move_adapter(MoveAdapter(3, str(folder), False))
        assert (delta.finish, delta.error) == (FinishReason.ERROR, "adapter_in_use")
        assert "adapter" in delta.message
        drain(llm)
        shutil.copytree(family.adapters[1], folder, dirs_exist_ok=True)
        ask(llm, family, [prompt], [folder])  # until it is unloaded it is the old one
        [delta] = core.move_adapter(MoveAdapter(4, str(folder), False))
        assert (delta.request_id, delta.finish) == (4, FinishReason.STOP)
        family.models[folder] = family.models[family.adapters[1]]
        assert ask(llm, family, [prompt], [folder])[0].cached_tokens == 0
        core.move_adapter(MoveAdapter(5, str(tmp_path / "nowhere"), True))
        [delta] = drain(llm)
        assert (delta.request_id, delta.error) == (5, "adapter_refused")
        core.move_adapter(MoveAdapter(6, str(family.adapters[2]), True))
        [delta] = core.abort([6])
        assert (delta.finish, core.idle) == (FinishReason.ABORT, True)


def test_engines_without_slots_say_so(demo_model, device, family):
    options = {key: value for key, value in SHAPE.items() if key != "enable_lora"}
    with LLM(str(demo_model), device=device, **options) as llm:
        outputs = llm.generate(["The", "The"], PLAIN, lora=[family.adapters[0], None])
        assert outputs[0].outputs[0].error == "adapter_refused"
        assert "--enable_lora" in outputs[0].outputs[0].message
        family.check(outputs[1], None)
        for load in (True, False):
            deltas = llm._engine.core.move_adapter(MoveAdapter(9, "/x", load)) or drain(llm)
            assert [delta.error for delta in deltas] == ["adapter_refused"]
        with pytest.raises(ParameterError, match="2 prompts need as many adapters in lora, got 1"):
            llm.generate(["The", "A"], PLAIN, lora=[None])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_loras": 8}, "--max_loras 8 is for LoRA adapters; add --enable_lora"),
        ({"lora_dtype": "float16"}, "--lora_dtype float16 is for LoRA adapters; add --enable_lora"),
        (
            {"enable_lora": True, "max_loras": 17},
            "--max_cpu_loras 16 is below --max_loras 17; .* use 17 or more",
        ),
    ],
)
def test_flags_that_cannot_be(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_lora(EngineArgs(model="m", **options))


RANKS = {
    "2 ranks": {"tensor_parallel_size": 2},
    "2 stages": {"pipeline_parallel_size": 2},
    "3 ranks": {"tensor_parallel_size": 3},
    "2 stages of 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(name, marks=[pytest.mark.slow] if number > 0 else []) for number, name in enumerate(RANKS)],
)
def test_ranks_answer_as_merged_models(demo_model, family, ranks, tmp_path):
    """More adapters than slots, some that cannot be loaded, and one that was loaded and is unloaded."""
    broken = Path(shutil.copytree(family.adapters[0], tmp_path / "broken"))
    edit_tensors(broken, **{key: torch.full_like(value, torch.nan) for key, value in last_tensor(broken).items()})
    options = SHAPE | RANKS[ranks] | {"max_loras": 2, "max_cpu_loras": 3, "kv_cache_gib": 0.05, "device": "cpu"}
    with LLM(str(demo_model), **options) as llm:
        for _ in range(2):
            ask(llm, family, *mix(family, 8))
            [output] = llm.generate(["The"], PLAIN, lora=broken)
            assert output.outputs[0].error == "adapter_refused"
            assert "not finite" in output.outputs[0].message
        [delta] = llm._engine.core.move_adapter(MoveAdapter(10**6, str(family.adapters[1]), False))
        assert delta.finish is FinishReason.STOP
        time.sleep(0.1)  # ranks are idle, and hear of moves all the same
        ask(llm, family, ["The"] * 4, family.adapters[:4])
        assert llm.stats().lora_used == 0


def last_tensor(folder: Path) -> dict[str, torch.Tensor]:
    """Of the last layer, which not all stages of a pipeline hold."""
    from safetensors.torch import load_file

    return dict([max(load_file(folder / TENSORS).items())])


@pytest.mark.parametrize(
    ("name", "method"),
    [("w4a16", "gptq"), pytest.param("w8a16", "compressed-tensors", marks=pytest.mark.slow)],
)
def test_quantized_layers_take_adapters(demo_model, device, family, tmp_path, name, method):
    pair = make_pair(demo_model, tmp_path, method, SCHEMES[name])
    base, _ = reference.load(pair.plain)
    quantized = copy.copy(family)
    quantized.models = {None: base} | {adapter: merged(base, adapter) for adapter in family.adapters}
    with LLM(str(pair.quantized), device=device, **SHAPE | {"max_loras": 3}) as llm:
        ask(llm, quantized, *mix(family, 8))


def test_trained_adapters_answer_as_merged_models(target_model, device):
    """Alone and in one batch with the base, in absolute terms."""
    base, _ = reference.load(target_model)
    folders = [target_model.parent / "adapters" / name for name in ("gsm8k", "pep")]
    models = {None: base} | {folder: merged(base, folder) for folder in folders}
    with LLM(str(target_model), device=device, **SHAPE) as llm:
        for asked in ([None, *folders], folders[:1], folders[1:]):
            outputs = llm.generate(list(reference.PROMPTS[: len(asked)]), SCORED, lora=asked)
            for output, folder in zip(outputs, asked, strict=True):
                ids = output.prompt_token_ids + output.outputs[0].token_ids
                with torch.inference_mode():
                    scores = models[folder](torch.tensor([ids])).logits[0].float().log_softmax(-1)
                entries = [*output.prompt_logprobs, *output.outputs[0].logprobs]
                found = torch.tensor([entry.logprobs[0] for entry in entries])
                wanted = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
                assert (found - wanted).abs().max() <= LIMIT


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_adapters_come_and_go_under_load(demo_model, device, family, tmp_path, count):
    """Each is asked for once, beside the base and others; no request is lost, and no memory of hosts or slots."""
    folders = [family.adapters[number % 5] for number in range(count)]
    names = [tmp_path / f"{number}" for number in range(count)]
    for name, folder in zip(names, folders, strict=True):
        name.symlink_to(folder)
    with LLM(str(demo_model), device=device, **SHAPE | {"max_loras": 3, "max_cpu_loras": 4}) as llm:
        core, deltas, sizes = llm._engine.core, [], []
        for number, name in enumerate(names):
            deltas += core.add(request(2 * number, name, 4, [7, 8, 9])) + core.add(request(2 * number + 1, "", 4))
            deltas += core.step()
            if number in (count // 2, count - 1):
                deltas = drain(llm, deltas)
                sizes.append(psutil.Process().memory_info().rss)
        ended = terminal(deltas)
        assert sorted(ended) == list(range(2 * count))
        assert {delta.finish for delta in ended.values()} == {FinishReason.LENGTH}
        first: dict[int, int] = {}
        for delta in deltas:
            for token in delta.tokens:
                first.setdefault(delta.request_id, token)
        with torch.inference_mode():
            logits = [family.models[folder](torch.tensor([[7, 8, 9]])).logits[0, -1] for folder in family.adapters]
        for number in range(count):
            wanted = logits[number % 5]
            assert wanted.max() - wanted[first[2 * number]] <= LIMIT * max(1.0, float(wanted.abs().max()))
        stats = llm.stats()
        assert (stats.lora_loads, stats.lora_evictions) == (count, count - 3)
        assert len(core._adapters._store._loader._copies) + len(core._adapters._store._loader._spare) <= 4
        assert sizes[1] - sizes[0] < 64 << 20
        core.check()


def test_the_memory_of_slots_is_told(demo_model, device):
    rows = []
    for options in ({}, {"max_loras": 3, "lora_dtype": "bfloat16"}):
        with LLM(str(demo_model), device=device, **SHAPE | {"enable_lora": bool(options)} | options) as llm:
            rows.append(dict(llm.ready.memory))
    assert "LoRA adapters" not in rows[0]
    assert rows[0]["weights"] == rows[1]["weights"]
    spec = reference.load(demo_model)[0].config
    heads = spec.hidden_size // spec.num_attention_heads
    widths = [(spec.hidden_size, spec.hidden_size)] * 2
    widths += [(spec.hidden_size, spec.num_key_value_heads * heads)] * 2
    widths += [(spec.hidden_size, spec.intermediate_size)] * 3
    numbers = 3 * 16 * spec.num_hidden_layers * sum(one + other for one, other in widths)
    assert 2 * numbers <= rows[1]["LoRA adapters"] <= 2.05 * numbers
