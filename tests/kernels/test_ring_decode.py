"""The warp-specialized decode kernel for Hopper: run in Python, compiled without a GPU, and on one."""

import dataclasses
import random
import re
from itertools import pairwise

import pytest
import torch
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_schedule import DecodeSchedule, default_schedule
from bladellm_kernels.decode_shape import decode_shape
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference

from tests.kernels.conditions import assert_close
from tests.kernels.decode_support import FORMATS, Case, decode_case
from tests.kernels.hopper import compiled_launches, spilled
from tests.kernels.sass import spills_in_the_loop
from tests.support.cases import drawn_of, some_pairs

pytest.importorskip("triton")


class InPython:
    """Stands for the kernel: its programs are run in Python, in random order; queries and the newest tokens are NaN, or
    other codes, until one waits for them."""

    def __init__(self, kernel, case: Case, late_copies: bool) -> None:
        self.kernel, self.case, self.late_copies = kernel, case, late_copies

    def __getitem__(self, grid):
        from tests.kernels.gluon_support import run_program

        def launch(*arguments, num_warps, EARLY, SETTLED, **constants) -> None:
            newest = newest_rows(self.case)
            new = [self.case.q, self.case.kv.payload]
            kept = [self.case.q.clone(), self.case.kv.payload[newest].clone()]

            def complete() -> None:
                new[0].copy_(kept[0])
                new[1][newest] = kept[1]

            for program in random.sample(range(grid[0]), grid[0]):
                new[0].fill_(torch.nan)
                new[1][newest] = torch.nan if new[1].is_floating_point() else 85
                run_program(
                    self.kernel, program, self.late_copies, *arguments, programs=grid[0], EARLY=True,
                    SETTLED=random.random() < 0.7, on_wait=complete, **constants,
                )  # fmt: skip

        return launch


def newest_rows(case: Case) -> torch.Tensor:
    """Rows of the memory that the kernel before this one writes: of the queries' own tokens."""
    positions = [
        base + length - 1 - back
        for base, length in zip(case.base_rows.tolist(), case.kv_lens.tolist(), strict=True)
        for back in range(case.query_len if length else 0)
    ]
    return torch.tensor(positions, dtype=torch.int64)


def random_work(case: Case, schedule: DecodeSchedule, window: int | None, programs: int) -> DecodeWork:
    """Cuts anywhere, of `programs` programs of a KV head."""
    lens, query_len = case.kv_lens.tolist(), case.query_len
    sequences, total = [], 0
    for length in lens:
        skipped = 0 if window is None else max(0, length - query_len + 1 - window) // schedule.block_kv
        blocks = -(-length // schedule.block_kv) - skipped if length else 0
        sequences.append([total, total + blocks, skipped, 0, 0])
        total += blocks
    # Programs without work come last: the segments of a sequence have numbers that follow each other.
    cuts = sorted(random.sample(range(1, total), max(0, min(programs - random.randint(1, 2), total - 1))))
    cuts = [0, *cuts, *[total] * (programs - len(cuts))]
    ranges = []
    for program, (begin, end) in enumerate(pairwise(cuts)):
        starting = next((index for index, row in enumerate(sequences) if row[1] > begin), len(lens))
        ranges.append([begin, end, starting])
        for index, row in enumerate(sequences):
            if max(begin, row[0]) < min(end, row[1]):
                row[3] = program + index if row[4] == 0 else row[3]
                row[4] += 1
    empty = [index for index, row in enumerate(sequences) if row[4] == 0]
    heads, head_dim = case.q.shape[1:]
    workspace = DecodeWorkspace(
        case.q.device, len(lens), heads, case.kv.kv_heads, head_dim, query_len, case.kv.format, case.q.dtype, schedule
    )
    segments = programs + len(lens)
    return DecodeWork(
        torch.tensor(ranges, dtype=torch.int32),
        torch.tensor(sequences, dtype=torch.int32),
        torch.zeros(1 + len(lens), dtype=torch.int32),
        torch.tensor([len(empty), *empty, *[0] * (len(lens) - len(empty))], dtype=torch.int32),
        workspace.arrived,
        torch.full((segments, query_len * heads, head_dim), torch.nan),
        torch.full((segments, query_len * heads), torch.nan),
        window,
        query_len,
        schedule,
    )


def run_in_python(case: Case, schedule, window, programs, late_copies, monkeypatch) -> torch.Tensor:
    from bladellm_kernels import ring_decode as module

    monkeypatch.setattr(module, "ring_decode_kernel", InPython(module.ring_decode_kernel, case, late_copies))
    work = random_work(case, schedule, window, programs)
    out = torch.full_like(case.q, torch.nan)
    shape = decode_shape(case.q, case.kv, work)
    assert module.launch(DecodeCall(*case.memory, case.scale, work, out), shape)
    assert not work.arrived.any(), "counters are left as they were found"
    return out


LENS = [1, 0, 63, 64, 65, 200, 0, 16]


@pytest.mark.turns
@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize(("heads", "query_len", "window", "schedule", "programs"), [
    ((4, 2, 16), 1, None, DecodeSchedule(64, 3, 4, 1), 5),
    ((6, 2, 32), 3, None, DecodeSchedule(32, 2, 2, 1), 3),
    ((4, 1, 64), 5, 70, DecodeSchedule(128, 2, 4, 1), 2),
    ((2, 2, 16), 1, 33, DecodeSchedule(64, 1, 4, 1), 1),
    ((8, 4, 32), 1, None, DecodeSchedule(16, 3, 4, 1, lane_heads=4), 3),
    ((4, 4, 16), 2, 40, DecodeSchedule(32, 2, 4, 1, lane_heads=2), 4),
    ((12, 4, 16), 1, None, DecodeSchedule(64, 2, 2, 1, lane_heads=2), 5),
    ((4, 2, 64), 1, None, DecodeSchedule(64, 3, 4, 1), 5),
    ((6, 2, 128), 3, None, DecodeSchedule(32, 2, 2, 1), 3),
    ((2, 2, 128), 1, 33, DecodeSchedule(64, 1, 4, 1), 1),
])  # fmt: skip
def test_every_token_is_attended_to(heads, query_len, window, schedule, programs, late_copies, monkeypatch):
    lens = [random.choice([0, length + query_len]) for length in LENS]
    case = decode_case("no_quant", torch.float16, heads, lens, granule_tokens=128, query_len=query_len, window=window)
    out = run_in_python(case, schedule, window, programs, late_copies, monkeypatch)
    expected = ragged_decode_attention_reference(*case.memory, case.scale, window, query_len)
    assert_close(out, expected, torch.float16)


@pytest.mark.turns
@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_format_in_python(format_name, late_copies, monkeypatch):
    lens = [random.randint(0, 200) for _ in range(5)]
    case = decode_case(format_name, torch.float16, (4, 2, random.choice([16, 32, 128])), lens, granule_tokens=128)
    schedule = random.choice([DecodeSchedule(64, 2, 4, 1), DecodeSchedule(32, 2, 4, 1, lane_heads=2)])
    out = run_in_python(case, schedule, None, 4, late_copies, monkeypatch)
    assert_close(out, ragged_decode_attention_reference(*case.memory, case.scale), torch.float16)


@pytest.mark.parametrize("growth", [0.02, 0.3, 3.0])
def test_sums_follow_scores_that_grow(growth, monkeypatch):
    """Little by little, or by more than what exponentials may exceed 1."""
    case = decode_case("no_quant", torch.bfloat16, (4, 2, 64), [random.randint(200, 300)], granule_tokens=128)
    grow(case, growth)
    out = run_in_python(case, DecodeSchedule(64, 2, 4, 1), None, 2, False, monkeypatch)
    assert_close(out, ragged_decode_attention_reference(*case.memory, case.scale), torch.bfloat16)


def grow(case: Case, growth: float) -> None:
    """Make the first two numbers of queries 8, and those of keys such that scores grow by `growth` a token."""
    case.q[..., :2] = 8
    lens = case.kv_lens.tolist()
    for base, length in zip(case.base_rows.tolist(), lens, strict=True):
        steps = torch.arange(length, device=case.q.device)[:, None, None] * (growth / case.scale / 16)
        case.kv.payload[base : base + length, 0, :, :2] = steps.to(case.q.dtype)


def test_it_does_not_matter_which_program_comes_last(monkeypatch):
    """The output of a sequence of several segments has the same bits."""
    from bladellm_kernels import ring_decode as module

    case = decode_case("no_quant", torch.float16, (4, 2, 32), [300, 130, 90], granule_tokens=128)
    monkeypatch.setattr(module, "ring_decode_kernel", InPython(module.ring_decode_kernel, case, False))
    work = random_work(case, DecodeSchedule(16, 2, 1, 1), None, 9)
    shape = decode_shape(case.q, case.kv, work)
    outs = [torch.full_like(case.q, torch.nan, dtype=torch.float32) for _ in range(4)]
    for out in outs:
        module.launch(DecodeCall(*case.memory, case.scale, work, out), shape)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_few_sequences_leave_their_states_to_a_kernel_behind(monkeypatch):
    """Of many segments each: what a program has of a sequence is its part of the softmax."""
    from bladellm_kernels import ring_decode as module

    case = decode_case("no_quant", torch.float16, (4, 2, 32), [300], granule_tokens=128)
    monkeypatch.setattr(module, "ring_decode_kernel", InPython(module.ring_decode_kernel, case, True))
    work = random_work(case, DecodeSchedule(32, 2, 2, 1), None, 6)
    shape = decode_shape(case.q, case.kv, work)
    assert not module.launch(DecodeCall(*case.memory, case.scale, work, torch.empty_like(case.q)), shape)
    first, count = work.sequences[0, 3:].tolist()
    weights = work.lse[first : first + count].softmax(0)
    merged = (work.partial[first : first + count] * weights[:, :, None]).sum(0, keepdim=True)
    assert_close(merged.half(), ragged_decode_attention_reference(*case.memory, case.scale), torch.float16)


LAYERS = [((32, 8, 128), 4), ((32, 8, 128), 64), ((40, 40, 128), 64)]
"""Heads of a layer, and whether its sequences are long."""


def compiled_kernel(case: Case, schedule: DecodeSchedule, monkeypatch, programs: int = 2):
    """As a launch on a Hopper compiles it, behind another one of the same plan."""
    from bladellm_kernels import ring_decode as module

    work = random_work(case, schedule, None, programs)
    work.used = True
    # Casts in place of instructions are for other devices.
    shape = dataclasses.replace(decode_shape(case.q, case.kv, work), plain=False)
    monkeypatch.setattr(module, "early_launch", lambda device: {"EARLY": True, "launch_pdl": True})
    with compiled_launches() as compiled:
        module.launch(DecodeCall(*case.memory, case.scale, work, torch.empty_like(case.q)), shape)
    return compiled["ring_decode_kernel"]


@pytest.mark.parametrize(("format_name", "layer"), some_pairs(FORMATS, LAYERS, 2), ids=str)
def test_programs_of_every_format_fit_an_sm_twice(format_name, layer, monkeypatch, tmp_path):
    heads, batch = layer
    schedule = default_schedule(128, KV_FORMATS[format_name], torch.bfloat16, batch=batch, kv_heads=heads[1])
    assert schedule.warp_specialized
    # What warps with rings of their own do not take, this kernel does by the same schedule.
    assert schedule.private_rings == ("int4" in format_name and batch == 4)
    assert schedule.lane_heads == (2 if "int4" in format_name and batch == 64 else 1)
    case = decode_case(format_name, torch.bfloat16, heads, [500, 70], granule_tokens=256)
    case = dataclasses.replace(case, kv=dataclasses.replace(case.kv, payload=aligned(case.kv.payload)))
    kernel = compiled_kernel(case, schedule, monkeypatch)
    text = kernel.asm["ptx"]
    assert not spills_in_the_loop(kernel, tmp_path, "HMMA")
    assert (kernel.metadata.shared + 1024) * schedule.ctas_per_sm <= 228 * 1024
    registers = int(re.search(r"\.maxnreg (\d+)", text)[1])
    assert registers * 32 * (schedule.warps + 4) * schedule.ctas_per_sm <= 65536
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10,", text)
    # Of whole blocks keys and values, of 12 bits lower bytes and upper nibbles of each, and their scales.
    boxes = {"no_quant": 2, "int4": 0, "int4_affine": 0, "fp12_e4m7": 5}.get(format_name, 3)
    assert text.count("cp.async.bulk.tensor.2d") == boxes
    # Consumers wait at once; producers for the newest tokens, and at their end.
    assert text.count("griddepcontrol.wait") == 3
    assert text.count("griddepcontrol.launch_dependents") == 1


@pytest.mark.parametrize("format_name", drawn_of([name for name in FORMATS if name != "no_quant"], 2))
def test_the_merge_behind_finds_room_beside_two_programs(format_name, monkeypatch, tmp_path):
    """Registers in each quarter of an SM, and shared memory, which is dealt out by 128 bytes."""
    from bladellm_kernels import merge_attention_triton as module

    schedule = default_schedule(128, KV_FORMATS[format_name], torch.bfloat16, kv_heads=8)
    assert schedule.merge_beside
    case = decode_case(format_name, torch.bfloat16, (32, 8, 128), [500], granule_tokens=256)
    case = dataclasses.replace(case, kv=dataclasses.replace(case.kv, payload=aligned(case.kv.payload)))
    programs = random.choice([33, 66])
    kernel = compiled_kernel(case, schedule, monkeypatch, random.choice([5, 9]))
    assert not spills_in_the_loop(kernel, tmp_path, "HMMA")
    work = random_work(case, schedule, None, 3)
    work.programs = torch.zeros(programs, 3, dtype=torch.int32)
    with compiled_launches() as compiled:
        module.merge_segments(work, torch.empty_like(case.q))
    merge = compiled["merge_segments_kernel"]
    assert spilled(merge.asm["ptx"]) == 0
    limits = [int(re.search(r"\.maxnreg (\d+)", each.asm["ptx"])[1]) for each in (kernel, merge)]
    assert schedule.ctas_per_sm * (schedule.warps + 4) // 4 * 32 * limits[0] + 32 * limits[1] <= 65536 // 4
    shared = [-(-(each.metadata.shared + 1024) // 128) * 128 for each in (kernel, merge)]
    assert schedule.ctas_per_sm * shared[0] + shared[1] <= 228 * 1024


def test_where_it_merges_and_the_layer_behind_starts_late_only_its_end_lets_that_start(monkeypatch):
    case = decode_case("no_quant", torch.bfloat16, (32, 8, 128), [500, 70], granule_tokens=256)
    case = dataclasses.replace(case, kv=dataclasses.replace(case.kv, payload=aligned(case.kv.payload)))
    for programs, merges in ((8, True), (9, False)):
        schedule = dataclasses.replace(default_schedule(128), late=True)
        text = compiled_kernel(case, schedule, monkeypatch, programs).asm["ptx"]
        assert text.count("griddepcontrol.launch_dependents") == (0 if merges else 1), "a merge behind starts early"


def aligned(payload: torch.Tensor) -> torch.Tensor:
    """A payload of the same shape whose first number lies at whole 16 bytes."""
    rows, values, heads, width = payload.shape
    memory = torch.empty(rows, 1, heads, values, width, dtype=payload.dtype, device=payload.device)
    return memory[:, 0].transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    ("heads", "query_len"), [((32, 8, 128), 1), ((8, 8, 64), 1), ((8, 4, 128), 3), ((16, 16, 128), 1)], ids=str
)
def test_replays_give_the_same_bits_whoever_comes_last(format_name, heads, query_len):
    """Lengths change between replays; some sequences are empty, some of one segment, some of several."""
    most = 40_000 // heads[1]
    lens = [random.choice([0, 1, 64, random.randint(1, 900), random.randint(1, most)]) for _ in range(70)]
    lens = [length + query_len if length else 0 for length in lens]
    case = decode_case(format_name, torch.bfloat16, heads, lens, "cuda", 128, query_len=query_len)
    workspace = DecodeWorkspace(torch.device("cuda"), 70, *heads, query_len, case.kv.format, torch.bfloat16)
    now = case.kv_lens.clone()
    outs = [torch.empty_like(case.q) for _ in range(4)]

    def step() -> None:
        work = workspace.plan(now, query_len=query_len)
        memory = (case.q, case.kv, case.base_rows, case.slots, now)
        for out in outs:
            ragged_decode_attention(*memory, most + query_len, case.scale, query_len=query_len, work=work, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for share in (1.0, 0.3, 1.0):
        now.copy_(torch.where(case.kv_lens > 0, (case.kv_lens * share).long().clamp(min=query_len), 0))
        expected = ragged_decode_attention_reference(
            case.q, case.kv, case.base_rows, case.slots, now, case.scale, None, query_len
        )
        for _ in range(5):
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            assert_close(outs[0], expected, torch.bfloat16)
            assert all(torch.equal(out, outs[0]) for out in outs)
    assert not workspace.arrived.any(), "counters are left as they were found"


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [0.0, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("format_name", ["no_quant", "int8", "fp8_e4m3"])
def test_sums_follow_scores_that_grow_on_a_gpu(format_name, growth):
    lens = [random.randint(1, 3000) for _ in range(40)]
    case = decode_case(format_name, torch.bfloat16, (32, 8, 128), lens, "cuda", 256)
    if format_name == "no_quant":
        grow(case, growth)
    else:
        case.q.mul_(10 * growth)
    work = DecodeWorkspace(torch.device("cuda"), 40, 32, 8, 128, 1, case.kv.format, torch.bfloat16).plan(case.kv_lens)
    out = ragged_decode_attention(*case.memory, 3000, case.scale, work=work)
    assert_close(out, ragged_decode_attention_reference(*case.memory, case.scale), torch.bfloat16)


@pytest.mark.gpu
def test_the_newest_tokens_are_those_that_the_kernel_before_wrote():
    """Each attention reads what the write in front of it left in the memory, although it loads before that ended."""
    case = decode_case("no_quant", torch.bfloat16, (32, 8, 128), [64, 65, 700, 1], "cuda", 256)
    rows = newest_rows(case).cuda()
    workspace = DecodeWorkspace(torch.device("cuda"), 4, 32, 8, 128, 1, case.kv.format, torch.bfloat16)
    written = torch.randn(6, 4, 2, 8, 128, device="cuda").bfloat16()
    outs = [torch.empty_like(case.q) for _ in written]

    def step() -> None:
        work = workspace.plan(case.kv_lens)
        for new, out in zip(written, outs, strict=True):
            case.kv.payload.index_copy_(0, rows, new)
            ragged_decode_attention(*case.memory, 700, case.scale, work=work, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        graph.replay()
        for new, out in zip(written, outs, strict=True):
            case.kv.payload[rows] = new
            assert_close(out, ragged_decode_attention_reference(*case.memory, case.scale), torch.bfloat16)
