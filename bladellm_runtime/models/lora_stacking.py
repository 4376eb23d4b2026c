"""Which linear layers have the A of all slots behind their weight, so that one product reads both."""

from collections.abc import Iterator

import torch

from bladellm_runtime.models.lora_layout import LoraShape
from bladellm_runtime.models.quantized import Schemes
from bladellm_runtime.models.weights import WeightTable

STACKED = True
"""A switch for measuring; without it A lies beside B, and is multiplied by a kernel of its own in all steps."""

MOST_BYTES = 16 * 2**20
"""Of a layer's A in all slots, which every step with adapters reads whole: about what an H200 reads while a kernel of
its own for A begins and ends."""

ALIGNMENT = 16
"""Rows of a weight and what lies behind it are a multiple of these, so that rows of outputs begin at whole 16 bytes."""


def stacked_rows(table: WeightTable, shape: LoraShape, schemes: Schemes, dtype: torch.dtype) -> dict[str, int]:
    """Rows to be kept behind the weights of layers, by their names without `.weight`.

    Of those that are plain, of the type that adapters are held in, and whose A is small enough. table: what the rank
    holds; dtype: of plain weights.
    """
    return dict(_rows_of(table, shape, schemes)) if STACKED and shape.dtype == dtype else {}


def _rows_of(table: WeightTable, shape: LoraShape, schemes: Schemes) -> Iterator[tuple[str, int]]:
    for name, parts in table.items():
        if not name.startswith("layers.") or parts[0].module is None:
            continue
        ranks, inputs = shape.max_loras * len(parts) * shape.max_rank, parts[0].held[1]
        outputs = sum(part.held[0] for part in parts)
        plain = not any(part.module in schemes for part in parts)
        if plain and outputs and inputs and ranks * inputs * shape.dtype.itemsize <= MOST_BYTES:
            yield name.removesuffix(".weight"), -(-(outputs + ranks) // ALIGNMENT) * ALIGNMENT - outputs
