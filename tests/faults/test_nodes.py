"""Ranks on two hosts, here both this one: the second runs its ranks alone, and ends with the first."""

import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.engine import reference
from tests.faults.test_engine import ask, expected
from tests.faults.test_ranks import ENDLESS, FLAGS, SECONDS, assert_ended
from tests.models.quantized import edit_config
from tests.support.live import ROOT, LiveServer, OpenStream

pytestmark = pytest.mark.slow


def free_ports() -> int:
    """A port that is free, and so is the one behind it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "token").write_text(secrets.token_hex(32) + "\n")
    address = f"127.0.0.1:{free_ports()}"
    return FLAGS | {"nnodes": 2, "dist_init_addr": address, "dist_token_file": str(tmp_path / "token")}


def second_host(demo_model: Path, flags: dict[str, object]) -> "subprocess.Popen[str]":
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "bladellm_tools.cli", "serve", "--model", str(demo_model), "--node_rank", "1"]
    return subprocess.Popen([*command, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def node(demo_model: Path, hosts: dict[str, object]) -> Iterator["subprocess.Popen[str]"]:
    process = second_host(demo_model, hosts)
    yield process
    ranks = psutil.Process(process.pid).children() if process.poll() is None else []
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(ranks, timeout=SECONDS)
    assert not left


def listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses that they listen on."""
    found = [one for process in processes for one in process.net_connections("tcp")]
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


def test_two_hosts_answer_as_one_and_end_in_order(demo_model, hosts, node):
    with LiveServer("real", **hosts) as server:
        for prompt in reference.PROMPTS[:2]:
            status, answer = ask(server, prompt)
            assert status == 200, answer
            assert answer["choices"][0]["text"] == expected(demo_model, prompt)
        ranks = psutil.Process(node.pid).children()
        assert len(ranks) == 1
        assert listening([psutil.Process(server.engine_pid), psutil.Process(node.pid), *ranks]) == {"127.0.0.1"}
        assert server.stop() == 0
    assert node.wait(SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_on_the_other_host_ends_both(number, hosts, node):
    with LiveServer("real", **hosts) as server:
        stream = OpenStream(server, ENDLESS)
        stream.read(2)
        started = time.monotonic()
        (rank,) = psutil.Process(node.pid).children()
        rank.send_signal(number)
        assert_ended(server, [stream], started)
        assert ("rank 1 is gone" if number == signal.SIGKILL else "rank 1 has not answered") in server.log()
        assert "Traceback" not in server.log()
    assert node.wait(SECONDS) == 1
    assert not rank.is_running()


def test_a_killed_engine_or_a_killed_host_leaves_nothing_behind(hosts, node):
    with LiveServer("real", **hosts) as server:
        (rank,) = psutil.Process(node.pid).children()
        psutil.Process(server.engine_pid).kill()
        assert node.wait(SECONDS) == 1
        assert not rank.is_running()
        assert node.stderr is not None
        assert "the ranks of this host ended with their group" in node.stderr.read()


def test_a_host_with_another_token_is_not_let_in(demo_model, hosts, tmp_path):
    (tmp_path / "other").write_text(secrets.token_hex(32))
    stranger = second_host(demo_model, hosts | {"dist_token_file": str(tmp_path / "other")})
    try:
        with pytest.raises(AssertionError, match="did not start"), short_start(hosts):
            pass
    finally:
        stranger.terminate()
        assert stranger.wait(SECONDS) == 130


def test_a_host_with_another_model_is_refused(demo_model, hosts, tmp_path):
    """Of the same shape, so that nothing but the answers would tell."""
    shutil.copytree(demo_model, tmp_path / "other")
    edit_config(tmp_path / "other", rope_theta=500.0)
    other = second_host(tmp_path / "other", hosts)
    with pytest.raises(AssertionError, match="rank 1 has another --model than rank 0"), LiveServer("real", **hosts):
        pass
    assert other.wait(SECONDS) == 1


def short_start(hosts: dict[str, object]) -> LiveServer:
    """A server that gives up when no rank has come within some seconds."""
    return LiveServer("real", wrapper=["timeout", "-s", "INT", "12"], **hosts)
