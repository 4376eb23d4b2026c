"""Slots for adapters change hands: in turn, on demand, on all ranks; answers are those of merged models all along."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.errors import ParameterError
from bladellm_runtime.request import FinishReason
from bladellm_runtime.wire.messages import AddRequest, MoveAdapter, RequestDelta, one_by_one
from tests.engine import reference
from tests.engine.captured import Again, captured_llm
from tests.lora.folders import TENSORS, edit_tensors, merged, save_adapter

TOKENS = 7
LIMIT = 1e-4
SCORED = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PLAIN = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
SHAPE: dict[str, Any] = {"dtype": "float32", "kv_cache_gib": 0.1, "enable_lora": True}
GRAPHS = {"cuda_graph_batch_sizes": [2, 5, 9], "cuda_graph_prefill_tokens": [8, 40, 100]}


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


def test_a_clients_salt_is_no_adapter(family):
    from bladellm_runtime.request import check_cache_salt
    from bladellm_runtime.scheduler.admission import cache_key

    adapter = str(family.adapters[0])
    key = cache_key("", f"{adapter}\0001")
    with pytest.raises(ParameterError):
        check_cache_salt(key)
    assert len({key, cache_key("a", f"{adapter}\0001"), cache_key("", f"{adapter}\0002"), cache_key("a", ""), ""}) == 5


def drain(llm: LLM, deltas: list[RequestDelta] | None = None) -> list[RequestDelta]:
    """All deltas until the engine is idle, behind those given."""
    core, found = llm._engine.core, list(deltas or [])
    while not core.idle:
        if core.preparing:
            time.sleep(0.001)  # the thread that reads adapters needs the interpreter too
        found += one_by_one(core.step())
    return found


def terminal(deltas: list[RequestDelta]) -> dict[int, RequestDelta]:
    ended = [delta for delta in deltas if delta.finish is not None]
    assert len({delta.request_id for delta in ended}) == len(ended)
    return {delta.request_id: delta for delta in ended}


def request(number: int, adapter: Path | str, tokens: int = TOKENS, prompt: list[int] | None = None) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return AddRequest(number, prompt or [7, 8, number % 90 + 3], params, 0, time.monotonic(), adapter=str(adapter))


def test_a_waiting_adapter_is_not_kept_away_by_others(demo_model, family):
    """One slot, and requests for the adapter in it that never stop: the other one's request gets its turn."""
    one, two = family.adapters[:2]
    with LLM(str(demo_model), device="cpu", **SHAPE | {"max_loras": 1}) as llm:
        core, ended = llm._engine.core, []
        core.add(request(1, one))
        core.add(request(2, two))
        for number in range(3, 30):
            core.add(request(number, one))
            ended += [delta.request_id for delta in one_by_one(core.step()) if delta.finish is not None]
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
                deltas += one_by_one(core.step())
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


RANKS = {
    "2 ranks": {"tensor_parallel_size": 2},
    "2 stages": {"pipeline_parallel_size": 2},
    "3 ranks": {"tensor_parallel_size": 3},
    "2 stages of 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.mark.turns("ranks")
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
