"""`CheckpointFormat`: what every way of storing quantized linear layers can do, for reading and for writing."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a quantized linear layer: the key is `module.suffix`; `dtypes` are safetensors names (I32, BF16)."""

    suffix: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    required: bool = True


class CheckpointFormat(ABC):
    """One checkpoint's quantization: which linear layers, how, and in which tensors.

    Made from the `quantization_config` of a config.json (`parse`) or for a new checkpoint (`plan`). Module names are
    the checkpoint's, such as `model.layers.0.self_attn.q_proj`.
    """

    name: str
    lowest_zero: int = 0
    """The least zero point that can be stored."""

    @classmethod
    @abstractmethod
    def parse(cls, fields: Fields) -> Self:
        """Read and check a `quantization_config`. Raises `CheckpointError` naming file, field and what is supported."""

    @classmethod
    @abstractmethod
    def refusal(cls, scheme: Scheme) -> str | None:
        """Why the format cannot hold a scheme, as the end of a sentence; None where it can."""

    @classmethod
    @abstractmethod
    def plan(cls, scheme: Scheme, ignore: Sequence[str], *, kv_scales: bool = False, scrambled: bool = False) -> Self:
        """The format of a new checkpoint: every linear layer but the modules of `ignore` (full names) has `scheme`.

        `kv_scales`: the checkpoint carries k_scale and v_scale. `scrambled`: weights have an `order` (g_idx).
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The `quantization_config` to write into config.json."""

    @abstractmethod
    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The type scales are stored in; quantizers round scales to it before they round weights."""

    @abstractmethod
    def scheme_of(self, module: str, keys: Collection[str]) -> Scheme | None:
        """The scheme of a linear layer, None where it is stored as a plain weight.

        `keys` are the tensors of the checkpoint, for formats whose config does not say; empty with dummy weights.
        """

    @abstractmethod
    def tensors(self, scheme: Scheme, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        """The tensors of a linear layer of this scheme. Raises `CheckpointError` where the shape cannot be stored."""

    @abstractmethod
    def unpack(self, scheme: Scheme, rows: int, columns: int, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Stored tensors, by suffix, in the canonical form on their device. Raises `CheckpointError` for bad values."""

    @abstractmethod
    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """The tensors to store, by suffix; the inverse of `unpack`."""

    def is_harmless(self, key: str) -> bool:
        """Whether a tensor outside the table may be there: scales of a KV cache this engine keeps unquantized."""
        return False
