"""`AllReduce` between GPUs: the same bits on all ranks, in graphs, whichever rank is late, and a rank that is gone."""

import random

import pytest
import torch

from tests.kernels.rank_processes import run_ranks

pytestmark = [
    pytest.mark.gpu(count=2),
    pytest.mark.timeout(600),
]
MODULE = "tests.gpu.all_reduce_ranks"
ALL_RANKS = [ranks for ranks in (2, 4, 8) if ranks <= torch.cuda.device_count()]


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("function", ["check_sums", "check_copies", "check_gathers", "check_graphs"])
def test_ranks(function, ranks, tmp_path):
    run_ranks(MODULE, function, ranks, str(tmp_path / "meet"), random.randrange(2**30), seconds=300)


def test_a_rank_that_is_gone_ends_the_kernel_of_the_others(tmp_path):
    run_ranks(MODULE, "check_absence", 2, str(tmp_path / "meet"), seconds=120)
