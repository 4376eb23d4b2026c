"""When linear layers are left to kernels that share rows of x, and which of these are compiled before ready; no GPU."""

import random

import pytest
import torch
from bladellm_kernels import cuda_compiler, hopper_parts, wide_linear
from bladellm_kernels import linear as module
from bladellm_kernels.linear import (
    linear,
    linear_reference,
    linear_silu_mul,
    linear_silu_mul_reference,
    prepare_linear,
)
from bladellm_kernels.linear_schedules import (
    GATE_ROWS,
    MANY_ROWS,
    MAX_ROWS,
    ClusterSchedule,
    Entry,
    ScheduleTable,
    WideSchedule,
    load_table,
    save_table,
)

from bladellm_runtime.layers import linear as layers
from bladellm_runtime.layers.linear import Linear, StackedLinear
from bladellm_runtime.layers.parallel import RowParallelLinear

TABLES = sorted(module._SCHEDULES.glob("linear_*.json"))
PLAIN, GATED = WideSchedule(144, 3, 1, 8, gated=False), WideSchedule(128, 2, 1, 8)


class Kernel:
    """In place of the kernel: what it was launched for. It fits as it is told."""

    def __init__(self, monkeypatch, fits: bool, schedule: WideSchedule) -> None:
        self.launched = []
        monkeypatch.setattr(hopper_parts, "matrices_fit", lambda *given: fits)
        monkeypatch.setattr(wide_linear, "launch_wide_linear", self.launch)
        monkeypatch.setattr(module, "schedule_for", lambda *given, **more: schedule)

    def launch(self, x, weight, out, residual, schedule) -> bool:
        self.launched.append(schedule)
        found = linear_silu_mul_reference(x, weight) if schedule.gated else linear_reference(x, weight, None, residual)
        out.copy_(found)
        return True


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_the_kernel_takes_what_the_table_leaves_to_it(fits, biased, adds, monkeypatch):
    """Not a bias, nor matrices that it cannot read: cuBLAS takes those."""
    kernel = Kernel(monkeypatch, fits, PLAIN)
    x, weight, residual = torch.randn(300, 32), torch.randn(40, 32), torch.randn(300, 40) if adds else None
    bias = torch.randn(40) if biased else None
    expected = linear_reference(x, weight, bias, residual).float()
    out = torch.full((300, 40), torch.nan) if residual is None else residual.clone()
    assert linear(x, weight, bias, out, out if adds else None) is out
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert kernel.launched == ([PLAIN] if fits and not biased else [])


@pytest.mark.parametrize("fits", [True, False])
def test_the_kernel_applies_the_gate(fits, monkeypatch):
    kernel = Kernel(monkeypatch, fits, GATED)
    x, weight = torch.randn(300, 32), torch.randn(80, 32)
    if not fits:
        monkeypatch.setattr(module, "linear", lambda x, weight: x @ weight.t())
    out = linear_silu_mul(x, weight)
    torch.testing.assert_close(out, linear_silu_mul_reference(x, weight).float(), atol=1e-4, rtol=1e-4)
    assert kernel.launched == [GATED] * fits
    assert module.gate_is_part(x, weight)


def test_many_rows_that_nobody_measured_have_a_rule():
    """Gates alone: of other layers cuBLAS is as fast."""
    table = ScheduleTable(
        {(96, 32, True): [Entry(2000, GATED), Entry(2500, None)], (96, 32, False): [Entry(300, PLAIN)]}
    )
    assert [table.choose(rows, 96, 32, True) for rows in (300, 2000, 2500, 2501)] == [
        GATED,
        GATED,
        None,
        WideSchedule(),
    ]
    assert [table.choose(rows, 96, 32) for rows in (300, 301, 9000)] == [PLAIN, None, None]
    assert [table.choose(rows, 64, 32, True) for rows in (MANY_ROWS - 1, MANY_ROWS)] == [None, WideSchedule()]
    assert table.choose(MANY_ROWS, 64, 32) is None


def test_tables_keep_schedules_and_their_gates(tmp_path):
    entries = {(96, 32, False): (Entry(300, PLAIN),), (96, 32, True): (Entry(256, None), Entry(512, GATED))}
    path = tmp_path / "table.json"
    save_table(ScheduleTable(entries), path)
    assert load_table(path).entries == entries
    for key, wrong in (((96, 32, False), GATED), ((96, 32, True), PLAIN)):
        save_table(ScheduleTable({key: [Entry(300, wrong)]}), path)
        with pytest.raises(ValueError, match="96, 32"):
            load_table(path)


@pytest.mark.parametrize("path", TABLES, ids=str)
def test_tables_name_all_that_they_may_choose(path):
    """And only what can be launched; few rows are left to others, but for gates that memory does not bound."""
    table = load_table(path)
    for outputs, inputs, gated in [*table.entries, (72, 40, True), (72, 40, False)]:
        known = [entry.rows for entry in table.entries.get((outputs, inputs, gated), ())]
        rows = [*known, *(random.randint(1, 20_000) for _ in range(200))]
        chosen = {count: table.choose(count, outputs, inputs, gated) for count in rows}
        wide = {count: found for count, found in chosen.items() if isinstance(found, WideSchedule)}
        assert set(wide.values()) <= table.wide_schedules(outputs, inputs, gated)
        least = GATE_ROWS.stop if gated else MAX_ROWS + 1
        assert all(count >= least and found.gated == gated for count, found in wide.items())
        assert all(wide_linear.plan(count, outputs, inputs, found, 132).grid > 0 for count, found in wide.items())


@pytest.mark.parametrize("compiles", [True, False])
def test_all_kernels_that_a_table_may_ask_for_are_compiled_and_loaded(compiles, monkeypatch):
    """With a residual and without, but for gates; and loaded one by one, which says what is wrong."""
    compiled, loaded = [], []

    def compile_one(text, defines, name) -> bytes:
        if not compiles:
            raise OSError("no compiler")
        compiled.append((defines["TOKENS"], defines["GATED"], defines["RESIDUAL"]))
        return b""

    monkeypatch.setattr(wide_linear, "on_hopper", lambda matrix: True)
    monkeypatch.setattr(cuda_compiler, "compile_cuda", compile_one)
    monkeypatch.setattr(wide_linear, "_kernel", lambda *given: loaded.append(given[:3]))
    wide_linear.prepare_kernels([PLAIN, GATED], torch.zeros(8, 8, dtype=torch.bfloat16))
    assert sorted(compiled) == ([(128, 1, 0), (144, 0, 0), (144, 0, 1)] if compiles else [])
    expected = [(PLAIN, torch.bfloat16, False), (PLAIN, torch.bfloat16, True), (GATED, torch.bfloat16, False)]
    assert loaded == expected


def test_a_weight_is_prepared_by_its_own_shape_plain_and_gated(monkeypatch):
    class OnGpu:
        shape, is_cuda, dtype, device = (192, 32), True, torch.bfloat16, torch.device("cuda")

    prepared = []
    table = {(192, 32, False): [Entry(24, ClusterSchedule(1, 1, 4)), Entry(300, PLAIN)],
             (96, 32, True): [Entry(512, GATED)]}  # fmt: skip
    monkeypatch.setattr(module, "measured_table", lambda device: ScheduleTable(table))
    monkeypatch.setattr(wide_linear, "prepare_kernels", lambda schedules, weight: prepared.append(set(schedules)))
    prepare_linear(OnGpu())
    assert prepared == [{PLAIN, GATED, WideSchedule()}]
    prepare_linear(torch.zeros(192, 32, dtype=torch.bfloat16))
    assert len(prepared) == 1, "nothing on a CPU"


def test_layers_prepare_the_weights_within(monkeypatch):
    """Not of one with a bias, which the kernels do not take."""
    prepared = []
    monkeypatch.setattr(layers, "prepare_linear", prepared.append)
    first, second, biased = (
        Linear(torch.zeros(8, 8)),
        Linear(torch.zeros(4, 8)),
        Linear(torch.zeros(8, 8), torch.zeros(8)),
    )
    for layer in (StackedLinear([first, second]), RowParallelLinear(second, None), biased):
        layer.prepare()
    assert [len(weight) for weight in prepared] == [8, 4, 4]
