"""Models, texts and independent figures that the tests of the evaluation share."""

import math
import random
from pathlib import Path

import torch
import transformers

WORDS = ("the", "a", "boat", "river", "house", "of", "and", "to", "in", "it", "was", "she", "old", "green", "under")


def random_text(words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(words))


def perturbed(source: Path, folder: Path, noise: float) -> Path:
    """A copy of a model, tokenizer and all, with noise on every matrix: a stand-in for a rounded one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@torch.no_grad()
def reference_logs(folder: Path, windows: torch.Tensor) -> torch.Tensor:
    """transformers' log-probabilities of every position but the last, float64 [W, T − 1, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()(windows).logits[:, :-1].double().log_softmax(-1)


def reference_losses(logs: torch.Tensor, windows: torch.Tensor) -> list[float]:
    """−log p of the next token, meaned over each window, one token at a time."""
    losses = []
    for rows, window in zip(logs, windows, strict=True):
        chosen = [-float(rows[place, window[place + 1]]) for place in range(len(window) - 1)]
        losses.append(math.fsum(chosen) / len(chosen))
    return losses


def reference_kl(model: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    """KL(baseline ‖ model) per token by torch's own function, [W, T − 1]."""
    return torch.nn.functional.kl_div(model, baseline, log_target=True, reduction="none").sum(-1)
