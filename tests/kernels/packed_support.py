"""The arithmetic of `packed_linear.cu` in Python: from its tiles to outputs, thread by thread."""

import re
from pathlib import Path

import numpy as np
from bladellm_kernels import packed_linear as operator
from bladellm_kernels.packed_linear import PackedSchedule, source
from bladellm_kernels.packed_weight import GATE_ROWS, NUMBER_BYTES, PATCHES, PackedWeight

from tests.kernels import test_cluster_linear as cluster_test

MODEL = {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
"""Weights of Llama-3.1-8B."""
TEXT = (Path(operator.__file__).parent / "packed_linear.cu").read_text()
NUMBER = {name: int(value, 0) for name, value in re.findall(r"\b([A-Z_]+) = (0x[0-9A-F]+|\d+)u?\b", TEXT)}
"""Constants of the kernel's text."""
PAIRS = NUMBER["PAIRS"]


def chosen(a: np.ndarray, b: np.ndarray, which: int) -> np.ndarray:
    """The instruction `prmt`: bytes of a, and behind them of b, by the lower three bits of four."""
    both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    found = np.zeros(both.shape, np.uint32)
    for place in range(4):
        take = which >> 4 * place & 15
        assert take < 8, "copies of a sign"
        found |= ((both >> np.uint64(8 * take)) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * place)
    return found


def widen_eight(low: np.ndarray, more_low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    signs, codes, exponents = (np.uint32(NUMBER[name]) for name in ("SIGNS", "CODES", "EXPONENTS"))
    four = np.uint32(4)
    first = (high & codes) | exponents
    turned = (high << four & signs) | (high >> four & ~signs)
    second = (turned & codes) | exponents
    selectors = [int(which, 16) for which in re.findall(r"pairs\[at.*\] = chosen\(\w+, \w+, (0x\d+)\);", TEXT)]
    given = (low, first), (low, first), (more_low, second), (more_low, second)
    return [chosen(*words, which) for words, which in zip(given, selectors, strict=True)]


def patch(pairs: np.ndarray, word: np.ndarray, wanted: np.ndarray) -> None:
    """pairs: [..., 4, 32, PAIRS] of each warp's lanes; word, and whether it is looked at: [..., 4]."""
    word = word[..., None, None]
    which = np.where(word & np.uint32(512), NUMBER["UPPER"], NUMBER["LOWER"])
    lane, each = np.arange(32)[:, None], np.arange(PAIRS)
    here = wanted[..., None, None] & (lane == word % 32) & (each == (word >> np.uint32(5) & np.uint32(15)))
    for selector in (NUMBER["UPPER"], NUMBER["LOWER"]):
        pairs[:] = np.where(here & (which == selector), chosen(pairs, word, selector), pairs)


def load_weight(tiles: np.ndarray) -> np.ndarray:
    """Pairs [..., 128, PAIRS], uint32, of tiles [..., TILE_BYTES]."""
    shape = tiles.shape[:-1]
    words = tiles[..., :NUMBER_BYTES].copy().view("<u4").reshape(*shape, 3, 128, 4)
    low, more_low, high = (np.moveaxis(words[..., part, :, :], -1, 0) for part in range(3))
    widened = [
        *(*widen_eight(low[0], low[1], high[0]), *widen_eight(low[2], low[3], high[1])),
        *(*widen_eight(more_low[0], more_low[1], high[2]), *widen_eight(more_low[2], more_low[3], high[3])),
    ]
    pairs = np.stack(widened, -1).reshape(*shape, 4, 32, PAIRS)
    patches = tiles[..., NUMBER_BYTES:].copy().view("<u4").reshape(*shape, 4, PATCHES)
    used = patches != np.uint32(NUMBER["NO_PATCH"])
    for half in (0, 4):
        # `patch_four`, of the others only where the first four are all in use.
        entered = used[..., 0] if half == 0 else used[..., 0] & used[..., 3]
        first = entered & used[..., half]
        second = first & used[..., half + 1]
        wanted = first, second, second & used[..., half + 2], second & used[..., half + 3]
        for place, each in enumerate(wanted):
            patch(pairs, patches[..., half + place], each)
    return pairs.reshape(*shape, 128, PAIRS)


def multiplied(pairs: np.ndarray) -> np.ndarray:
    """float64 [..., 64, 64]: the rows and inputs that four `wgmma` take from the registers of 128 threads."""
    bits = np.stack((pairs & np.uint32(0xFFFF), pairs >> np.uint32(16)), -1) << np.uint32(16)
    numbers = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    thread = np.arange(128)
    found = np.full((*pairs.shape[:-2], 64, 64), np.nan)
    for part in range(4):
        for register in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
            for upper in range(2):
                column = 16 * part + thread % 4 * 2 + 8 * (register // 2) + upper
                found[..., row, column] = numbers[..., 4 * part + register, upper]
    return found


class Tile(cluster_test.Tile):
    """The same of `cluster_sums.cu` with a gate, and of `packed_linear.cu`."""

    def __init__(self, schedule: PackedSchedule, rows: int, gated: bool) -> None:
        self.schedule, self.rows, self.tokens, self.gated = schedule, rows, schedule.tokens, gated
        self.row = int(source(schedule, gated, False)[1]["PARTIAL_ROW"])
        self.outputs = 64 * schedule.groups // (1 + gated)
        self.thread = np.arange(128 * schedule.groups)
        self.quads = self.outputs // 4
        self.pass_tokens = len(self.thread) // self.quads
        slice_tokens = -(-schedule.tokens // schedule.cluster)
        self.passes = -(-slice_tokens // self.pass_tokens)

    def factor_rows(self, register: int) -> np.ndarray:
        """`scale`."""
        lane, warp, group = self.thread % 32, self.thread // 32 % 4, self.thread // 128
        return (group * 4 + warp) * 16 + lane // 4 + (0, 8)[register // 2 % 2]

    def weight_row(self, quad: np.ndarray) -> np.ndarray:
        """`Slice::row`."""
        return quad // 2 * 16 + quad % 2 * 4 if self.gated else quad * 4

    def partial(self, weight: np.ndarray, factors: np.ndarray, x: np.ndarray) -> np.ndarray:
        """What a CTA leaves of its rows of the weight; nothing is known of those of no tile."""
        padding = 64 * self.schedule.groups - len(weight)
        sums = np.pad(weight @ x.T, ((0, padding), (0, 0)), constant_values=np.nan)
        factors = np.pad(factors, (0, padding), constant_values=np.nan)
        partial = np.full(self.schedule.tokens * self.row, np.nan)
        for register in range(self.schedule.tokens // 2):
            scaled = sums[self.fragment(register)] * factors[self.factor_rows(register)]
            partial[self.sum_places(register)] = scaled
        return partial

    def totals(self, partial: np.ndarray, token: np.ndarray, row: np.ndarray) -> np.ndarray:
        """`add_up`, before the residual. partial: of all CTAs."""
        places = np.minimum(token, self.schedule.tokens - 1) * self.row + row
        four = places[:, None] + np.arange(4)
        total = sum(partial[rank][four] for rank in range(len(partial)))
        if not self.gated:
            return total
        up = sum(partial[rank][four + GATE_ROWS] for rank in range(len(partial)))
        return total / (1 + np.exp(-total)) * up


def emulated(
    schedule: PackedSchedule, x: np.ndarray, packed: PackedWeight, residual: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs, and how many times each was written."""
    tile, rows = Tile(schedule, len(x), packed.gated), 64 * schedule.groups
    numbers = multiplied(load_weight(packed.tiles.numpy()))
    weight = np.swapaxes(numbers, 1, 2).reshape(packed.rows, packed.inputs)
    factors = packed.factors.double().numpy()
    wide_x = np.zeros((schedule.tokens, packed.inputs))
    wide_x[: len(x)] = x
    out, written = np.full(residual.shape, np.nan), np.zeros(residual.shape, int)
    for block in range(-(-packed.rows // rows)):
        own = slice(block * rows, (block + 1) * rows)
        taken = [np.array(tile.steps(rank, packed.inputs)) for rank in range(schedule.cluster)]
        columns = [slice(64 * steps[0], 64 * steps[-1] + 64) for steps in taken]
        partial = np.stack([tile.partial(weight[own, each], factors[own], wide_x[:, each]) for each in columns])
        for rank in range(schedule.cluster):
            for token, quad, stored in tile.slices(rank):
                totals, output = tile.totals(partial, token, tile.weight_row(quad)), block * tile.outputs + quad * 4
                kept = stored & (output < packed.outputs)
                where = token[kept][:, None], output[kept][:, None] + np.arange(4)
                out[where] = totals[kept] + residual[where]
                np.add.at(written, where, 1)
    return out, written
