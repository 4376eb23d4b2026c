"""Put attention over parts of the keys together by their log-sum-exp."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch


class State(NamedTuple):
    """Attention over some keys: out [n, Hq, D], and lse [n, Hq], float32, the natural logarithm of Σ exp(score)."""

    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, first: int, end: int) -> "State":
        return State(self.out[first:end], self.lse[first:end])


def merge_states(states: Sequence[State], out: torch.Tensor | None = None) -> State:
    """Attention over all the keys of the states together, in float32; `out` [n, Hq, D] takes the result if given."""
    out = (
        torch.empty(states[0].out.shape, dtype=states[0].out.dtype, device=states[0].out.device) if out is None else out
    )
    if out.is_cuda and find_spec("triton") is not None:
        from bladellm_kernels.prefill_merge_triton import launch

        return State(out, launch(states, out))
    lses = torch.stack([state.lse for state in states])
    lse = lses.logsumexp(0)
    outs = torch.stack([state.out.float() for state in states])
    out.copy_((outs * (lses - lse).exp().unsqueeze(-1)).sum(0))
    return State(out, lse)
