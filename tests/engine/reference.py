"""transformers' own generation, the independent reference of the engine tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "It is a truth universally acknowledged, that a single man",
    "The",
    "def quicksort(items):\n    ",
    "Question: Natalia sold 48 clips in April and half as many in May. How many clips did she sell?\nAnswer:",
    "In the beginning of the year 1805, when the great war",
    "This PEP proposes a new syntax for",
    "“I do not know,” said the captain, “whether the ship",
    "The ownership rules of Rust are:",
    "Once upon a time, in a village by the sea, there lived an old woman who had three sons. The eldest",
    "1, 2, 3, 4, 5, 6, 7,",
)

PADDING = 3
"""A token in front of prompts shorter than others beside them."""


@cache
def load(folder: Path, device: str = "cpu") -> tuple[AutoModelForCausalLM, AutoTokenizer]:
    """Model in float32 and tokenizer, loaded once a test run."""
    return load_model(folder).to(device), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_model(folder: Path) -> AutoModelForCausalLM:
    """Model in float32, of a folder that may have no tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@cache
def _kept(folder: Path, device: str) -> dict[tuple[int, ...], list[int]]:
    """The longest continuation of each prompt that was asked for: shorter ones are its beginnings."""
    return {}


def greedy(folder: Path, prompt: list[int], tokens: int, device: str = "cpu") -> list[int]:
    """The `tokens` most likely continuation tokens, end-of-text ignored."""
    return greedy_all(folder, [prompt], tokens, device)[0]


def greedy_all(folder: Path, prompts: list[list[int]], tokens: int, device: str = "cpu") -> list[list[int]]:
    """`greedy` of several prompts, in one batch: a token of all takes hardly longer than that of one."""
    kept = _kept(folder, device)
    missing = [prompt for prompt in prompts if len(kept.get(tuple(prompt), ())) < tokens]
    if missing:
        for prompt, found in zip(missing, _generate(load(folder, device)[0], missing, tokens), strict=True):
            kept[tuple(prompt)] = found
    return [kept[tuple(prompt)][:tokens] for prompt in prompts]


@torch.inference_mode()
def _generate(model: AutoModelForCausalLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """transformers' own generation; it looks at nothing in front of the shorter prompts."""
    length = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (length - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=PADDING,
    )
    return output[:, length:].tolist()


@torch.inference_mode()
def logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token after each prefix, float32 [len(ids), vocab]."""
    model, _ = load(folder)
    return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
