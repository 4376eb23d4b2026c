"""Weights in 12 bits a number: nothing is lost, and the CUDA kernels give the same as PyTorch's operators."""

import random

import pytest
import torch
from bladellm_kernels.packed_weight import (
    BITS,
    PATCHES,
    TILE,
    TILE_BYTES,
    PackedWeight,
    can_pack,
    pack_weight,
    pack_weight_reference,
    packed_bytes,
    unpack_weight,
)

from tests.kernels.hopper import compiled_launches, spilled
from tests.kernels.interpreted import run_interpreted

PART_ROWS = 16
"""Of a tile, those of a warp."""
OUTLIERS = [2.0**8, -(2.0**11), 1.5 * 2**9, 2.0**-20, -1.25 * 2**-19, 0.0, -0.0]
"""Beside numbers of 2^-15 to 2: without a code."""
SPECIAL = {"infinity": -torch.inf, "nan": torch.nan, "denormal": 2.0**-130, "far": 2.0**-60}
"""What cannot be packed, in a row of numbers around 2^110."""


def plain_weight(rows: int, inputs: int) -> torch.Tensor:
    """All numbers have codes."""
    mantissas = torch.randint(128, 256, (rows, inputs)) / 128
    exponents, signs = torch.randint(-15, 1, (rows, inputs)), 1 - 2 * torch.randint(2, (rows, inputs))
    return (mantissas * torch.exp2(exponents) * signs).bfloat16()


def hard_weight(rows: int, inputs: int, gated: bool = False) -> torch.Tensor:
    """Up to as many outliers as there is room for, rows of any magnitude, empty ones; in the rows' own order."""
    parts = rows // PART_ROWS, inputs // TILE
    order = torch.rand(*parts, PART_ROWS * TILE).argsort(-1).argsort(-1)
    chosen = (order < torch.randint(PATCHES + 1, (*parts, 1))).view(*parts, PART_ROWS, TILE)
    outliers = torch.tensor(OUTLIERS)[torch.randint(len(OUTLIERS), (rows, inputs))].bfloat16()
    weight = torch.where(chosen.transpose(1, 2).reshape(rows, inputs), outliers, plain_weight(rows, inputs))
    weight *= torch.exp2(torch.randint(-100, 111, (rows, 1))).bfloat16()
    for row in random.sample(range(rows), rows // 32):
        weight[row] *= 0
    if not gated:
        return weight
    of_gate = torch.arange(rows) // 8 % 2 == 0
    return torch.cat((weight[of_gate], weight[~of_gate]))


def with_zeros(count: int) -> torch.Tensor:
    """A tile with so many numbers that have no code in a warp's part."""
    weight, first = plain_weight(TILE, TILE), random.randrange(4) * PART_ROWS
    for place in random.sample(range(PART_ROWS * TILE), count):
        weight[first + place // TILE, place % TILE] = 0
    return weight


def with_special(name: str) -> torch.Tensor:
    weight = plain_weight(TILE, TILE) * 2.0**110
    weight[random.randrange(TILE), random.randrange(TILE)] = SPECIAL[name]
    return weight


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


def assert_same(found: PackedWeight, expected: PackedWeight) -> None:
    assert torch.equal(found.tiles, expected.tiles)
    assert torch.equal(found.factors, expected.factors)
    assert found.gated == expected.gated


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "inputs"), [(64, 64), (192, 64), (64, 448), (320, 576)])
def test_nothing_is_lost(rows, inputs, gated):
    for weight in (hard_weight(rows, inputs, gated), torch.randn(rows, inputs).bfloat16() * 0.02):
        packed = pack_weight(weight, gated)
        assert packed is not None
        assert same_bits(unpack_weight(packed), weight)
        assert packed.tiles.shape == (rows // TILE, inputs // TILE, TILE_BYTES)
        assert (packed.rows, packed.inputs, packed.outputs) == (rows, inputs, rows // 2 if gated else rows)
        assert packed.bytes == packed_bytes(rows, inputs)
        assert 8 * packed.bytes == rows * inputs * BITS + 32 * rows


def test_many_rows_are_packed_a_few_at_a_time(monkeypatch):
    weights = {gated: hard_weight(320, 128, gated) for gated in (False, True)}
    at_once = {gated: pack_weight_reference(weight, gated) for gated, weight in weights.items()}
    monkeypatch.setattr("bladellm_kernels.packed_weight._CHUNK", 128 * 128)
    for gated, weight in weights.items():
        assert_same(pack_weight_reference(weight, gated), at_once[gated])


def test_a_number_takes_a_quarter_more_than_twelve_bits():
    assert BITS == 12.25


def test_rows_of_the_gate_lie_in_front_of_those_of_up():
    weight = torch.randn(128, 64).bfloat16()
    lie = [row for first in range(0, 64, 8) for row in (*range(first, first + 8), *range(64 + first, 72 + first))]
    expected = pack_weight(weight[lie])
    found = pack_weight(weight, gated=True)
    assert torch.equal(found.tiles, expected.tiles)
    assert torch.equal(found.factors, expected.factors)


def test_the_numbers_of_a_row_choose_its_exponents():
    """Fewest left out, and of several such choices the largest."""
    weight = plain_weight(TILE, TILE)
    # 16 exponents up to that of 1; the largest of all; as far up as leaves out one, and not another.
    weight[0, :3] = torch.tensor([2.0**9, 1, 2.0**-15])
    weight[1] = 2.0**-30
    weight[2] = 2.0**-11
    weight[2, 0] = 2.0**11
    assert pack_weight(weight).factors[:3].tolist() == [1, 2.0**-30, 2.0**4]


@pytest.mark.parametrize("name", SPECIAL)
def test_what_cannot_be_packed(name):
    assert pack_weight(with_special(name)) is None


def test_a_part_of_a_tile_has_room_for_some_outliers():
    packed = pack_weight(with_zeros(PATCHES))
    assert packed is not None
    assert pack_weight(with_zeros(PATCHES + 1)) is None


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(64, 64), torch.zeros(64, 64).half(), *(torch.zeros(s).bfloat16() for s in (64, (63, 64), (64, 100)))],
    ids=lambda weight: f"{weight.dtype}{list(weight.shape)}",
)
def test_wrong_weights_raise(weight):
    assert not can_pack(weight)
    for pack in (pack_weight, pack_weight_reference):
        with pytest.raises(ValueError, match="whole tiles of 64"):
            pack(weight)


def interpreted_packing() -> None:
    from bladellm_kernels.packed_weight_triton import launch_pack

    def pack(weight: torch.Tensor, gated: bool = False) -> PackedWeight | None:
        rows, inputs = weight.shape
        tiles = torch.full((rows // TILE, inputs // TILE, TILE_BYTES), 0x55, dtype=torch.uint8)
        packed = PackedWeight(tiles, torch.full((rows,), torch.nan), gated)
        return None if launch_pack(weight, gated, packed.tiles, packed.factors).item() else packed

    wide = torch.cat((hard_weight(64, 192), torch.full((64, 3), torch.nan).bfloat16()), 1)
    assert_same(pack(wide[:, :192]), pack_weight_reference(wide[:, :192]))
    transposed = hard_weight(128, 64, gated=True).t().contiguous().t()
    assert_same(pack(transposed, True), pack_weight_reference(transposed, True))
    assert pack(with_zeros(PATCHES + 1)) is None
    for name in random.sample([*SPECIAL], 2):
        assert pack(with_special(name)) is None, name


def test_the_kernels_give_the_same_interpreted():
    pytest.importorskip("triton")
    run_interpreted(__name__, "interpreted_packing")


def test_the_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    from bladellm_kernels.packed_weight_triton import launch_pack

    weight = torch.empty(128, 14336, dtype=torch.bfloat16)
    tiles = torch.empty(2, 224, TILE_BYTES, dtype=torch.uint8)
    with compiled_launches() as compiled:
        launch_pack(weight, True, tiles, torch.empty(128))
    kernels = {name: kernel.asm["ptx"] for name, kernel in compiled.items()}
    assert [*kernels] == ["row_factors_kernel", "pack_tiles_kernel"]
    for name, ptx in kernels.items():
        assert "ld.global.v4" in ptx, name
        assert spilled(ptx) == 0, name
    assert "st.global.v4" in kernels["pack_tiles_kernel"]
    assert "st.global.b8" not in kernels["pack_tiles_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "inputs"), [(64, 64), (320, 192), (4096, 4096), (1024, 14336), (128, 57344)])
def test_on_a_gpu(rows, inputs, gated):
    pytest.importorskip("triton")
    weight = hard_weight(rows, inputs, gated).cuda()
    packed = pack_weight(weight, gated)
    assert packed is not None
    assert_same(packed, pack_weight_reference(weight, gated))
    assert same_bits(unpack_weight(packed), weight)


@pytest.mark.gpu
def test_what_cannot_be_packed_on_a_gpu():
    pytest.importorskip("triton")
    assert pack_weight(with_zeros(PATCHES).cuda()) is not None
    assert pack_weight(with_zeros(PATCHES + 1).cuda()) is None
    for name in SPECIAL:
        assert pack_weight(with_special(name).cuda()) is None, name
