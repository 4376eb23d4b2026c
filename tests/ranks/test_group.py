"""What rank 0 says of a rank on another host that joins it: both must have one model and one set of flags."""

import secrets
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.models.parallel import make_plan, plan_digest
from bladellm_runtime.ranks import pulse
from bladellm_runtime.ranks.channel import PlanReceiver
from bladellm_runtime.ranks.group import Home, Ranks
from bladellm_runtime.ranks.launch import flags_of, read_secret
from bladellm_runtime.ranks.messages import Hello
from bladellm_runtime.ranks.pulse import Pulses
from bladellm_tools.split.splitting import split_model
from tests.distributed.models import Random
from tests.models.quantized import edit_config

WAIT_S = 5.0


@pytest.fixture
def args(tmp_path: Path) -> EngineArgs:
    (tmp_path / "token").write_text(secrets.token_hex(32))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return EngineArgs(
        model="here", tensor_parallel_size=2, nnodes=2, dist_init_addr=f"127.0.0.1:{port}",
        dist_token_file=str(tmp_path / "token"),
    )  # fmt: skip


@pytest.fixture
def ranks(args: EngineArgs, tmp_path: Path) -> Iterator[Ranks]:
    (tmp_path / "home").mkdir()
    ranks = Ranks(args, Home(tmp_path / "home", pytest.fail), "digest")
    yield ranks
    ranks.close()
    assert not list((tmp_path / "home").iterdir())


@contextmanager
def joined(ranks: Ranks, args: EngineArgs, model: str, rank: int = 1) -> Iterator[None]:
    """While a rank is there with these flags and this model."""
    port = PlanReceiver(ranks.meeting.plans, rank, read_secret(args))
    port.send(Hello(rank, flags_of(args), model))
    try:
        yield
    finally:
        port.close()


def test_a_rank_with_another_model_is_refused(ranks, args):
    with joined(ranks, args, "other"):
        assert ranks.verdict(WAIT_S) == (
            "the engine stopped: rank 1 has another --model than rank 0, or one that was split in another way; give "
            "the hosts the same model"
        )


def test_a_rank_with_other_flags_is_refused(ranks, args):
    with joined(ranks, replace(args, max_running_requests=8), "digest"):
        assert ranks.verdict(WAIT_S) == (
            "the engine stopped: rank 1 was started with --max_running_requests 8 and rank 0 without "
            "--max_running_requests; give the hosts the same flags"
        )


def test_a_rank_with_another_value_of_a_flag_is_refused(ranks, args):
    with joined(ranks, replace(args, dtype="float32"), "digest"):
        assert ranks.verdict(WAIT_S) == (
            "the engine stopped: rank 1 was started with --dtype float32 and rank 0 with --dtype auto; give the hosts "
            "the same flags"
        )


def test_a_rank_that_there_is_not_hears_of_the_end(ranks, args, monkeypatch):
    """Of a host with another --tensor_parallel_size, which would wait for minutes."""
    ended = threading.Event()
    monkeypatch.setattr(pulse, "end_rank", lambda reason: ended.set())
    pulses = Pulses(ranks.meeting.plans, 3, read_secret(args))
    pulses.start()
    with joined(ranks, replace(args, tensor_parallel_size=4), "digest", rank=3):
        assert "rank 3 was started with --tensor_parallel_size 4" in (ranks.verdict(WAIT_S) or "")
        assert ended.wait(WAIT_S)
    pulses.close()


def test_the_model_may_be_elsewhere(ranks, args):
    with joined(ranks, replace(args, model="there", cpu_threads=3), "digest"):
        ranks.wait_for_all()
        assert ranks.verdict() is None
        ranks.close()  # of a rank that has left, it would wait for the answer


@pytest.mark.parametrize(("name", "value"), [("rope_theta", 500.0), ("intermediate_size", 60)])
def test_the_digest_is_of_the_model_and_its_plan(tmp_path, name, value):
    Random(tmp_path / "model", heads=6, kv_heads=2)
    split_model(tmp_path / "model", tmp_path / "split", (2, 1))
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    edit_config(tmp_path / "other", **{name: value})

    def digest(folder: str, *degrees: int) -> str:
        return plan_digest(tmp_path / folder, make_plan(tmp_path / folder, *degrees))

    assert digest("model", 2) == digest("split", 2)
    assert len({digest("model", 2), digest("model", 3), digest("model", 1, 2), digest("other", 2)}) == 4
