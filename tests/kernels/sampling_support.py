"""Statistics and references for the tests of sampling."""

import random

import torch
from bladellm_kernels.gumbel import row_keys, stream_key

ALARM = 1e-7
"""A correct implementation fails a statistical test once in ten million runs."""


def fresh_seed() -> int:
    """A new seed each run; pytest shows it when the test fails."""
    seed = random.SystemRandom().getrandbits(62)
    print(f"seed {seed}")
    return seed


def fresh_generator() -> torch.Generator:
    return torch.Generator().manual_seed(fresh_seed())


def stream_tensor(seeds, choice: int = 0) -> torch.Tensor:
    return torch.tensor([stream_key(seed, choice) for seed in seeds], dtype=torch.int32)


def keys_for(seeds, position: int = 0, choice: int = 0) -> torch.Tensor:
    streams = stream_tensor(seeds, choice)
    return row_keys(streams, torch.full((len(streams),), position))


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """P(chi-square at least this large); cells expecting fewer than 8 are pooled."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    small = expected < 8
    if small.any():
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    assert not (observed[expected == 0] > 0).any(), "a token of probability 0 was drawn"
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


def uniform_ks_p(sample: torch.Tensor) -> float:
    """Kolmogorov-Smirnov test against the uniform distribution on (0, 1), asymptotic p-value."""
    ordered = sample.double().flatten().sort().values
    n = len(ordered)
    grid = torch.arange(n, dtype=torch.float64)
    distance = max((ordered - grid / n).max().item(), ((grid + 1) / n - ordered).max().item())
    terms = torch.arange(1, 101, dtype=torch.float64)
    series = (-1) ** (terms - 1) * torch.exp(-2 * terms**2 * n * distance**2)
    return 1.0 if distance * n**0.5 < 0.3 else min(1.0, 2 * series.sum().item())


def pair_p(a: torch.Tensor, b: torch.Tensor, cells: int = 16) -> float:
    """Chi-square test that (a, b) fill the unit square evenly: uniform and pairwise independent."""
    cell = (a * cells).long() * cells + (b * cells).long()
    counts = torch.bincount(cell.flatten(), minlength=cells * cells)
    return chi_square_p(counts, torch.full((cells * cells,), a.numel() / cells**2))


def warped_by_transformers(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Scaled and filtered logits, -inf where dropped, in float64, by transformers' own processors. logits: [R, V]."""
    # Imported late: processes that interpret kernels do without, and it takes as long as many of them.
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores, no_ids = logits.double(), torch.zeros(len(logits), 0, dtype=torch.int64)
    warpers = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        scores = warper(no_ids, scores)
    return scores


def assert_best(tokens: torch.Tensor, scores: torch.Tensor, what: object = "") -> None:
    """Each row's token has its row's highest float64 score, but for what rounding to float32 may swap."""
    chosen = scores.gather(1, tokens[:, None])[:, 0]
    missed = (chosen < scores.amax(dim=-1) - 1e-4).nonzero().flatten().tolist()
    assert not missed, f"rows {missed} of {what}"
