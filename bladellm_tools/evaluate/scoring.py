"""Losses of a model on windows of tokens and, beside a baseline, how far their predictions are apart.

The logits are those the server computes. They exist for a few tokens at a time: hidden states are projected in blocks
of rows. Sums are kept in float64.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from bladellm_runtime.errors import UserError
from bladellm_runtime.models.decoder import Decoder
from bladellm_tools.evaluate.forward import WindowForward

BLOCK_ELEMENTS = 2**24
"""Logits that exist at once, of each model."""
OnWindows = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PairScores:
    """A baseline on the same windows, all on the CPU.

    losses: float64 [W], as in `Scores`. kl: float32 [W, T − 1], KL(baseline ‖ model) of each token's distribution in
    nats. agreement: float64 [W], share of tokens for which both models have the same likeliest token.
    """

    losses: torch.Tensor
    kl: torch.Tensor
    agreement: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """A model on W windows of T tokens. losses: float64 [W] on the CPU, mean over a window's T − 1 targets of
    −log p(target), in nats."""

    losses: torch.Tensor
    pair: PairScores | None = None


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of N tokens, on the models' device: losses float32 [N]; with a baseline its losses, kl and equal, bool [N]."""

    losses: torch.Tensor
    baseline: torch.Tensor | None
    kl: torch.Tensor | None
    equal: torch.Tensor | None


def score(
    model: Decoder,
    windows: torch.Tensor,
    baseline: Decoder | None = None,
    *,
    batch: int = 1,
    on_windows: OnWindows | None = None,
) -> Scores:
    """Run windows, int64 [W, T] with T ≥ 2 and W ≥ 1, `batch` at a time; `on_windows` hears how many have just ended.

    The models must have the same vocabulary and device. Raises `UserError` where logits are not finite.
    """
    count, length = windows.shape
    parts: list[Scores] = []
    with ExitStack() as stack:
        batch = min(batch, count)
        own = stack.enter_context(WindowForward(model, length, batch))
        other = stack.enter_context(WindowForward(baseline, length, batch)) if baseline is not None else None
        for first in range(0, count, batch):
            chunk = windows[first : first + batch]
            parts.append(_by_window(score_tokens(own, other, chunk), len(chunk)))
            _check_finite(parts[-1], first)
            if on_windows is not None:
                on_windows(len(chunk))
    return _joined(parts)


@torch.inference_mode()
def score_tokens(own: WindowForward, other: WindowForward | None, windows: torch.Tensor) -> TokenScores:
    """Every target of windows [B, T], one window after the other: N = B · (T − 1)."""
    hidden = own.hidden(windows)
    other_hidden = other.hidden(windows) if other is not None else None
    targets = windows[:, 1:].to(hidden.device).flatten()
    rows = max(1, BLOCK_ELEMENTS // own.model.spec.vocab_size)
    parts: list[TokenScores] = []
    for first in range(0, len(targets), rows):
        block = slice(first, first + rows)
        logs = own.model.logits(hidden[block]).log_softmax(1)
        other_logs = None
        if other is not None and other_hidden is not None:
            other_logs = other.model.logits(other_hidden[block]).log_softmax(1)
        parts.append(compare_tokens(logs, other_logs, targets[block]))
    return TokenScores(
        torch.cat([part.losses for part in parts]),
        _cat([part.baseline for part in parts]),
        _cat([part.kl for part in parts]),
        _cat([part.equal for part in parts]),
    )


def compare_tokens(logs: torch.Tensor, baseline: torch.Tensor | None, targets: torch.Tensor) -> TokenScores:
    """Scores of tokens from log-probabilities, float32 [N, vocab], and targets, int64 [N]. Overwrites `logs`."""
    chosen = targets.unsqueeze(1)
    losses = -logs.gather(1, chosen).squeeze(1)
    if baseline is None:
        return TokenScores(losses, None, None, None)
    equal = logs.argmax(1) == baseline.argmax(1)
    difference = torch.sub(baseline, logs, out=logs)
    kl = difference.mul_(baseline.exp()).sum(1, dtype=torch.float64).float()
    return TokenScores(losses, -baseline.gather(1, chosen).squeeze(1), kl, equal)


def _cat(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _by_window(tokens: TokenScores, count: int) -> Scores:
    """Means of each of `count` windows."""
    losses = _means(tokens.losses, count)
    if tokens.baseline is None or tokens.kl is None or tokens.equal is None:
        return Scores(losses)
    kl = tokens.kl.view(count, -1).cpu()
    return Scores(losses, PairScores(_means(tokens.baseline, count), kl, _means(tokens.equal, count)))


def _means(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.view(count, -1).double().mean(1).cpu()


def _check_finite(scores: Scores, first: int) -> None:
    losses = {"model": scores.losses} | ({"baseline": scores.pair.losses} if scores.pair else {})
    for name, values in losses.items():
        if not values.isfinite().all():
            window = first + int((~values.isfinite()).nonzero()[0])
            raise UserError(
                f"the logits of --{name} are not finite in window {window}; its weights are broken or --dtype is too "
                "narrow: try --dtype float32"
            )


def _joined(parts: list[Scores]) -> Scores:
    losses = torch.cat([part.losses for part in parts])
    pairs = [part.pair for part in parts if part.pair is not None]
    if not pairs:
        return Scores(losses)
    pair = PairScores(
        torch.cat([pair.losses for pair in pairs]),
        torch.cat([pair.kl for pair in pairs]),
        torch.cat([pair.agreement for pair in pairs]),
    )
    return Scores(losses, pair)
