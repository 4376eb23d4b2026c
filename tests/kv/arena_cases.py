"""What the arena tests share: random geometries, arenas of every kind, and writing and reading tokens through them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from bladellm_kernels.kv_format import KV_FORMATS
from hypothesis import strategies as st

from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.cuda_arena import CudaArena
from bladellm_runtime.kv.cuda_driver import CudaDriver
from bladellm_runtime.kv.factory import make_arena
from bladellm_runtime.kv.operations import MemoryPlan
from bladellm_runtime.kv.sizing import kv_groups, plan_spec
from bladellm_runtime.kv.spec import KvSpec
from tests.kv.fake_cuda import PAGE, FakeCuda

CPU = torch.device("cpu")
KINDS = ("memfd", "relocating", "paged", "cuda")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
UNKNOWN = -1


@dataclass(frozen=True)
class Geometry:
    """A small KV cache: everything an arena needs, its pool in blocks."""

    num_layers: int = 3
    layers_per_group: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    format: str = "no_quant"
    num_slots: int = 4
    blocks: int = 4
    block_granules: int = 4
    max_granules: int = 8
    host_granules: int = 3

    @property
    def shape(self) -> KvShape:
        return KvShape(self.kv_heads, self.head_dim, self.dtype, KV_FORMATS[self.format])

    def spec(self, kind: str) -> KvSpec:
        """The same number of granules for every arena, though those of mapped memory may have to be larger."""
        groups = kv_groups(self.num_layers, self.shape.payload_bytes, self.layers_per_group)
        scales = self.num_layers * self.shape.scale_bytes
        unit = plan_spec(groups, 1 << 40, 1, 1, 1, PAGE).granule_tokens
        tokens = unit if kind in ("memfd", "cuda") else 3
        pool, length = self.blocks * self.block_granules, self.max_granules * tokens
        return KvSpec(groups, tokens, pool, self.num_slots, length, self.block_granules, 0, scales, self.host_granules)

    def arena(self, kind: str, cuda: FakeCuda | None = None):
        spec = self.spec(kind)
        if kind == "cuda":
            return CudaArena(spec, self.shape, CPU, CudaDriver(0, cuda or FakeCuda()))
        choice, attention = ("auto", "paged") if kind == "paged" else (kind, "ragged_flash")
        return make_arena(choice, attention, spec, self.shape, CPU)

    def but(self, **changes) -> "Geometry":
        return replace(self, **changes)


GEOMETRIES = st.builds(
    Geometry,
    num_layers=st.integers(1, 5),
    layers_per_group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    format=st.sampled_from(list(KV_FORMATS)),
    num_slots=st.integers(1, 6),
    blocks=st.integers(1, 8),
    block_granules=st.sampled_from([1, 2, 4]),
    max_granules=st.integers(4, 20),
)


def run_plan(arena, views=(), moves=(), ahead=()):
    """One step's memory operations."""
    arena.submit(MemoryPlan(list(views), list(moves), list(ahead)))
    arena.wait()
    arena.move(list(moves))


def layers(arena):
    count = sum(len(group.layers) for group in arena.spec.groups)
    return [arena.layer(index) for index in range(count)]


def payload_rows(arena, kv, slot, first, count):
    """The rows of a slot's positions [first, first + count) in a layer's payload: a slice, or an index."""
    if not kv.paged:
        base = arena.base_row(slot) + first
        return slice(base, base + count)
    positions = torch.arange(first, first + count)
    return kv.table[slot, positions // kv.granule_tokens].long() * kv.granule_tokens + positions % kv.granule_tokens


def integers(tensor):
    """The same memory as integers, in which every bit pattern is a number."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def pattern(stamps, salt, shape, dtype):
    """What tokens with these stamps store: [tokens, *shape], no two alike nearby; zero where the stamp is 0."""
    size = int(np.prod(shape))
    numbers = (stamps[:, None] * 7919 + salt * 977 + np.arange(size)) % (113 if dtype == torch.int8 else 32749) + 1
    numbers = numbers * (stamps[:, None] != 0)
    return torch.from_numpy(numbers).to(dtype).view(len(stamps), *shape)


def write(arena, slot, first, stamps):
    """Write tokens to positions from `first` on, payload and scales of every layer."""
    for index, kv in enumerate(layers(arena)):
        payload = integers(kv.payload)
        payload[payload_rows(arena, kv, slot, first, len(stamps))] = pattern(
            stamps, index, payload.shape[1:], payload.dtype
        )
        if kv.scales is not None:
            granules, places = scale_places(kv, slot, first, len(stamps))
            scales = integers(kv.scales)
            scales[granules, :, :, :, places] = pattern(stamps, index + 50, scales.shape[1:4], scales.dtype)


def scale_places(kv, slot, first, count):
    positions = torch.arange(first, first + count)
    return kv.table[slot, positions // kv.granule_tokens].long(), positions % kv.granule_tokens


def assert_holds(arena, slot, stamps):
    """Positions from 0 on hold tokens with these stamps, those with an unknown stamp anything."""
    known = torch.from_numpy(stamps != UNKNOWN)
    for index, kv in enumerate(layers(arena)):
        payload = integers(kv.payload)
        got = payload[payload_rows(arena, kv, slot, 0, len(stamps))]
        expected = pattern(stamps, index, payload.shape[1:], payload.dtype)
        assert torch.equal(got[known], expected[known]), f"slot {slot} layer {index} lost its contents"
        if kv.scales is not None:
            granules, places = scale_places(kv, slot, 0, len(stamps))
            scales = integers(kv.scales)
            expected = pattern(stamps, index + 50, scales.shape[1:4], scales.dtype)
            got = scales[granules, :, :, :, places]
            assert torch.equal(got[known], expected[known]), f"slot {slot} layer {index} lost its scales"
