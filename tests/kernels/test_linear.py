"""`linear` against float64: by torch, its kernels interpreted, compiled for sm_90, and on a GPU where there is one."""

from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bladellm_kernels import cluster_linear, hopper_parts
from bladellm_kernels import linear as module
from bladellm_kernels.linear import linear, linear_reference, linear_silu_mul, linear_silu_mul_reference
from bladellm_kernels.linear_schedules import (
    GEMV_ROWS,
    MAX_ROWS,
    ClusterSchedule,
    DotSchedule,
    Entry,
    GemvSchedule,
    HopperSchedule,
    ScheduleTable,
    default_schedule,
    load_table,
    save_table,
)

from bladellm_runtime.engine.mixed_graphs import DEFAULT_SIZES
from bladellm_runtime.engine.step_graphs import default_sizes
from bladellm_runtime.engine.warm_up import LENGTHS
from tests.kernels.conditions import DEVICES, DTYPES, assert_close
from tests.kernels.interpreted import run_interpreted

HALVES = (torch.float16, torch.bfloat16)
SCHEDULES = Path(module.__file__).parent / "schedules"
TABLES = sorted(SCHEDULES.glob("linear_*.json"))


def expected_of(call) -> torch.Tensor:
    if call.parts == 2:
        gate, up = linear_reference(call.x, call.weight, call.bias).chunk(2, dim=1)
        y = gate / (1 + torch.exp(-gate)) * up
        return (y if call.residual is None else y + call.residual.double()).float()
    return linear_reference(call.x, call.weight, call.bias, call.residual).float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product_for_all_sizes_and_layouts(dtype, device):
    for rows, outputs, inputs in [(0, 5, 16), (1, 33, 48), (3, 130, 7), (5, 64, 160), (17, 257, 96), (300, 40, 64)]:
        x = torch.randn(rows, inputs + 16).to(device, dtype)[:, :inputs]
        weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(device, dtype)
        bias, residual = torch.randn(outputs).to(device, dtype), torch.randn(rows, outputs).to(device, dtype)
        expected = linear_reference(x, weight, bias, residual).float()
        assert_close(linear(x, weight, bias, residual=residual), expected, dtype)
        whole = torch.full((rows + 1, outputs + 5), torch.nan, dtype=dtype, device=device)
        out = whole[:rows, :outputs]
        assert linear(x, weight, bias, out=out, residual=residual) is out
        assert_close(out, expected, dtype)
        assert whole[rows:].isnan().all()
        assert whole[:, outputs:].isnan().all()
        assert linear(x, weight, bias, out=residual, residual=residual) is residual
        assert_close(residual, expected, dtype)
        if outputs % 2 == 0:
            assert_close(linear_silu_mul(x, weight), linear_silu_mul_reference(x, weight).float(), dtype)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", {"x": torch.zeros(2, 15)}),
        ("weight", {"weight": torch.zeros(8, 16, dtype=torch.float64)}),
        ("bias", {"bias": torch.zeros(7)}),
        ("out", {"out": torch.zeros(2, 9)}),
        ("out", {"out": torch.zeros(8, 2).t()}),
        ("residual", {"residual": torch.zeros(2, 8, dtype=torch.bfloat16)}),
        ("residual", {"residual": torch.zeros(3, 8)}),
    ],
)
def test_wrong_arguments_are_named(name, change):
    with pytest.raises(ValueError, match=name):
        linear(**({"x": torch.zeros(2, 16), "weight": torch.zeros(8, 16)} | change))


def test_a_gate_needs_two_equal_halves():
    with pytest.raises(ValueError, match="weight"):
        linear_silu_mul(torch.zeros(2, 16), torch.zeros(7, 16))


def interpreted() -> None:
    from tests.kernels.linear_support import linear_call, run

    for parts, dtype in ((1, torch.float16), (2, torch.bfloat16)):
        for rows, inputs in ((1, 192), (3, 200), (2, 40)):
            call = linear_call((rows, 7, inputs), dtype, parts, extras=rows > 1)
            assert_close(run(call, GemvSchedule(4, 64)), expected_of(call), dtype)
        for programs in (1, 3, 8):
            call = linear_call((5, 34, 101), dtype, parts, extras=programs > 1)
            assert_close(run(call, DotSchedule(8, 16, 16), programs), expected_of(call), dtype)
    rows_do_not_mix()
    sectors_cover_the_tiles()


def sectors_cover_the_tiles() -> None:
    """Of 7 outputs and 80 inputs in tiles of 4 × 32, three to a block: from tile 2 on, but none from tile `end` on."""
    from tests.kernels.linear_support import store_sectors_kernel

    for end, expected in ((3, {(0, 64)}), (4, {(0, 64), (4, 0)}), (6, {(0, 64), (4, 0), (4, 32), (4, 64)})):
        numbers = torch.full((4, 4 * 2), -1, dtype=torch.int32)
        store_sectors_kernel[(1,)](numbers, 7, 80, 2, end, 4, 32, 4, 16)
        found = {(place // 80, place % 80) for place in numbers.flatten().tolist()}
        tiles = {(low + row, first + half) for low, first in expected for row in range(4) for half in (0, 16)}
        assert found == {(min(row, 6), min(column, 79)) for row, column in tiles}


def rows_do_not_mix() -> None:
    from tests.kernels.linear_support import linear_call, run

    for schedule in (GemvSchedule(4, 64), DotSchedule(8, 16, 16)):
        call = linear_call((3, 20, 70), torch.float16)
        alone = run(call, schedule, 3)[1].clone()
        call.x[0], call.x[2] = torch.nan, torch.inf
        assert torch.equal(run(call, schedule, 3)[1], alone)


def test_the_kernels_give_the_product_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_linear", "interpreted")


def test_no_block_is_divided_among_more_programs_than_are_added():
    pytest.importorskip("triton")
    from bladellm_kernels.linear_launch import most_segments

    for length, blocks, programs in product((1, 2, 7, 32), (1, 3, 50), (1, 2, 13, 132)):
        total = length * blocks
        used = min(programs, total)
        firsts = [program * total // used for program in range(used + 1)]
        shared = [
            sum(low < (block + 1) * length and high > block * length for low, high in pairwise(firsts))
            for block in range(blocks)
        ]
        assert max(shared) <= most_segments(length, total, used)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_default_schedules_compile_for_hopper(monkeypatch, rows, gated):
    pytest.importorskip("triton")
    from tests.kernels.linear_support import compiled_for_hopper
    from tests.kernels.test_kv_rotary_write import spilled

    schedule = default_schedule(rows, gated)
    compiled = compiled_for_hopper(monkeypatch, (rows, 2048, 4096), schedule, 1 + gated)
    text = compiled.asm["ptx"]
    assert spilled(text) == 0
    assert text.index("prefetch.global.L2 ") < text.index("griddepcontrol.wait")
    if isinstance(schedule, GemvSchedule):
        assert text.index("ld.global") < text.index("griddepcontrol.wait"), "the first tile does not wait for x"
        assert "L2::evict_first" in text
        return
    assert "wgmma" in text or rows <= 8
    assert compiled.metadata.shared * schedule.programs <= 227 * 1024
    copies = [line for line in text.splitlines() if "cp.async" in line and "shared.global" in line]
    assert sum("0x10" in line for line in copies) > len(copies) / 2, "the weight comes 16 bytes at a time"
    assert not any("0x4," in line for line in copies)


def test_tables_say_what_they_were_told(tmp_path):
    entries = [Entry(2, GemvSchedule(4, 512)), Entry(64, DotSchedule(64, 128, 64, prefetch=5))]
    entries += [Entry(96, HopperSchedule(128, 64, 64, stages=3)), Entry(256, None)]
    table = ScheduleTable({(96, 32, False): entries})
    save_table(table, tmp_path / "table.json")
    loaded = load_table(tmp_path / "table.json")
    chosen = [loaded.choose(rows, 96, 32) for rows in (1, 2, 3, 64, 65, 97, 257)]
    assert chosen == [entries[0].schedule] * 2 + [entries[1].schedule] * 2 + [entries[2].schedule, None, None]
    assert loaded.choose(3, 96, 32, gated=True) == default_schedule(3, gated=True)
    assert loaded.choose(3, 96, 31) == default_schedule(3)


def test_tables_have_clusters_for_layers_without_gates_alone(tmp_path):
    plain, path = ClusterSchedule(1, 2, 9, tokens=32), tmp_path / "table.json"
    save_table(ScheduleTable({(96, 32, False): [Entry(32, plain)]}), path)
    assert [load_table(path).choose(rows, 96, 32) for rows in (9, 33)] == [plain, None]
    save_table(ScheduleTable({(96, 32, True): [Entry(8, plain)]}), path)
    with pytest.raises(ValueError, match="96, 32"):
        load_table(path)


class Clusters:
    """In place of the kernel: what it was launched for. It fits as it is told."""

    def __init__(self, monkeypatch, fits: bool, schedule: ClusterSchedule) -> None:
        self.launched = []
        monkeypatch.setattr(hopper_parts, "matrices_fit", lambda *given: fits)
        monkeypatch.setattr(cluster_linear, "launch_cluster_linear", self.launch)
        monkeypatch.setattr(module, "schedule_for", lambda *given, **more: schedule)

    def launch(self, x, weight, out, residual, schedule) -> bool:
        self.launched.append((x, weight, out, residual, schedule))
        out.copy_(linear_reference(x, weight, None, residual))
        return True


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_clusters_take_what_the_table_leaves_to_them(fits, biased, monkeypatch):
    """Not a bias, nor matrices that they cannot read: cuBLAS takes those."""
    schedule = ClusterSchedule(1, 2, 4)
    clusters = Clusters(monkeypatch, fits, schedule)
    x, weight, residual = torch.randn(24, 32), torch.randn(40, 32), torch.randn(24, 40)
    bias = torch.randn(40) if biased else None
    expected = linear_reference(x, weight, bias, residual).float()
    out = residual.clone()
    assert linear(x, weight, bias, out, out) is out
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert [given[-1] for given in clusters.launched] == ([schedule] if fits and not biased else [])
    assert module.adds_residual(x, weight)
    assert not module.adds_residual(torch.zeros(MAX_ROWS + 1, 32), weight)


@pytest.mark.parametrize(("rows", "part"), [(16, False), (24, False), (32, True), (160, False), (2000, True)])
def test_the_gate_is_part_of_what_kernels_have(rows, part):
    """On a device whose table leaves the gate to others; a layer of few rows is fused with norms, or not at all."""
    assert module.gate_is_part(torch.zeros(rows, 32), torch.zeros(80, 32)) == part


@pytest.mark.parametrize("path", TABLES, ids=str)
def test_measured_tables_hold_their_rows(path):
    for entries in load_table(path).entries.values():
        for entry in entries:
            if isinstance(entry.schedule, (DotSchedule, HopperSchedule)):
                assert entry.schedule.block_m >= entry.rows
            assert not isinstance(entry.schedule, GemvSchedule) or entry.rows <= GEMV_ROWS


@pytest.mark.parametrize("path", TABLES, ids=str)
def test_clusters_of_measured_tables_fit_one_wave(path):
    """Of an H200's multiprocessors."""
    for (outputs, _, _), entries in load_table(path).entries.items():
        for entry in entries:
            if isinstance(entry.schedule, ClusterSchedule):
                assert cluster_linear.plan(entry.rows, outputs, entry.schedule).grid <= 132


@pytest.mark.parametrize("path", TABLES, ids=str)
def test_the_prompts_before_ready_need_every_kernel_of_clusters(path):
    """Where nothing is captured, too: no step is the first to need one."""
    table = load_table(path)
    for (outputs, inputs, gated), entries in table.entries.items():
        wanted = {entry.schedule for entry in entries if isinstance(entry.schedule, ClusterSchedule)}
        assert wanted <= {table.choose(rows, outputs, inputs, gated) for rows in LENGTHS}


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], ids=str)
def test_the_shipped_table_has_measured_each_captured_step_of_llama_8b(shape):
    """No entry of another size stands in: between two, layers take up to a third longer."""
    for table in map(load_table, TABLES):
        measured = {entry.rows for entry in table.entries[*shape, False]}
        assert {size for size in DEFAULT_SIZES if size > MAX_ROWS} <= measured


@pytest.mark.parametrize(
    ("shape", "least"), [((6144, 4096), 24), ((4096, 4096), 24), ((28672, 4096), 136), ((4096, 14336), 24)], ids=str
)
def test_an_h200_has_measured_each_captured_batch_of_llama_8b(shape, least):
    """From `least` rows on: below them kernels of our own have most batches of gate-up, and all of the others."""
    table = load_table(SCHEDULES / "linear_nvidia_h200.json")
    measured = {entry.rows for entry in table.entries[*shape, False]}
    assert {size for size in default_sizes(MAX_ROWS) if size >= least} <= measured


@pytest.mark.parametrize(
    ("name", "multiprocessors", "table"),
    [
        ("NVIDIA H200", 132, "linear_nvidia_h200.json"),
        ("NVIDIA H100 80GB HBM3", 132, "linear_nvidia_h100_80gb_hbm3.json"),
        ("NVIDIA H800", 132, "linear_nvidia_h100_80gb_hbm3.json"),
        ("NVIDIA H100 PCIe", 114, None),
    ],
)
def test_a_gpu_has_the_table_of_its_name_or_of_one_built_alike(name, multiprocessors, table, monkeypatch):
    chip = SimpleNamespace(name=name, major=9, minor=0, multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    found = module.measured_table.__wrapped__(torch.device("cuda", 0))
    assert found == (ScheduleTable() if table is None else load_table(SCHEDULES / table))


def test_a_wrong_table_names_the_shape(tmp_path):
    path = tmp_path / "table.json"
    save_table(ScheduleTable({(96, 32, False): [Entry(8, None), Entry(8, None)]}), path)
    with pytest.raises(ValueError, match="96"):
        load_table(path)
    path.write_text(path.read_text().replace("cublas", "magic"))
    with pytest.raises(ValueError, match="magic"):
        load_table(path)


def test_default_schedules_hold_their_rows():
    for rows, gated in product(range(1, MAX_ROWS + 1), (False, True)):
        schedule = default_schedule(rows, gated)
        assert (schedule is None) == (rows > 16)
        assert not isinstance(schedule, DotSchedule) or schedule.block_m >= rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_the_kernels_give_the_product_on_a_gpu(dtype, monkeypatch):
    from bladellm_kernels.linear_launch import launch

    from tests.kernels.linear_support import linear_call

    schedules = [GemvSchedule(4, 256, prefetch=4096), DotSchedule(8, 64, 64, prefetch=16384)]
    schedules += [DotSchedule(64, 64, 64, stages=3), DotSchedule(256, 128, 32, programs=1, warps=8)]
    for schedule, parts, (outputs, inputs) in product(schedules, (1, 2), ((77, 4096), (3000, 528))):
        most = 4 if isinstance(schedule, GemvSchedule) else schedule.block_m
        for rows in (1, most - 1, most):
            call = linear_call((rows, outputs, inputs), dtype, parts, extras=rows > 1, device="cuda")
            launch(call, schedule)
            first = call.out.clone()
            assert_close(first, expected_of(call), dtype)
            for _ in range(3):
                call.out.fill_(torch.nan)
                launch(call, schedule)
                assert torch.equal(call.out, first), "the same bits whoever comes last"


@pytest.mark.gpu
def test_a_captured_layer_gives_the_same_bits_at_every_replay(monkeypatch):
    monkeypatch.setattr(
        module, "_given_table", ScheduleTable({(512, 1024, False): [Entry(64, DotSchedule(16, 64, 64))]})
    )
    x = torch.randn(9, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16) / 32
    stream, graph, out = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.empty(9, 512, device="cuda").bfloat16()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        expected = linear(x, weight).clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            linear(x, weight, out=out)
        for _ in range(5):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)
