"""Decode attention by warps with rings of their own: its source run by the host, and its index maps."""

import ctypes
import dataclasses
import random
from ctypes import c_int, c_long, c_uint, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch
from bladellm_kernels import warp_rings
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_shape import decode_shape
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention_reference
from bladellm_kernels.warp_rings import PARTS, Problem, RingPlan, arguments, ring_plan, source

from tests.kernels.conditions import assert_close
from tests.kernels.decode_support import Case, decode_case
from tests.kernels.test_ring_decode import newest_rows
from tests.kernels.warp_support import HERE, LENS, SCHEDULES, TYPES, compile_on_host, merged, planned_call
from tests.support.cases import some_pairs

pytest.importorskip("triton")


def host_library(plan: RingPlan, folder: Path) -> ctypes.CDLL:
    """The kernel's source, but for the instructions that it names, compiled for the host."""
    _, defines = source(plan)
    parts = [Path(warp_rings.__file__).with_name(name) for name in PARTS]
    assert parts[0].name == "warp_instructions.cu"
    library = compile_on_host(parts[1:], HERE / "warp_rings_host.cpp", defines, 32 * warp_rings.WARPS, folder)
    library.run.argtypes = (c_void_p, c_int, c_void_p, c_long, c_void_p, c_uint)
    return library


def run_on_host(library: ctypes.CDLL, case: Case, call: DecodeCall, settled: bool) -> int:
    """How often threads met. Until a thread waits for the kernel in front it reads other codes of the newest tokens."""
    payload = case.kv.payload
    storage = payload.untyped_storage()
    before = torch.empty(storage.nbytes(), dtype=torch.uint8)
    ctypes.memmove(before.data_ptr(), storage.data_ptr(), storage.nbytes())
    before.as_strided(payload.shape, payload.stride(), payload.storage_offset())[newest_rows(case)] = 85
    problem = Problem(*arguments(call, settled))
    grid = len(call.work.programs) * case.kv.kv_heads
    memory = (storage.data_ptr(), storage.nbytes(), before.data_ptr())
    return library.run(ctypes.addressof(problem), grid, *memory, random.getrandbits(32))


@pytest.mark.parametrize(("format_name", "dtype"), some_pairs(warp_rings.FORMATS, TYPES, 1), ids=str)
def test_the_source_on_the_host(format_name, dtype, tmp_path):
    """Lanes meet as the instructions say, warps go on at paces of their own, and copies come late."""
    kv_heads, group = random.randint(1, 3), random.randint(1, 8)
    schedule = dataclasses.replace(random.choice(list(SCHEDULES.values())), stages=random.randint(2, 6))
    granule_tokens, library = random.choice([128, 256, 384]), None
    for _ in range(3):
        lens = [random.choice((*LENS, random.randint(1, 900))) for _ in range(random.randint(0, 6))]
        lens.insert(random.randint(0, len(lens)), random.randint(1, 700))
        case = decode_case(format_name, dtype, (kv_heads * group, kv_heads, 128), lens, granule_tokens=granule_tokens)
        case.q[random.randrange(len(lens))] = 0
        call = planned_call(case, schedule, random.randint(1, 7))
        library = library or host_library(ring_plan(call, decode_shape(case.q, case.kv, call.work)), tmp_path)
        met = run_on_host(library, case, call, random.random() < 0.7)
        expected = ragged_decode_attention_reference(*case.memory, case.scale)
        assert_close(merged(call.work, call.out), expected, dtype)
        segments = int(call.work.sequences[:, 4].sum())
        busy = int((call.work.programs[:, 0] < call.work.programs[:, 1]).sum())
        assert met == kv_heads * (2 * segments - busy), "once a segment, and again before the next one"
        written = ~call.work.lse.isnan().all(1)
        assert int(written.sum()) == sum(count for count in call.work.sequences[:, 4].tolist() if count > 1)


# The index maps of `warp_rings.cu`, by its names, for all lanes of a warp at once.
LANE = np.arange(32)


def line_place(token: np.ndarray, piece: np.ndarray) -> np.ndarray:
    """Where a piece of a token's key (0 to 3) or value (4 to 7) lies in a stage, as the kernel's text begins with."""
    return token * 128 + (piece ^ token // 4 % 8) * 16


def test_copies_of_a_warp_fill_its_lines():
    found = []
    for copy in range(8):
        place = ((LANE * 16) ^ (copy * 16)) + copy * 512
        assert (place == line_place(LANE // 8 + 4 * copy, LANE % 8)).all()
        found += place.tolist()
    assert sorted(found) == list(range(0, 4096, 16))


def test_matrices_are_the_tokens_of_the_tiles_and_lie_in_different_banks():
    """Of a tile's row 8 h + r the token 4 r + 2 tile + h; its units for keys, and for values as they are turned."""
    row, second, third = LANE % 8, LANE // 8 % 2, LANE // 16
    keys = row * 512 + second * 128 + (third ^ row) * 16
    values = row * 512 + third * 128 + ((4 + second) ^ row) * 16
    for tile in range(2):
        for step in range(2):
            place = (keys ^ step * 32) + tile * 256
            assert (place == line_place(4 * row + 2 * tile + second, 2 * step + third)).all()
            place = (values ^ tile * 32) + step * 256
            assert (place == line_place(4 * row + 2 * step + third, 4 + 2 * tile + second)).all()
            for matrix in place.reshape(4, 8):
                assert len(set(matrix // 16 % 8)) == 8


def test_states_lie_apart_and_in_different_banks():
    def pair_place(row: np.ndarray, pair: np.ndarray) -> np.ndarray:
        return row * 512 + (pair ^ row // 2 * 4) * 8

    places = []
    for each in range(2):
        for unit in (16 * tile + 8 * half + 32 * high for tile in (0, 1) for half in (0, 1) for high in (0, 1)):
            place = pair_place(2 * (LANE % 4) + each, unit + LANE // 4)
            assert all(len(set(half // 8 % 16)) == 16 for half in place.reshape(2, 16))
            places += place.tolist()
    assert sorted(places) == list(range(0, 4096, 8))
    for row in range(8):
        fours = pair_place(np.full(32, row), 2 * LANE)
        assert sorted(fours) == list(range(row * 512, (row + 1) * 512, 16))
        assert (fours + 8 == pair_place(np.full(32, row), 2 * LANE + 1)).all()
