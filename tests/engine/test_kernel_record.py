"""The list of kernels a start needed: read back it compiles to the same files, by processes that have no GPU."""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine import compile_kernels
from bladellm_runtime.engine.compile_kernels import Compiling, start_compiling
from bladellm_runtime.engine.kernel_record import hashing_triton, read_record, record_path, write_record
from tests.support.warm import run_code

HOPPER = GPUTarget("cuda", 90, 32)
START = """
import sys
from pathlib import Path
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from bladellm_kernels import early_launch
from bladellm_kernels.many_rows_linear import launch_many_rows
from bladellm_kernels.merge_attention_triton import merge_parts
from bladellm_kernels.kv_dequantize_triton import launch
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from bladellm_runtime.engine.kernel_record import describe, make_hashes_reproducible, write_record
from tests.kernels.decode_support import decode_case

class Hopper:
    get_current_device = get_current_stream = lambda *given: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver._active = Hopper()
run = JITFunction.run
JITFunction.run = lambda self, *given, grid, warmup, **more: run(self, *given, grid=grid, warmup=True, **more)
early_launch.can_launch_early = lambda device: True
make_hashes_reproducible()
KERNEL_COMPILES.watch()
with KERNEL_COMPILES.expected():
    for heads in (2, 3):
        merge_parts([torch.randn(5, heads, 64)] * heads, [torch.randn(5, heads)] * heads, torch.empty(5, heads, 64))
    kv = decode_case("int8", torch.bfloat16, (2, 1, 64), [40]).kv
    launch(kv, ((0, 0, 0, 40),), torch.empty(40, 2, 1, 64, dtype=torch.bfloat16))
    for rows in (1024, 1001, 8192):
        x, weight = torch.zeros(rows, 64).bfloat16(), torch.zeros(256, 64).bfloat16()
        launch_many_rows(x, weight, x.new_empty(rows, 128), 2)
described = [describe(*seen) for seen in KERNEL_COMPILES.seen]
assert None not in described
write_record(Path(sys.argv[1]), described)
print(KERNEL_COMPILES.compiled, KERNEL_COMPILES.loaded)
"""

AHEAD = """
import sys
from pathlib import Path
from triton.backends.compiler import GPUTarget
from bladellm_runtime.engine import compile_kernels
from bladellm_runtime.engine.compile_kernels import start_compiling
from bladellm_runtime.engine.kernel_record import make_hashes_reproducible, read_record

compile_kernels.MAX_PROCESSES = 1  # each imports torch
make_hashes_reproducible()
kernels, hopper = read_record(Path(sys.argv[1])), GPUTarget("cuda", 90, 32)
for _ in range(2):
    compiling = start_compiling(kernels, hopper)
    print(compiling.kernels)
    compiling.wait()
"""


def run_script(script: str, cache: Path, record: Path) -> list[int]:
    """What it prints on a machine whose triton cache is `cache`: of a start, kernels compiled and loaded."""
    done = run_code(script, record, TRITON_CACHE_DIR=str(cache), PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.turns("compiled kernels")
def test_a_second_machine_compiles_the_list_ahead(tmp_path):
    """Kernels in Triton and Gluon, one of them of specialised warps and one for all numbers of rows."""
    record, cache = tmp_path / "list.json", tmp_path / "second"
    count, loaded = run_script(START, tmp_path / "first", record)
    kernels = read_record(record)
    assert (len(kernels), loaded) == (count, 0)
    assert count == 4
    assert run_script(AHEAD, cache, record) == [count, 0]
    assert run_script(START, cache, tmp_path / "again.json") == [0, count]
    assert read_record(tmp_path / "again.json") == kernels


def test_what_is_no_kernel_of_ours_is_left_alone(caplog):
    """Lists that are out of date, or made to run something else."""
    kernels = [
        {"function": name, "signature": {}, "constants": [], "attributes": [], "options": {}}
        for name in ("os:system", "bladellm_kernels.gone:kernel", "bladellm_kernels.merge_attention_triton:gone")
    ]
    assert start_compiling([*kernels, {}, {"function": 5}], HOPPER).kernels == 0


def test_a_process_that_fails_is_told_and_harmless(caplog):
    processes = [subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"]) for code in (0, 3, 1)]
    Compiling(5, processes).wait()
    assert "2 of 3 processes" in caplog.text


@pytest.mark.parametrize("note", ["", "x" * 2**20], ids=["a short list", "more than a pipe holds"])
def test_a_process_that_ends_before_it_has_its_list_is_told_and_harmless(monkeypatch, caplog, note):
    """Whatever ends it: it was started, and does not read."""
    start = subprocess.Popen

    def start_and_wait(*given: object, **more: object) -> subprocess.Popen:
        process = start(["false"], **more)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_wait)
    monkeypatch.setattr(compile_kernels, "is_cached", lambda kernel, target: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    compiling = start_compiling([{"function": note}] * 5, HOPPER)
    assert compiling.kernels == 5
    compiling.wait()
    assert "2 of 2 processes" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "[", "\xff", None])
def test_an_unusable_list_is_none(tmp_path, text):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    assert read_record(path) == []


def test_a_list_is_written_whole_and_once(tmp_path):
    path = tmp_path / "deep" / "folder" / "a.json"
    kernels = [{"function": f"k{index}"} for index in range(9)]
    write_record(path, random.sample(kernels * 2, 18))
    assert sorted(kernel["function"] for kernel in read_record(path)) == [kernel["function"] for kernel in kernels]
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    (tmp_path / "file").write_text("")
    write_record(tmp_path / "file" / "a.json", kernels)


def test_a_list_belongs_to_a_config_and_options(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": 64}))
    cpu = torch.device("cpu")

    def path(folder="a", **options):
        return record_path(EngineArgs(model=folder, **options), tmp_path / folder, cpu, tmp_path)

    assert path() == path("b", load_format="dummy", dummy_seed=3)
    assert path() != path(kv_cache_quant="int8")
    (tmp_path / "b" / "config.json").write_text(json.dumps({"hidden_size": 65}))
    assert path() != path("b")


@pytest.mark.parametrize(("kind", "hashed"), [("cpu", False), ("cuda", True)])
def test_triton_hashes_itself_beside_what_opens_a_gpu(kind, hashed, monkeypatch):
    from triton.runtime import cache

    began, may_end = threading.Event(), threading.Event()
    ended = []

    def triton_key() -> None:
        began.set()
        assert may_end.wait(10)
        ended.append(threading.current_thread())

    monkeypatch.setattr(cache, "triton_key", triton_key)
    with hashing_triton(torch.device(kind)):
        assert began.wait(10 if hashed else 0.05) == hashed
        may_end.set()
    assert len(ended) == hashed, "it has ended when a kernel's hash is asked for"
    assert threading.main_thread() not in ended


def test_a_triton_that_has_its_hash_elsewhere_is_no_error(monkeypatch):
    from triton.runtime import cache

    monkeypatch.delattr(cache, "triton_key")
    with hashing_triton(torch.device("cuda")):
        pass
