"""Ranks on GPUs that are killed or halted under load, in captured steps and others: the same end as on CPUs."""

import psutil
import pytest
import torch

from tests.faults import test_ranks
from tests.faults.test_ranks import assert_ends_by, rank_processes
from tests.support.live import LiveServer

pytestmark = [
    pytest.mark.gpu(count=2),
    pytest.mark.timeout(240),
]
processes = test_ranks.processes
WAYS = {
    "sums": {"tensor_parallel_size": 2},
    "collectives": {"tensor_parallel_size": 2, "disable_cuda_graph": True, "dtype": "float16"},
    "stages": {"pipeline_parallel_size": 2},
}
FLAGS = {"device": "cuda", "kv_cache_gib": 0.5}


@pytest.mark.whole_gpu
@pytest.mark.parametrize("deed", ["killed rank", "halted rank"])
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_rank_ends_everything_and_frees_the_gpus(way, deed, processes):
    before = [used_bytes(index) for index in range(2)]
    with LiveServer("real", **FLAGS, **WAYS[way]) as server:
        ranks = rank_processes(server)
        assert len(ranks) == 1
        processes += [psutil.Process(server.engine_pid), *ranks]
        assert_ends_by(deed, server, ranks)
    psutil.wait_procs(processes, timeout=5.0)
    for index in range(2):
        kept = used_bytes(index) - before[index]
        assert kept < 1 << 30, f"GPU {index} still holds {kept >> 20} MiB"


def used_bytes(index: int) -> int:
    """Of a GPU's memory, by all processes."""
    free, total = torch.cuda.mem_get_info(index)
    return total - free
