"""Pipeline stages that die or hang behind the real server: the watchdog ends all of them as it does other ranks."""

import psutil
import pytest

from tests.engine import reference
from tests.faults.test_engine import ask, expected
from tests.faults.test_ranks import DEEDS, FLAGS, assert_ends_by, processes, rank_processes
from tests.support.live import LiveServer

__all__ = ["processes"]
STAGES = {**FLAGS, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("deed", DEEDS)
def test_a_lost_stage_ends_everything_and_every_stream_is_told(deed, demo_model, processes):
    with LiveServer("real", **STAGES) as server:
        ranks = rank_processes(server)
        processes += [psutil.Process(server.engine_pid), *ranks]
        prompt = reference.PROMPTS[1]
        assert ask(server, prompt)[1]["choices"][0]["text"] == expected(demo_model, prompt)
        assert_ends_by(deed, server, ranks)
