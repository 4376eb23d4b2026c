"""How an adapter lies in memory: where A and B of every layer are, on the host and in the slots of a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from bladellm_runtime.models.weights import Part, WeightTable

ALIGNMENT = 64
"""Numbers that every matrix begins at a multiple of."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """How many adapters a device holds, the largest rank, and the type that they are held in."""

    max_loras: int
    max_rank: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a fused layer's matrices lie in an adapter: A [S · R, in] from number `a` on, B [out, R] from `b` on, its S
    scales from `scale` on. parts: what the rank holds of the projections, one a slice."""

    parts: tuple[Part, ...]
    a: int
    b: int
    scale: int

    @property
    def inputs(self) -> int:
        return self.parts[0].held[1]

    @property
    def rows(self) -> tuple[int, ...]:
        """Outputs of each slice."""
        return tuple(part.held[0] for part in self.parts)


class LoraLayout:
    """How an adapter lies in memory on the host: one array.

    places: by the layer's name without `.weight`. numbers, scales: how many an adapter has of both. stacked: rows
    behind the weights of layers whose A lies there, by name; held: numbers of an adapter in the common memory of the
    slots, which are the first ones: all but the A of stacked layers.
    """

    def __init__(self, table: WeightTable, max_rank: int, stacked: Mapping[str, int] | None = None) -> None:
        """table: what the rank holds, of a whole checkpoint. stacked: as above, none by default."""
        self.max_rank = max_rank
        self.stacked = dict(stacked or {})
        self.numbers = self.scales = 0
        named = {name.removesuffix(".weight"): parts for name, parts in table.items() if name.startswith("layers.")}
        layers = {name: parts for name, parts in named.items() if parts[0].module is not None}
        a: dict[str, int] = {}
        b: dict[str, int] = {}
        for name, parts in layers.items():
            if name not in self.stacked:
                a[name] = self._take(len(parts) * max_rank * parts[0].held[1])
            b[name] = self._take(sum(part.held[0] for part in parts) * max_rank)
        self.held = self.numbers
        for name, parts in layers.items():
            if name in self.stacked:
                a[name] = self._take(len(parts) * max_rank * parts[0].held[1])
        self.places = {name: self._place(parts, a[name], b[name]) for name, parts in layers.items()}

    def _take(self, count: int) -> int:
        """The first of so many numbers more."""
        first = self.numbers
        self.numbers += -(-count // ALIGNMENT) * ALIGNMENT
        return first

    def _place(self, parts: Sequence[Part], a: int, b: int) -> LayerPlace:
        place = LayerPlace(tuple(parts), a, b, self.scales)
        self.scales += len(parts)
        return place

    @cached_property
    def modules(self) -> dict[str, tuple[LayerPlace, int]]:
        """Every projection by its name in the checkpoint: its layer, and its slice of that."""
        return {
            part.module: (place, number)
            for place in self.places.values()
            for number, part in enumerate(place.parts)
            if part.module is not None
        }

    def views(self, place: LayerPlace, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A [..., S · R, in] and B [..., out, R] of a layer in adapters, [..., numbers]."""
        return self.a_view(place, numbers), self.b_view(place, numbers)

    def a_view(self, place: LayerPlace, numbers: torch.Tensor) -> torch.Tensor:
        """A alone; of the common memory of slots where the layer is not stacked."""
        ranks = len(place.parts) * self.max_rank
        a: torch.Tensor = numbers[..., place.a : place.a + ranks * place.inputs].unflatten(-1, (ranks, place.inputs))
        return a

    def b_view(self, place: LayerPlace, numbers: torch.Tensor) -> torch.Tensor:
        """B alone; also of the common memory of slots."""
        rows = sum(place.rows)
        b = numbers[..., place.b : place.b + rows * self.max_rank]
        return b.view(*numbers.shape[:-1], rows, self.max_rank)
