"""Draw one token a row: temperature, top-k, top-p, min-p, then a Gumbel-max draw.

Every filter keeps a prefix of the row's *descending order* (highest logit first, equal logits by id), so the kept set
is one prefix, whatever the algorithm that finds it:

- top-k keeps the first k tokens: exactly k, so top-k 1 is the arg-max even between equal logits.
- top-p, over what top-k kept, renormalised: a token stays while the mass before it is below p. The first always stays.
- min-p, over the same: a token stays whose probability is at least min-p times the highest.

This is the order and the meaning of the logits processors of transformers (temperature, top-k, top-p, min-p), which
differ only in keeping all tokens equal to the k-th; vLLM applies min-p before top-k and top-p.
Mass is counted in integers (weights relative to the best token in units of 2^-40), so that sums are exact in any order
and a row's result depends on neither the batch nor the path taken.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bladellm_kernels.gumbel import gumbel_argmax
from bladellm_kernels.row_blocks import row_blocks

CANDIDATES = 1024
"""Widest top-k served from selected candidates; beyond, and for top-p alone, the whole row may be sorted."""

_SORT_SHARE = 16
"""Selecting more than a row's sixteenth costs about as much as sorting it."""

_MASS_UNITS = 2.0**40


@dataclass(frozen=True, slots=True)
class Filters:
    """What a batch of rows shares: `width` candidates are enough for each row's top-k (0: no row needs an order).

    temperature: float32 [R], above 0. top_k: int32 [R], the vocabulary size where off. top_p: float32 [R], above 0, 1
    where off. min_p: float32 [R], 0 where off. A filter that is None is off in all rows.
    """

    width: int
    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    def rows(self, part: slice | Tensor) -> "Filters":
        """The same for some of the rows."""
        top_k, top_p, min_p = (None if each is None else each[part] for each in (self.top_k, self.top_p, self.min_p))
        return Filters(self.width, self.temperature[part], top_k, top_p, min_p)


def sample_tokens(logits: Tensor, peaks: Tensor, keys: Tensor, filters: Filters) -> Tensor:
    """Draw one token a row: int64 [R].

    logits: float32 [R, V], left as it is. peaks: float32 [R], each row's highest logit. keys: int32 [R, 2] from
    `gumbel.row_keys`. Rows without a finite peak give an arbitrary token.
    """
    rows, vocab = logits.shape
    if not 0 <= filters.width <= vocab:
        raise ValueError(f"width must be between 0 and the vocabulary size {vocab}, got {filters.width}")
    drawn = [
        _sample_block(logits[part], peaks[part], keys[part], filters.rows(part))
        for part in row_blocks(rows, vocab, logits.device)
    ]
    return torch.cat(drawn) if drawn else peaks.new_empty(0, dtype=torch.int64)


def top_candidates(shifted: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` of each row's descending order: values float32 and ids int64, both [R, width].

    shifted: float32 [R, V], logits minus their row's highest, so that none is above 0.
    """
    # One integer orders value, then id: negative floats compare like their magnitude bits, turned round.
    keys = (shifted.view(torch.int32) & 0x7FFFFFFF).to(torch.int64).bitwise_left_shift_(32)
    best = _lowest(keys.bitwise_or_(torch.arange(shifted.shape[1], device=shifted.device)), width)
    magnitudes = (best >> 32).to(torch.int32).view(torch.float32)
    return -magnitudes, best & 0xFFFFFFFF


def reference_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution one row is drawn from, in float64, by sorting. logits: float [V]; top_k 0 is off."""
    scaled = logits.double() / temperature
    order = scaled.sort(descending=True, stable=True).indices
    kept = scaled[order[: top_k or None]].softmax(dim=0)
    inside = (kept.cumsum(dim=0) - kept < top_p) & (kept >= min_p * kept[0])
    inside[0] = True
    probabilities = torch.zeros_like(scaled)
    probabilities[order[: len(kept)]] = torch.where(inside, kept, 0.0)
    return probabilities / probabilities.sum()


def _lowest(keys: Tensor, width: int) -> Tensor:
    """The `width` lowest keys of each row in order. May sort `keys` in place."""
    if width * _SORT_SHARE < keys.shape[1] or (not keys.is_cpu and width <= CANDIDATES):
        return keys.topk(width, dim=-1, largest=False, sorted=True).values
    if not keys.is_cpu:
        return keys.sort(dim=-1).values[:, :width]
    # numpy sorts integers with vector instructions, more than ten times faster than torch on a CPU.
    keys.numpy().sort(axis=-1)
    return keys[:, :width]


def _sample_block(logits: Tensor, peaks: Tensor, keys: Tensor, filters: Filters) -> Tensor:
    shifted = (logits - peaks[:, None]).div_(filters.temperature[:, None])
    if filters.width == 0:
        return gumbel_argmax(_apply_min_p(shifted, filters.min_p), keys)
    if filters.width > CANDIDATES and filters.top_k is None and logits.is_cpu:
        return _sample_nucleus(shifted, keys, filters)
    values, ids = top_candidates(shifted, filters.width)
    return gumbel_argmax(_keep_prefix(values, filters), keys, ids)


def _sample_nucleus(shifted: Tensor, keys: Tensor, filters: Filters) -> Tensor:
    """Top-p without top-k on the CPU: only rows whose nucleus is wider than the candidates are sorted."""
    values, ids = top_candidates(shifted, CANDIDATES)
    total = _mass(shifted).sum(dim=-1, keepdim=True)
    tokens = gumbel_argmax(_keep_prefix(values, filters, total), keys, ids)
    if filters.top_p is not None:
        wide = (_mass(values).sum(dim=-1, keepdim=True) < _limit(total, filters.top_p)).flatten().nonzero().flatten()
        if len(wide):
            values, ids = top_candidates(shifted[wide], filters.width)
            tokens[wide] = gumbel_argmax(_keep_prefix(values, filters.rows(wide)), keys[wide], ids)
    return tokens


def _keep_prefix(values: Tensor, filters: Filters, total: Tensor | None = None) -> Tensor:
    """Descending `values` with -inf where a filter drops the token. `total` is the mass of the row if it has more
    tokens than `values`."""
    if filters.top_k is not None:
        columns = torch.arange(values.shape[1], device=values.device)
        values = values.masked_fill(columns >= filters.top_k[:, None], -torch.inf)
    if filters.top_p is not None:
        mass = _mass(values)
        before = mass.cumsum(dim=-1) - mass
        limit = _limit(mass.sum(dim=-1, keepdim=True) if total is None else total, filters.top_p)
        values = values.masked_fill(before >= limit, -torch.inf)
    return _apply_min_p(values, filters.min_p)


def _apply_min_p(values: Tensor, min_p: Tensor | None) -> Tensor:
    return values if min_p is None else values.masked_fill(values < min_p.log()[:, None], -torch.inf)


def _mass(values: Tensor) -> Tensor:
    return values.exp().mul_(_MASS_UNITS).to(torch.int64)


def _limit(total: Tensor, top_p: Tensor) -> Tensor:
    # Dropping tokens lighter than a unit, even at p = 1, changes no draw: they are e^27.7 times less likely than the
    # best token, and no two values of the noise are more than 25 apart.
    return (top_p.double()[:, None] * total).ceil().to(torch.int64)
