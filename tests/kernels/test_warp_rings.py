"""Decode attention by warps with rings of their own: its source run by the host, its maps, compiled, and on a GPU."""

import ctypes
import dataclasses
import random
import re
import shutil
import subprocess
from ctypes import c_int, c_long, c_uint, c_void_p
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bladellm_kernels import warp_rings
from bladellm_kernels.cuda_compiler import CudaCompilerError, compile_cuda
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_launch import register_limit
from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.decode_shape import decode_shape
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference
from bladellm_kernels.warp_rings import Problem, RingPlan, arguments, fits, ring_plan, source

from tests.kernels.conditions import assert_close
from tests.kernels.decode_support import Case, decode_case
from tests.kernels.test_ring_decode import aligned, newest_rows, random_work

pytest.importorskip("triton")

ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper"
)
HERE = Path(__file__).parent
TYPES = [torch.bfloat16, torch.float16]
SCHEDULES = {
    2: DecodeSchedule(128, 6, 4, 2, merge_beside=True, private_rings=True),
    3: DecodeSchedule(128, 4, 4, 3, merge_beside=True, private_rings=True),
    4: DecodeSchedule(128, 3, 4, 4, merge_beside=True, private_rings=True),
}
"""By programs of an SM."""
MERGE_SHARED_BYTES = 1336
LENS = (1, 31, 32, 33, 127, 128, 129, 0)


def planned_call(case: Case, schedule: DecodeSchedule, programs: int) -> DecodeCall:
    """With cuts anywhere, and all that is written poisoned."""
    work = random_work(case, schedule, None, programs)
    return DecodeCall(*case.memory, case.scale, work, torch.full_like(case.q, torch.nan))


def merged(work: DecodeWork, out: torch.Tensor) -> torch.Tensor:
    """What the kernel behind makes of the states, float32: by the definition of the logarithms."""
    whole = out.float()
    for sequence, (_, _, _, first, count) in enumerate(work.sequences.tolist()):
        if count == 0:
            assert out[sequence].isnan().all(), "nothing is written for a sequence of length 0"
            whole[sequence] = 0
        elif count > 1:
            weights = work.lse[first : first + count].softmax(0)
            whole[sequence] = (work.partial[first : first + count] * weights[:, :, None]).sum(0)
    return whole


def host_library(plan: RingPlan, folder: Path) -> ctypes.CDLL:
    """The kernel's source, but for the instructions that it names, compiled for the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no compiler for the host")
    text, defines = source(plan)
    head, rest = text.split("// --- Instructions ---")
    body = rest[rest.index("// --- Pairs of 16 bits ---") :]
    texts = (HERE / "warp_on_host.h").read_text(), head, body, (HERE / "warp_rings_host.cpp").read_text()
    (folder / "host.cpp").write_text("\n".join(texts))
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    line = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros, "host.cpp", "-o", "host.so"]
    subprocess.run(line, cwd=folder, check=True, capture_output=True, timeout=300)
    library = ctypes.CDLL(str(folder / "host.so"))
    library.run.restype = c_long
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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("format_name", warp_rings.FORMATS)
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


def compiled(plan: RingPlan, folder: Path) -> tuple[dict[str, int], SimpleNamespace]:
    """Resources of the kernel, and its cubin."""
    triton = pytest.importorskip("triton")
    text, defines = source(plan)
    try:
        cubin = compile_cuda(text, defines, name="warp_rings.cu")
    except OSError as error:
        pytest.skip(str(error))
    (folder / "resources.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    line = [str(tool), "--dump-resource-usage", str(folder / "resources.cubin")]
    report = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found, SimpleNamespace(asm={"cubin": cubin})


def random_plan(schedule: DecodeSchedule, affine: bool, half: bool) -> RingPlan:
    registers = register_limit(128 * schedule.ctas_per_sm, 64)["maxnreg"]
    kv_heads, group, layers = random.choice([1, 2, 8, 40]), random.randint(1, 8), random.choice([1, 32])
    return RingPlan(schedule.stages, registers, affine, half, kv_heads, group, 256, layers * kv_heads * 128)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("ctas", SCHEDULES)
def test_programs_fit_an_sm_beside_the_merge(ctas, affine, half, tmp_path):
    """Without registers in memory; registers in each quarter of an SM, and shared memory by 128 bytes."""
    plan = random_plan(SCHEDULES[ctas], affine, half)
    found, _ = compiled(plan, tmp_path)
    assert found.items() >= {"STACK": 0, "LOCAL": 0}.items()
    registers = -(-found["REG"] // 8) * 8
    assert 32 * (registers * ctas + 64) <= 65536 // 4
    assert (plan.shared_bytes + 1024) * ctas + -(-(MERGE_SHARED_BYTES + 1024) // 128) * 128 <= 228 * 1024


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("ctas", [3, 4])
def test_warps_do_not_wait_for_one_another_in_the_loop(ctas, affine, tmp_path):
    from tests.kernels.sass import disassembled, inner_loop

    _, kernel = compiled(random_plan(SCHEDULES[ctas], affine, False), tmp_path)
    names = inner_loop(kernel, tmp_path, "HMMA")
    assert not [name for name in names if name.startswith(("BAR", "WARPSYNC", "LDL", "STL", "SYNCS", "LDG."))]
    counts = {name: sum(each.startswith(name) for each in names) for name in ("HMMA", "LDSM", "MOVM", "MUFU", "SHFL")}
    assert counts == {"HMMA": 32 if affine else 34, "LDSM": 8, "MOVM": 4, "MUFU": 10, "SHFL": 6}
    assert len(names) < 400
    text = "\n".join(disassembled(kernel, tmp_path))
    assert text.count("BAR.SYNC") == 2, "once a segment, and again before the next one"
    copies = re.findall(r"LDGSTS\S+", text)
    assert copies
    assert set(copies) == {"LDGSTS.E.BYPASS.128"}


def fitting(case: Case, schedule: DecodeSchedule = SCHEDULES[3], **changed) -> bool:
    call = planned_call(case, schedule, 3)
    for name, value in changed.items():
        call = dataclasses.replace(call, **{name: value})
    return fits(call, decode_shape(call.q, call.kv, call.work))


def test_what_the_kernel_is_for():
    def case_of(format_name="int4", dtype=torch.bfloat16, heads=(8, 2, 128), **more) -> Case:
        case = decode_case(format_name, dtype, heads, [300], **{"granule_tokens": 256, **more})
        return dataclasses.replace(case, kv=dataclasses.replace(case.kv, payload=aligned(case.kv.payload)))

    case = case_of()
    assert fitting(case)
    assert fitting(case_of("int4_affine", torch.float16, (8, 1, 128)))
    assert not fitting(case, DecodeSchedule(128, 4, 4, 3, warp_specialized=True))
    for changed in ({"idle_ns": 1}, {"stay_ns": 1}, {"block_kv": 64}, {"warps": 2}, {"stages": 1}, {"stages": 99}):
        assert not fitting(case, dataclasses.replace(SCHEDULES[3], **changed))
    assert not fitting(case, dataclasses.replace(SCHEDULES[3], block_kv=64, lane_heads=2))
    for other in (
        case_of("int8"), case_of(dtype=torch.float32), case_of(heads=(18, 2, 128)), case_of(heads=(4, 2, 64)),
        case_of(granule_tokens=64), case_of(query_len=2),
    ):  # fmt: skip
        assert not fitting(other)
    assert not fitting(case, scale=-1.0)
    odd = torch.empty(len(case.q), 8, 130, dtype=case.q.dtype)[:, :, :128]
    assert not fitting(case, q=odd)
    assert not fitting(case, kv=dataclasses.replace(case.kv, payload=aligned(case.kv.payload)[:, :, :, 1:]))
    assert not warp_rings.takes(planned_call(case, SCHEDULES[3], 3), None), "nothing on a CPU"


@pytest.mark.parametrize("error", [OSError("there is no NVRTC"), CudaCompilerError("warp_rings.cu(3): error: ?")])
def test_without_a_compiler_triton_has_it_and_one_warning_says_so(error, monkeypatch):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr(warp_rings, "compile_cuda", fail)
    monkeypatch.setattr(warp_rings, "fits", lambda call, shape: True)
    monkeypatch.setattr(warp_rings, "on_hopper", lambda tensor: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    warp_rings._kernel.cache_clear()
    case = decode_case("int4", torch.bfloat16, (8, 2, 128), [300], granule_tokens=256)
    call = planned_call(case, SCHEDULES[3], 3)
    with pytest.warns(UserWarning, match="left to Triton") as told:
        found = [warp_rings.takes(call, decode_shape(case.q, case.kv, call.work)) for _ in range(2)]
    assert found == [False, False]
    assert len(told) == 1
    assert str(error) in str(told[0].message)
    warp_rings._kernel.cache_clear()


def gpu_case(format_name: str, dtype: torch.dtype, heads: tuple[int, int, int], lens: list[int]) -> Case:
    """With memory at whole 16 bytes."""
    case = decode_case(format_name, dtype, heads, lens, "cuda", random.choice([128, 256]))
    assert case.kv.payload.data_ptr() % 16 == 0
    return case


def taken(monkeypatch) -> list[bool]:
    """What `takes` answers from now on."""
    answers: list[bool] = []
    takes = warp_rings.takes

    def noted(call, shape) -> bool:
        answers.append(takes(call, shape))
        return answers[-1]

    monkeypatch.setattr(warp_rings, "takes", noted)
    return answers


def workspace_of(case: Case, schedule: DecodeSchedule) -> DecodeWorkspace:
    heads, head_dim = case.q.shape[1:]
    shape = (len(case.kv_lens), heads, case.kv.kv_heads, head_dim, 1, case.kv.format, case.q.dtype, schedule)
    workspace = DecodeWorkspace(torch.device("cuda"), *shape)
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    return workspace


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("ctas", SCHEDULES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("format_name", warp_rings.FORMATS)
@pytest.mark.parametrize("lens", [[1], [129], [65536], [70000], [5000, 0, 1, 20000], None], ids=str)
def test_on_a_gpu(lens, format_name, dtype, ctas, monkeypatch):
    """Whatever lies behind a sequence's newest token: scales there are NaN."""
    answers = taken(monkeypatch)
    heads = random.choice([(32, 8, 128), (8, 8, 128), (8, 1, 128), (14, 2, 128)]) if lens is None else (8, 2, 128)
    lens = lens or [random.choice((*LENS, random.randint(1, 9000))) for _ in range(random.randint(1, 40))] + [77]
    case = gpu_case(format_name, dtype, heads, lens)
    work = workspace_of(case, SCHEDULES[ctas]).plan(case.kv_lens)
    expected = ragged_decode_attention_reference(*case.memory, case.scale)
    outs = [torch.full_like(case.q, torch.nan) for _ in range(3)]
    for out in outs:
        ragged_decode_attention(*case.memory, case.longest, case.scale, work=work, out=out)
    assert answers == [True] * 3
    assert_close(outs[0], expected, dtype)
    assert all(torch.equal(out, outs[0]) for out in outs)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("ctas", SCHEDULES)
@pytest.mark.parametrize("format_name", warp_rings.FORMATS)
def test_replays_give_the_same_bits(format_name, ctas, monkeypatch):
    """Lengths change between replays; some sequences are empty, some of one segment, some of several."""
    answers = taken(monkeypatch)
    lens = [random.choice([0, 1, 64, random.randint(1, 900), random.randint(1, 5000)]) for _ in range(20)] + [9000]
    case = gpu_case(format_name, torch.bfloat16, (32, 8, 128), lens)
    workspace = workspace_of(case, SCHEDULES[ctas])
    now = case.kv_lens.clone()
    memory = (case.q, case.kv, case.base_rows, case.slots, now)
    outs, longest = [torch.empty_like(case.q) for _ in range(4)], case.longest

    def step() -> None:
        work = workspace.plan(now)
        for out in outs:
            ragged_decode_attention(*memory, longest, case.scale, work=work, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert all(answers)
    for share in (1.0, 0.3, 1.0):
        now.copy_(torch.where(case.kv_lens > 0, (case.kv_lens * share).long().clamp(min=1), 0))
        expected = ragged_decode_attention_reference(*memory, case.scale)
        for _ in range(5):
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            assert_close(outs[0], expected, torch.bfloat16)
            assert all(torch.equal(out, outs[0]) for out in outs)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("ctas", SCHEDULES)
@pytest.mark.parametrize("lens", [[20_000], [64, 65, 700, 1], [33, 4096, 1]], ids=str)
def test_the_newest_tokens_and_queries_are_those_that_the_kernels_before_wrote(lens, ctas, monkeypatch):
    """Each attention reads what the writes in front of it left, although it loads before those ended."""
    answers = taken(monkeypatch)
    case = gpu_case("int4", torch.bfloat16, (32, 8, 128), lens)
    rows = newest_rows(case).cuda()
    workspace = workspace_of(case, SCHEDULES[ctas])
    q, count, longest = torch.empty_like(case.q), len(lens), case.longest
    memory = (q, case.kv, case.base_rows, case.slots, case.kv_lens)
    written = torch.randint(0, 256, (6, count, 2, 8, 64), device="cuda").to(torch.uint8)
    queries = [torch.randn_like(q) * 3 for _ in written]
    outs = [torch.empty_like(q) for _ in written]

    def step() -> None:
        work = workspace.plan(case.kv_lens)
        for new, query, out in zip(written, queries, outs, strict=True):
            q.copy_(query)
            case.kv.payload.index_copy_(0, rows, new)
            ragged_decode_attention(*memory, longest, case.scale, work=work, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert all(answers)
    for _ in range(10):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for new, query, out in zip(written, queries, outs, strict=True):
            case.kv.payload[rows] = new
            q.copy_(query)
            assert_close(out, ragged_decode_attention_reference(*memory, case.scale), torch.bfloat16)


@ON_HOPPER
@pytest.mark.gpu
def test_few_launches_are_kept(monkeypatch):
    monkeypatch.setattr(warp_rings, "MAX_LAUNCHES", 3)
    case = gpu_case("int4", torch.bfloat16, (8, 2, 128), [3000, 70])
    work = workspace_of(case, SCHEDULES[3]).plan(case.kv_lens)
    expected = ragged_decode_attention_reference(*case.memory, case.scale)
    outs = [torch.full_like(case.q, torch.nan) for _ in range(5)]
    for out in outs:
        ragged_decode_attention(*case.memory, case.longest, case.scale, work=work, out=out)
        assert_close(out, expected, torch.bfloat16)
    assert len(warp_rings._launches) <= 3
