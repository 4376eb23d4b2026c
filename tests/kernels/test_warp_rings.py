"""Decode attention by warps with rings of their own: compiled, what it is for, and on a GPU."""

import dataclasses
import random
import re
import subprocess
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bladellm_kernels import warp_rings
from bladellm_kernels.cuda_compiler import CudaCompilerError, compile_cuda
from bladellm_kernels.cuda_kernel import KeptLaunches
from bladellm_kernels.decode_launch import register_limit
from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.decode_shape import decode_shape
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference
from bladellm_kernels.warp_rings import RingPlan, fits, source

from tests.kernels.conditions import assert_close
from tests.kernels.decode_support import Case, decode_case
from tests.kernels.test_ring_decode import aligned, newest_rows
from tests.kernels.warp_support import LENS, MERGE_SHARED_BYTES, SCHEDULES, TYPES, planned_call
from tests.support.cases import some_pairs

pytest.importorskip("triton")


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


@pytest.mark.parametrize(("ctas", "kind"), some_pairs(SCHEDULES, product([False, True], repeat=2), 3), ids=str)
def test_programs_fit_an_sm_beside_the_merge(ctas, kind, tmp_path):
    """Without registers in memory; registers in each quarter of an SM, and shared memory by 128 bytes.

    kind: whether codes have zero points, and whether numbers are float16.
    """
    plan = random_plan(SCHEDULES[ctas], *kind)
    found, _ = compiled(plan, tmp_path)
    assert found.items() >= {"STACK": 0, "LOCAL": 0}.items()
    registers = -(-found["REG"] // 8) * 8
    assert 32 * (registers * ctas + 64) <= 65536 // 4
    assert (plan.shared_bytes + 1024) * ctas + -(-(MERGE_SHARED_BYTES + 1024) // 128) * 128 <= 228 * 1024


@pytest.mark.parametrize(("ctas", "affine"), some_pairs([3, 4], [False, True], 1))
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


@pytest.mark.gpu(hopper=True)
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


@pytest.mark.gpu(hopper=True)
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


@pytest.mark.gpu(hopper=True)
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


@pytest.mark.gpu(hopper=True)
def test_few_launches_are_kept(monkeypatch):
    monkeypatch.setattr(warp_rings, "_launches", KeptLaunches(3))
    case = gpu_case("int4", torch.bfloat16, (8, 2, 128), [3000, 70])
    work = workspace_of(case, SCHEDULES[3]).plan(case.kv_lens)
    expected = ragged_decode_attention_reference(*case.memory, case.scale)
    outs = [torch.full_like(case.q, torch.nan) for _ in range(5)]
    for out in outs:
        ragged_decode_attention(*case.memory, case.longest, case.scale, work=work, out=out)
        assert_close(out, expected, torch.bfloat16)
    assert len(warp_rings._launches) <= 3
