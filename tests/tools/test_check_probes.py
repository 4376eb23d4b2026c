"""The judgement of each probe, on readings made up for the test."""

import json
import resource
import shutil
import struct
import sys
from pathlib import Path

import psutil
import pytest

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_tools.check import gpu, host, limits, versions
from bladellm_tools.check.args import CheckArgs
from bladellm_tools.check.finding import Finding, Status
from bladellm_tools.check.gpu import Gpu
from bladellm_tools.check.limits import CgroupLimits, cgroup_limits

GIB, MIB = 1024**3, 1024**2
PASS, WARNING, FAILED = Status


def statuses(*findings: Finding) -> list[Status]:
    assert all(finding.hint for finding in findings if finding.status is not PASS), "advice is missing"
    return [finding.status for finding in findings]


def test_check_shm() -> None:
    judged = [host.judge_shm(size, ranks) for size, ranks in [(GIB, 1), (GIB, 2), (64 * MIB, 1), (64 * MIB - 1, 1)]]
    assert statuses(*judged) == [PASS, WARNING, WARNING, FAILED]
    assert judged[0].detail == "shared memory size: 1073741824 bytes"
    assert "--shm-size=2g" in judged[1].hint
    assert host.check_shm(CheckArgs(), "/no/such/folder").status is FAILED


@pytest.mark.parametrize(
    ("value", "status"), [(None, PASS), ("", PASS), ("upb", PASS), ("cpp", PASS), ("python", WARNING)]
)
def test_check_pb_env(value: str | None, status: Status, monkeypatch) -> None:
    monkeypatch.delenv(host.PROTOBUF_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(host.PROTOBUF_VARIABLE, value)
    finding = host.check_pb_env(CheckArgs())
    assert finding.status is status
    assert host.PROTOBUF_VARIABLE in finding.detail


def test_check_pb_env_with_a_broken_protobuf(monkeypatch, tmp_path) -> None:
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "protobuf.py").write_text("raise RuntimeError('descriptors cannot be created')")
    monkeypatch.delenv(host.PROTOBUF_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("google", "google.protobuf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    finding = host.check_pb_env(CheckArgs())
    assert finding.status is FAILED
    assert "descriptors cannot be created" in finding.detail


def test_check_ulimit() -> None:
    unlimited = resource.RLIM_INFINITY
    pairs = [(65_536, 65_536), (unlimited, unlimited), (1024, 65_536), (1023, unlimited)]
    assert statuses(*[host.judge_ulimit(*pair) for pair in pairs]) == [PASS, PASS, WARNING, FAILED]


def test_check_disk() -> None:
    assert statuses(*[host.judge_disk(free, "x") for free in (10 * GIB, GIB, GIB - 1)]) == [PASS, WARNING, FAILED]


def test_check_disk_finds_the_cache_or_its_parent(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    assert str(tmp_path / "not" / "yet") in host.check_disk(CheckArgs()).detail


def test_check_memory_and_cgroup() -> None:
    free = [2 * GIB, GIB // 2, GIB // 2 - 1]
    assert statuses(*[limits.judge_memory(8 * GIB, size) for size in free]) == [PASS, WARNING, FAILED]
    unlimited = limits.judge_cgroup(CgroupLimits(), 8, 8 * GIB)
    quota = limits.judge_cgroup(CgroupLimits(cpus=2.5), 8, 8 * GIB)
    memory = limits.judge_cgroup(CgroupLimits(memory=GIB), 8, 8 * GIB)
    generous = limits.judge_cgroup(CgroupLimits(cpus=8.0, memory=9 * GIB), 8, 8 * GIB)
    assert statuses(unlimited, quota, memory, generous) == [PASS, WARNING, WARNING, PASS]
    assert "quota 2.5" in quota.detail
    assert "OMP_NUM_THREADS=2" in quota.hint
    assert "1.00 GiB" in memory.detail


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_cgroup_version_2_takes_the_tightest_of_a_group_and_its_parents(tmp_path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/slice/scope\n")
    write(tmp_path / "fs" / "slice", cpu__max="150000 100000", memory__max=str(4 * GIB), memory__current=str(GIB))
    write(tmp_path / "fs" / "slice" / "scope", cpu__max="max 100000", memory__max="max", memory__current="5")
    assert cgroup_limits(membership, tmp_path / "fs") == CgroupLimits(1.5, 4 * GIB, GIB)


def test_cgroup_version_1(tmp_path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/docker/x\n")
    write(tmp_path / "fs" / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path / "fs" / "cpu,cpuacct" / "docker" / "x", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(tmp_path / "fs" / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="7")
    assert cgroup_limits(membership, tmp_path / "fs") == CgroupLimits(0.5, None, 0)
    write(tmp_path / "fs" / "memory", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes="7")
    assert cgroup_limits(membership, tmp_path / "fs") == CgroupLimits(0.5, GIB, 7)


def test_cgroup_files_that_are_missing_limit_nothing(tmp_path) -> None:
    assert cgroup_limits(tmp_path / "none", tmp_path) == CgroupLimits()
    assert 0 < limits.available_memory() <= psutil.virtual_memory().total


def test_check_versions() -> None:
    requirements = ["torch>=2.11", "typer>=0.20", "uvloop>=0.21; sys_platform != 'win32'", "ruff>=0.12; extra == 'dev'"]
    installed = {"torch": "2.13.0+cpu", "typer": "0.20", "uvloop": "0.21.0"}
    assert versions.judge_versions(requirements, installed).status is PASS
    old = versions.judge_versions(requirements, {**installed, "torch": "2.9.1"})
    missing = versions.judge_versions(requirements, {**installed, "uvloop": None})
    assert statuses(old, missing) == [FAILED, FAILED]
    assert "torch 2.9.1 is older than 2.11" in old.detail
    assert "uvloop is missing" in missing.detail
    assert "ruff" not in missing.detail


H200, OTHER = Gpu(0, "NVIDIA H200", 140 * GIB, 0), Gpu(1, "NVIDIA H200", 140 * GIB, 0)


def test_nvidia_smi_lines() -> None:
    text = "0, NVIDIA H200, 143771, 1\n1, NVIDIA H200 NVL, 143771, 500\n2, broken, [N/A], 3\nNo devices were found\n"
    assert gpu.parse_gpus(text) == [
        Gpu(0, "NVIDIA H200", 143771 * MIB, MIB),
        Gpu(1, "NVIDIA H200 NVL", 143771 * MIB, 500 * MIB),
    ]


@pytest.mark.parametrize(
    ("devices", "seen", "visible", "status"),
    [
        ([H200, OTHER], 2, None, PASS),
        ([H200, OTHER], 1, None, FAILED),
        ([H200, OTHER], 0, None, FAILED),
        ([H200, OTHER], 1, "1", PASS),
        ([H200, OTHER], 0, "", WARNING),
        ([H200, OTHER], 0, "-1", WARNING),
        ([H200, OTHER], 0, "0,1", FAILED),
        ([H200, OTHER], 1, "0,7", FAILED),
        ([], 1, None, PASS),
        ([], 0, None, FAILED),
    ],
)
def test_check_gpu_visible(devices: list[Gpu], seen: int, visible: str | None, status: Status) -> None:
    assert statuses(gpu.judge_visible(devices, seen, visible, "2.13.0")) == [status]


@pytest.mark.parametrize(
    ("driver", "cuda", "capabilities", "built", "status"),
    [
        ((13, 0), "13.0", [(9, 0)], ["sm_80", "sm_90"], PASS),
        ((13, 2), "12.8", [(9, 0)], ["sm_90"], PASS),
        ((12, 8), "13.0", [(9, 0)], ["sm_90"], FAILED),
        ((13, 0), "13.1", [(9, 0)], ["sm_90"], WARNING),
        (None, "13.0", [], [], FAILED),
        ((13, 0), "13.0", [(8, 6)], ["sm_80", "sm_90"], PASS),
        ((13, 0), "13.0", [(8, 0)], ["sm_86", "sm_90"], FAILED),
        ((13, 0), "13.0", [(12, 0)], ["sm_90"], FAILED),
        ((13, 0), "13.0", [(12, 0)], ["sm_90", "compute_90"], PASS),
        ((13, 0), "13.0", [(12, 0)], ["sm_90a", "sm_120a"], PASS),
        ((13, 0), "13.0", [(9, 0), (7, 0)], ["sm_90"], FAILED),
    ],
)
def test_check_driver_cuda(driver, cuda, capabilities, built, status) -> None:
    assert statuses(gpu.judge_driver(driver, cuda, capabilities, built)) == [status]


def test_check_gpu_free_memory() -> None:
    used = [0.005, 0.03, 0.3]
    judged = [gpu.judge_free_memory([H200, Gpu(1, "x", GIB, int(share * GIB))]) for share in used]
    assert statuses(*judged) == [PASS, WARNING, FAILED]
    assert "device 1" in judged[2].detail


def test_check_flops_diff() -> None:
    judged = [gpu.judge_flops(speeds) for speeds in ([8e14], [8e14, 7.9e14], [8e14, 7.2e14], [8e14, 4e14, 8e14])]
    assert statuses(*judged) == [PASS, PASS, WARNING, FAILED]
    assert "ratio between 1 GPUs: 1.00" in judged[0].detail
    assert "2.00 (800, 400, 800 TFLOP/s)" in judged[3].detail


def test_device_nodes(tmp_path) -> None:
    assert not gpu.device_nodes(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not gpu.device_nodes(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert gpu.device_nodes(tmp_path)


def test_check_model_fit() -> None:
    from bladellm_tools.check.model import Demand, judge_fit

    need = Demand(weights=14 * GIB, token_bytes=MIB, max_model_len=4096)
    judged = [judge_fit("x", need, free, "cuda") for free in (24 * GIB, 16 * GIB, 15 * GIB)]
    assert statuses(*judged) == [PASS, WARNING, FAILED]
    rows = dict(judged[0].table)
    assert rows["weights"] == "14.00 GiB"
    assert rows["KV cache, tokens"] == f"{int(24 * GIB * 0.9 - 14 * GIB) // MIB:,}"
    assert f"--max_model_len {int(16 * GIB * 0.9 - 14 * GIB) // MIB}" in judged[1].hint


def test_check_model_demand_counts_every_weight(demo_model) -> None:
    import torch

    from bladellm_runtime.models.config import read_model_spec
    from bladellm_runtime.models.weights import weight_table
    from bladellm_tools.check.model import demand

    spec = read_model_spec(demo_model)
    whole = demand(spec, weight_table(spec), torch.bfloat16, torch.device("cpu"), 1)
    with (demo_model / "model.safetensors").open("rb") as file:
        header = struct.unpack("<Q", file.read(8))[0]
    assert whole.weights == (demo_model / "model.safetensors").stat().st_size - 8 - header
    assert whole.token_bytes == 2 * 4 * 2 * 32 * 2
    parts = [demand(spec, weight_table(spec), torch.bfloat16, torch.device("cpu"), degree) for degree in (2, 4)]
    assert [part.token_bytes for part in parts] == [whole.token_bytes // 2] * 2, "KV heads are replicated beyond two"
    assert parts[1].weights == whole.weights // 4


def test_check_model_on_the_demo_model_and_its_ruins(demo_model, tmp_path) -> None:
    from bladellm_tools.check.model import check_model

    assert check_model(CheckArgs(model=str(demo_model))).status is PASS
    assert check_model(CheckArgs(model=str(tmp_path / "absent"))).status is WARNING
    folder = tmp_path / "model"
    shutil.copytree(demo_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        check_model(CheckArgs(model=str(folder)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        check_model(CheckArgs(model=str(folder)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel"):
        check_model(CheckArgs(model=str(folder)))


def test_check_model_refuses_a_degree_that_the_server_refuses(demo_model, tmp_path, monkeypatch) -> None:
    """The demo model has six query heads; ranks on a CPU share the host's memory."""
    import torch

    from bladellm_tools.check import model
    from bladellm_tools.split.splitting import split_model

    with pytest.raises(ConfigError, match=r"--tensor_parallel_size 7 .* 6 query heads"):
        model.check_model(CheckArgs(model=str(demo_model), tensor_parallel_size=7))
    split_model(demo_model, tmp_path / "ranks", (2, 2))
    assert model.check_model(CheckArgs(model=str(tmp_path / "ranks"), tensor_parallel_size=2)).status is PASS
    with pytest.raises(ConfigError, match="is split for --tensor_parallel_size 2"):
        model.check_model(CheckArgs(model=str(tmp_path / "ranks"), tensor_parallel_size=3))
    monkeypatch.setattr(model, "available_memory", lambda: 12 * GIB)
    assert model.free_memory(torch.device("cpu"), 3) == 4 * GIB


def test_check_model_takes_a_split_model_as_the_one_it_is(demo_model, tmp_path) -> None:
    from bladellm_tools.check.model import check_model
    from bladellm_tools.split.splitting import split_model

    split_model(demo_model, tmp_path / "ranks", (2, 1))
    finding = check_model(CheckArgs(model=str(tmp_path / "ranks"), tensor_parallel_size=2))
    assert finding.status is PASS, finding
    assert (
        dict(finding.table)["weights"]
        == dict(check_model(CheckArgs(model=str(demo_model), tensor_parallel_size=2)).table)["weights"]
    )
