"""Linear layers with LoRA: a layer of any kind, and to each row of x what its own adapter adds.

The names are those of the field: a layer is of the column-parallel kind where its outputs are cut over the ranks, of
the row-parallel kind where its inputs are. Merged layers hold the slices of several projections side by side.
"""

import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear_schedules import MAX_ROWS
from bladellm_kernels.lora_expand import lora_expand, lora_expand_silu_mul
from bladellm_kernels.lora_shrink import lora_shrink
from bladellm_kernels.lora_tokens import TokenAdapters

from bladellm_runtime.layers.linear import Linear, LinearLayer
from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.stacked_lora import LoraWeights, StackedLora

DELAYED_NORMS = True
"""Whether layers with stacked A fuse with the norms around them; a switch for measuring."""


class LoraState:
    """What the layers of a decoder share: the adapter of each row they are given. Set before a forward pass."""

    def __init__(self) -> None:
        self.adapters: TokenAdapters | None = None
        """None where no row has one: the layers are those below them, and fuse as these do."""

    def select(self, tokens: torch.Tensor) -> None:
        """From now on layers are given these rows alone, int64 [R]."""
        if self.adapters is not None:
            self.adapters = self.adapters.select(tokens)


class LinearWithLoRA(LinearLayer):
    """`layer(x) + scale · (x Aᵀ) Bᵀ`, of each row's own adapter; A and B may be of another type than x.

    stacked: the layer with A of all slots behind its weight, `weights.a` being a view of that; None where A lies apart.
    It serves rows that are not in tiles. `bytes`: of the layer below alone.
    """

    slices: int = 1

    def __init__(self, layer: LinearLayer, weights: LoraWeights, state: LoraState) -> None:
        if len(weights.rows) != self.slices:
            raise ValueError(f"{type(self).__name__} has {self.slices} slices, got {len(weights.rows)}")
        self.layer = layer
        self.weights = weights
        self.bytes = layer.bytes
        self.outputs = layer.outputs
        self.stacked: StackedLora | None = None
        if isinstance(layer, Linear) and layer.stacked is not None:
            self.stacked = StackedLora(layer.stacked, layer.bias, weights)
        self._state = state

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if riding := self._riding:
            stacked, adapters = riding
            return stacked(x, adapters, out)
        # Before the layer, whose weight is read meanwhile where kernels start early.
        shrunk = self._shrink(x)
        y = self.layer(x, out)
        self._expand(shrunk, y)
        return y

    def prepare(self) -> None:
        self.layer.prepare()

    @property
    def takes_parts(self) -> bool:
        # Adapters are those of all rows of a step.
        return self._is_plain and self.layer.takes_parts

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer.silu_mul(x, out) if self._is_plain else super().silu_mul(x, out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        return self._is_plain and self.layer.add_to(residual, x)

    def add_normed(self, x: torch.Tensor, residual: torch.Tensor, norm: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
        if self._is_plain:
            return self.layer.add_normed(x, residual, norm)
        if self._riding:
            return norm.add(self(x), residual)
        shrunk = self._shrink(x)
        if self.layer.add_to(residual, x):
            self._expand(shrunk, residual)
            return norm.add(residual, None)
        y = self.layer(x)
        self._expand(shrunk, y)
        return norm.add(y, residual)

    @property
    def fills_sms(self) -> bool:
        return self._is_plain and self.layer.fills_sms

    def shares_sms(self, rows: int) -> bool:
        return self.layer.shares_sms(rows)

    def fuses(self, rows: int, gated: bool = False) -> bool:
        if self._is_plain:
            return self.layer.fuses(rows, gated)
        # In float16 x · weight can be out of range before the division of the norm.
        ranged = self.weights.b.dtype != torch.float16
        return DELAYED_NORMS and ranged and rows <= MAX_ROWS and self._riding is not None

    def normed(self, norm: DelayedNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._is_plain:
            return self.layer.normed(norm, out)
        if out is None and (riding := self._riding):
            stacked, adapters = riding
            return stacked.normed(norm, adapters)
        return super().normed(norm, out)

    def normed_silu_mul(self, norm: DelayedNorm) -> torch.Tensor:
        return self.layer.normed_silu_mul(norm) if self._is_plain else super().normed_silu_mul(norm)

    def between_norms(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.between_norms(x) if self._is_plain else super().between_norms(x)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        if self._is_plain:
            return self.layer.add(x, residual, norm_weight, eps)
        if self.slices == 1 and (riding := self._riding):
            stacked, adapters = riding
            return stacked.add(x, residual, norm_weight, eps, adapters)
        return super().add(x, residual, norm_weight, eps)

    @property
    def _is_plain(self) -> bool:
        return self._state.adapters is None

    @property
    def _riding(self) -> tuple[StackedLora, TokenAdapters] | None:
        """The stacked layer and the rows' adapters, where A is multiplied with the layer's weight."""
        adapters = self._state.adapters
        if self.stacked is None or adapters is None or adapters.tiles is not None:
            return None
        return self.stacked, adapters

    def _shrink(self, x: torch.Tensor) -> torch.Tensor | None:
        adapters = self._state.adapters
        return None if adapters is None else lora_shrink(x, self.weights.a, self.weights.scales, adapters)

    def _expand(self, shrunk: torch.Tensor | None, y: torch.Tensor) -> None:
        adapters = self._state.adapters
        if shrunk is not None and adapters is not None:
            lora_expand(shrunk, self.weights.b, self.weights.rows, adapters, y)


class ColParaLinearWithLoRA(LinearWithLoRA):
    """A layer whose outputs are cut over the ranks, and with them the rows of B."""


class RowParaLinearWithLoRA(LinearWithLoRA):
    """A layer whose inputs are cut over the ranks, and with them the columns of A: what it gives is a part of a sum."""


class QKVProjectionWithLoRA(LinearWithLoRA):
    """The merged query, key and value projections: three slices, each with ranks of its own."""

    slices = 3


class ColParaLinearWithSliceLoRA(LinearWithLoRA):
    """The merged gate and up projections: two slices, each with ranks of its own."""

    slices = 2

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        adapters, weights = self._state.adapters, self.weights
        if adapters is None:
            return self.layer.silu_mul(x, out)
        if riding := self._riding:
            y = riding[0].silu_mul(x, adapters)
        else:
            shrunk = lora_shrink(x, weights.a, weights.scales, adapters)
            first, second = weights.rows
            y = lora_expand_silu_mul(shrunk, weights.b, (first, second), adapters, self.layer(x))
        return y if out is None else out.copy_(y)

    def normed_silu_mul(self, norm: DelayedNorm) -> torch.Tensor:
        if riding := self._riding:
            stacked, adapters = riding
            return stacked.normed_silu_mul(norm, adapters)
        return super().normed_silu_mul(norm)
