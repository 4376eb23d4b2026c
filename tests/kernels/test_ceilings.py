"""The kernels that read memory read every word once, by wide loads; the sections' figures follow from their times."""

import importlib
from itertools import product

import pytest
import torch

from tests.kernels.interpreted import run_interpreted
from tests.support.cases import some_pairs
from tests.support.warm import ROOT, run_script

SCRIPTS = ROOT / "kernels" / "benchmarks"
pytest.importorskip("triton")


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("read_kernels")


def interpreted(name: str) -> None:
    run_interpreted("tests.kernels.test_ceilings", name, SCRIPTS)


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def reads_of_rows_and_words() -> None:
    from read_kernels import ReadSchedule, read_flat, read_rows

    for programs, stages, pieces in product((1, 3, 50), (1, 3), (1, 2, 5)):
        schedule = ReadSchedule(1, 64, stages=stages)
        # Rows of 16 words a piece between other rows; tiles of 4 rows.
        memory = random_words(28, 3, 16 * pieces)
        rows, sums = memory[:, 1], torch.full((programs,), 0x5EEDBAD)
        read_rows(rows, sums, schedule, 16)
        assert (int(sums.sum()) - int(rows.long().sum())) % 2**32 == 0
        words = random_words(64 * 7)
        read_flat(words, sums, schedule)
        assert (int(sums.sum()) - int(words.long().sum())) % 2**32 == 0


def test_every_word_is_read_once():
    interpreted("reads_of_rows_and_words")


def consecutive_programs() -> None:
    from read_kernels import ReadSchedule, read_rows

    rows = random_words(4, 3 * 16)
    sums = torch.zeros(3, dtype=torch.int64)
    read_rows(rows, sums, ReadSchedule(1, 64), 16)
    assert ((sums - rows.view(4, 3, 16).sum((0, 2), dtype=torch.int64)) % 2**32 == 0).all()


def test_consecutive_programs_read_consecutive_pieces():
    interpreted("consecutive_programs")


def test_what_cannot_be_read_whole_is_refused(kernels):
    schedule = kernels.ReadSchedule(1, 64)
    sums = torch.zeros(2, dtype=torch.int64)
    for rows, piece in [
        (random_words(5, 32), 16),
        (random_words(4, 24), 16),
        (random_words(4, 32).float(), 16),
        (random_words(32, 4).t(), 16),
    ]:
        with pytest.raises(ValueError, match="rows"):
            kernels.read_rows(rows, sums, schedule, piece)
    with pytest.raises(ValueError, match="tiles"):
        kernels.read_flat(random_words(65), sums, schedule)


TILES = [(1, 2048), (1, 8192), (32, 64), (128, 64), (512, 16)]


@pytest.mark.parametrize(("tiles", "stages"), some_pairs(TILES, [1, 3]), ids=str)
def test_loads_are_of_16_bytes_on_hopper(kernels, tiles, stages):
    """tiles: rows, and the words of each that are read."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, (tile, piece) = kernels.read_kernel, tiles
    constants = {"PIECE": piece, "TILE": tile, "STAGES": stages}
    types = {"words": "*i32", "sums": "*i64"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    # As a launch finds them: pointers and strides are multiples of 16, pieces and units are not looked at.
    multiples = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("words", "sums", "stride")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=multiples)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    text = compiled.asm["ptx"]
    assert "sm_90" in text
    wide = "ld.global.v4" if stages == 1 else "cp.async.cg.shared.global"
    assert wide in text
    assert ("cp.async" in text) == (stages > 1)
    assert text.count(wide) >= 2 or tile * piece <= 2048, "several loads of a thread are under way at a time"


def test_the_smallest_kernel_compiles_for_hopper(kernels):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernels.tiny_kernel, {"counter": "*i32"})
    assert "sm_90" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def sections_on_a_small_pool() -> None:
    """Every figure follows from bytes or operations and the time, here 1 ms for all launches of a graph."""
    import ceilings

    class Millisecond:
        def replayed(self, works) -> float:
            for work in works:
                work()
            return 1e-3

        def queued(self, work, calls) -> float:
            return self.replayed([work] * calls)

    ceilings.POOL_BYTES = 2**19
    ceilings.FLAT_BYTES = (2**16, 2**19)
    ceilings.ROW_BYTES, ceilings.HEAD_BYTES, ceilings.ROW_LAYERS = (512, 1024), (256, 128), (1, 2)
    ceilings.MOST_LAYERS, ceilings.LINEAR_BYTES = 2, 2**18
    ceilings.LINEAR_SHAPES, ceilings.LINEAR_ROWS = ((64, 48), (32, 128)), (1, 3)
    bench = ceilings.Bench(Millisecond(), Millisecond(), quick=True, sms=3, device="cpu")
    for section in (ceilings.copy, ceilings.read, ceilings.read_interleaved, ceilings.linear):
        figures = list(section(bench))
        assert len(figures) == {"copy": 1, "read": 2, "rows": 8, "linear": 4}[figures[0].section]
        for figure in figures:
            # One graph moves all of the pool; a copy reads one half of it and writes the other.
            moved = 2**19 if section is not ceilings.linear else 2**18
            assert moved <= figure.value * 1e12 * 1e-3 <= moved * 1.01, figure
            assert figure.row().startswith(f"| {figure.section} | {figure.case} | ")


def test_figures_follow_from_bytes_and_time():
    interpreted("sections_on_a_small_pool")


def test_the_fastest_schedule_is_measured_again_and_must_read_everything(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    ceilings, kernels = importlib.import_module("ceilings"), importlib.import_module("read_kernels")
    schedules = [kernels.ReadSchedule(programs, 2048) for programs in (3, 1, 2)]
    parts, measured = list(random_words(4, 10)), []

    def read(part, sums, schedule) -> None:
        sums.zero_()
        sums[-1] = part.sum(dtype=torch.int64)
        measured.append(schedule.programs_per_sm)

    class Timer:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def replayed(self, works) -> float:
            for work in works:
                work()
            return self.seconds * measured[-1]

    bench = ceilings.Bench(Timer(5.0), Timer(1.0), quick=False, sms=2, device="cpu")
    total = int(torch.stack(parts).long().sum()) % 2**32
    assert bench.fastest(parts, total, read, schedules) == (5.0, schedules[1])
    assert measured == [3] * 4 + [1] * 4 + [2] * 4 + [1] * 4
    with pytest.raises(RuntimeError, match="not every word"):
        bench.fastest(parts[1:], total, read, schedules)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("arguments", [[], ["--device", "cpu"], ["--quick", "--only", "read"]])
def test_without_a_gpu_one_line_says_so(arguments):
    done = run_script(SCRIPTS / "ceilings.py", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "CUDA GPU" in done.stderr
