"""A trained model with random adapters, and the models that its weights give when these are merged into them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.llm import GenerateOutput
from tests.lora import folders
from tests.models.harness import assert_greedy

TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
TARGETS = (folders.MODULES, ("q_proj", "v_proj"), ("k_proj", "gate_proj", "down_proj"), ("o_proj", "up_proj"))


@dataclass
class Family:
    """A base model and adapters of it, by number; -1 is the base alone."""

    base: transformers.PreTrainedModel
    folders: list[Path] = field(default_factory=list)
    merged: list[transformers.PreTrainedModel] = field(default_factory=list)
    _greedy: dict[tuple[int, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def add(self, folder: Path, **options) -> None:
        """A random adapter, or one more look at a folder that has changed."""
        if not folder.exists():
            targets = TARGETS[len(self.folders) % len(TARGETS)]
            folders.save_adapter(folder, self.base, **({"rank": random.randint(1, 16), "targets": targets} | options))
        self.folders.append(folder)
        self.merged.append(folders.merged(self.base, folder))

    def model(self, adapter: int) -> transformers.PreTrainedModel:
        return self.base if adapter < 0 else self.merged[adapter]

    def folder(self, adapter: int) -> Path | None:
        return None if adapter < 0 else self.folders[adapter]

    def check(self, adapter: int, output: GenerateOutput) -> None:
        """The tokens are transformers' own for the merged model."""
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        key = (adapter, tuple(prompt))
        if tokens != self._greedy.get(key):
            assert_greedy(self.model(adapter), prompt, tokens)
            self._greedy[key] = tokens
        assert len(tokens) == TOKENS, output.outputs[0].message


def make_family(base: transformers.PreTrainedModel, root: Path, count: int) -> Family:
    family = Family(base)
    for number in range(count):
        family.add(root / f"adapter-{number}")
    return family


def ask(llm: LLM, family: Family, prompts: Sequence[str | list[int]], adapters: Sequence[int]) -> list[GenerateOutput]:
    """Ask for greedy answers of adapters to prompts, all at once, and check them."""
    outputs = llm.generate(prompts, GREEDY, lora=[family.folder(adapter) for adapter in adapters])
    for adapter, output in zip(adapters, outputs, strict=True):
        family.check(adapter, output)
    return outputs


@torch.inference_mode()
def logprobs(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of a text's tokens from the second on, in float64 of the model's own logits."""
    found = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
