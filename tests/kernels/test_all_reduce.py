"""`AllReduce` by the collectives of a group: on CPUs, and what it refuses."""

import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bladellm_kernels import rank_exchange
from bladellm_kernels.all_reduce import AllReduce, all_reduce_reference
from bladellm_kernels.rank_exchange import NoExchangeError, agree, open_exchange, same_everywhere
from bladellm_kernels.rms_norm import rms_norm_reference

from tests.kernels.conditions import DTYPES, assert_close
from tests.kernels.rank_processes import run_forked_ranks

HIDDEN = 70


@pytest.fixture
def alone(tmp_path):
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def be_rank(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meet'}", rank=rank, world_size=ranks)
    for dtype in DTYPES:
        sizes = {"rows": 8, "hidden": HIDDEN, "gather_rows": 8, "gather_columns": 5, "copied_rows": 9}
        group = AllReduce(dist.group.WORLD, dtype=dtype, **sizes)
        assert (group.fast_rows, group.fast_gathered_rows, group.copied_rows, group.bytes) == (0, 0, 0, 0)
        for seed in range(3):
            torch.manual_seed(seed)
            parts = [torch.randn(seed + 1, HIDDEN).to(dtype) for _ in range(ranks)]
            residual, weight = torch.randn(seed + 1, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
            check(group, parts, rank, residual, weight)
        check_no_rows(group, dtype)
    with pytest.raises(NoExchangeError, match="mine" if rank == 0 else "another rank"):
        agree(dist.group.WORLD, None, "mine" if rank == 0 else "")
    assert same_everywhere(dist.group.WORLD, None, 7)
    assert not same_everywhere(dist.group.WORLD, None, rank)
    with (
        mock.patch.object(rank_exchange, "_obstacle", return_value=""),
        mock.patch.object(rank_exchange, "_RENDEZVOUS", ["0"] * rank),
        pytest.raises(NoExchangeError, match="been in another group before"),
    ):
        open_exchange(dist.group.WORLD, 1, 4, 1, torch.device("cpu"))
    dist.destroy_process_group()


def check(group: AllReduce, parts: list[torch.Tensor], rank: int, residual: torch.Tensor, weight: torch.Tensor) -> None:
    dtype, stream = residual.dtype, all_reduce_reference(parts) + residual.float()
    reduced = parts[rank].clone()
    assert group.all_reduce(reduced) is reduced
    assert_close(reduced, all_reduce_reference(parts), dtype)
    normed, total = group.add_norm(parts[rank].clone(), residual.clone(), weight, 1e-5)
    assert_close(total, stream, dtype)
    assert_close(normed, rms_norm_reference(total, weight, 1e-5), dtype)
    total, norm = group.add_delayed_norm(parts[rank].clone(), residual.clone(), weight, 1e-5)
    assert_close(total, stream, dtype)
    assert_close(norm.normed(), rms_norm_reference(total, weight, 1e-5), dtype)
    normed, total = torch.empty_like(residual), residual.clone()
    group.start_sum(parts[rank].clone(), 0).add_norm(total, weight, 1e-5, normed)
    assert_close(total, stream, dtype)
    assert_close(normed, rms_norm_reference(total, weight, 1e-5), dtype)
    assert torch.equal(group.all_gather_last(parts[rank]), torch.cat(parts, 1))
    assert torch.equal(group.all_gather_last(parts[rank][0]), torch.cat([part[0] for part in parts]))


def check_no_rows(group: AllReduce, dtype: torch.dtype) -> None:
    nothing, weight = torch.empty(0, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    assert group.all_reduce(nothing) is nothing
    assert group.add_norm(nothing, nothing, weight, 1e-5)[0].shape == (0, HIDDEN)
    assert group.add_delayed_norm(nothing, nothing, weight, 1e-5)[1].normed().shape == (0, HIDDEN)
    assert group.all_gather_last(nothing).shape == (0, group.size * HIDDEN)


def test_ranks_on_cpus(tmp_path):
    run_forked_ranks("tests.kernels.test_all_reduce", "be_rank", 2, str(tmp_path))


def test_it_says_why_there_is_no_exchange(alone, caplog):
    with caplog.at_level(logging.INFO):
        AllReduce(alone, rows=8, hidden=HIDDEN, dtype=torch.float32)
        AllReduce(alone, rows=8, hidden=7, dtype=torch.bfloat16)
        AllReduce(alone, rows=0, hidden=HIDDEN, dtype=torch.float32, copied_rows=9)
    assert "between CUDA devices only" in caplog.messages[0]
    assert "14 bytes" in caplog.messages[1]
    assert "copies go between two ranks only" in caplog.messages[2]


def test_wrong_arguments(alone):
    group = AllReduce(alone, rows=8, hidden=HIDDEN, dtype=torch.float32)
    y, residual, weight = torch.zeros(3, HIDDEN), torch.zeros(3, HIDDEN), torch.ones(HIDDEN)
    with pytest.raises(ValueError, match="x must be contiguous"):
        group.all_reduce(y.T)
    with pytest.raises(ValueError, match="residual must be"):
        group.add_norm(y, residual[:2], weight, 1e-5)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        group.add_norm(y, torch.zeros(HIDDEN, 3).T, weight, 1e-5)
    with pytest.raises(ValueError, match="weight must be"):
        group.add_delayed_norm(y, residual, weight.bfloat16(), 1e-5)
