"""What the KV tests share: random geometries, and a reference of what every token of every slot must contain."""

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.kv.factory import make_arena, page_bytes
from bladellm_runtime.kv.sizing import kv_groups, plan_spec
from bladellm_runtime.kv.spec import KvSpec

CPU = torch.device("cpu")
INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Geometry:
    """A small KV cache: everything `make_arena` needs, budget in granules of about 1 to 40."""

    num_layers: int
    layers_per_group: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_slots: int
    granules: int
    max_granules: int

    @property
    def layer_token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def spec(self, kind: str) -> KvSpec:
        """The same number of granules for either arena, though memfd's may have to be larger."""
        groups = kv_groups(self.num_layers, self.layer_token_bytes, self.layers_per_group)
        unit = plan_spec(groups, 1 << 40, 1, 1, 1, page_bytes(kind)).granule_tokens
        tokens = unit if kind == "memfd" else 3
        return KvSpec(groups, tokens, self.granules, self.num_slots, self.max_granules * tokens)

    def arena(self, kind: str) -> KvArena:
        return make_arena(kind, self.spec(kind), self.kv_heads, self.head_dim, self.dtype, CPU)


GEOMETRIES = st.builds(
    Geometry,
    num_layers=st.integers(1, 5),
    layers_per_group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_slots=st.integers(1, 6),
    granules=st.integers(1, 40),
    max_granules=st.integers(1, 20),
)


@dataclass
class Granule:
    """The reference's view of a physical granule: one stamp a token, of which every stored number is a function."""

    stamps: np.ndarray


@dataclass
class Reference:
    """What an arena must contain: a list of granules a slot; slots that share memory share `Granule` objects."""

    arena: KvArena
    slots: dict[int, list[Granule]] = field(default_factory=dict)
    last_stamp: int = 0

    def held(self, slot: int) -> list[Granule]:
        return self.slots.setdefault(slot, [])

    def free(self) -> int:
        """Granules no slot shows."""
        shown = {id(granule) for granules in self.slots.values() for granule in granules}
        return self.arena.spec.num_granules - len(shown)

    def fresh(self, count: int) -> list[Granule]:
        tokens = self.arena.spec.granule_tokens
        return [Granule(np.zeros(tokens, dtype=np.int64)) for _ in range(count)]

    def write(self, slot: int, first: int, count: int) -> None:
        """Write new, distinct tokens through the arena and note them."""
        if count == 0:
            return
        stamps = np.arange(self.last_stamp + 1, self.last_stamp + 1 + count)
        self.last_stamp += count
        size = self.arena.spec.granule_tokens
        for offset, stamp in enumerate(stamps):
            position = first + offset
            self.held(slot)[position // size].stamps[position % size] = stamp
        base = self.arena.base_row(slot) + first
        for layer, rows in enumerate(self.layers()):
            rows[base : base + count] = self.pattern(stamps, layer)

    def layers(self) -> list[torch.Tensor]:
        """The arena's layers as integers of the same width, in which every bit pattern is a number."""
        count = sum(len(group.layers) for group in self.arena.spec.groups)
        return [self.arena.layer_kv(layer).view(INTEGERS[self.arena.dtype.itemsize]) for layer in range(count)]

    def pattern(self, stamps: np.ndarray, layer: int) -> torch.Tensor:
        """What tokens with these stamps store in a layer: `[tokens, 2, kv_heads, head_dim]`, no two alike nearby."""
        heads, dim = self.arena.kv_heads, self.arena.head_dim
        numbers = stamps[:, None] * 7919 + layer * 977 + np.arange(2 * heads * dim)
        integers = INTEGERS[self.arena.dtype.itemsize]
        return torch.from_numpy(numbers % 32749).to(integers).view(len(stamps), 2, heads, dim)

    def check(self) -> None:
        """Every mapped row of every slot holds what was last written to it."""
        for slot, granules in self.slots.items():
            assert self.arena.mapped(slot) == len(granules)
            if granules:
                self.check_slot(slot, granules)

    def check_slot(self, slot: int, granules: list[Granule]) -> None:
        stamps = np.concatenate([granule.stamps for granule in granules])
        base = self.arena.base_row(slot)
        for layer, rows in enumerate(self.layers()):
            got = rows[base : base + len(stamps)]
            assert torch.equal(got, self.pattern(stamps, layer)), f"slot {slot} layer {layer} lost its contents"
