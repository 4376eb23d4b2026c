"""The parts of the commands that measure nothing: levels, turns, rules, secrets, merging."""

import asyncio
import gc
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools import cli
from bladellm_tools.bench import campaign as campaign_module
from bladellm_tools.bench.args import (
    LevelArgs,
    MockArgs,
    OutputArgs,
    RunLevelArgs,
    SelfCheckArgs,
    TargetArgs,
    WorkloadArgs,
)
from bladellm_tools.bench.campaign import Campaign
from bladellm_tools.bench.effects import check_effects
from bladellm_tools.bench.endpoints import Endpoint, Server, parse_endpoint
from bladellm_tools.bench.environment import environment, flags_in_effect, shown_url, without_secrets
from bladellm_tools.bench.eventloop import without_collector
from bladellm_tools.bench.figures import combine
from bladellm_tools.bench.health import busiest_share
from bladellm_tools.bench.loads import CAPACITY_TOLERANCE, auto_loads, is_auto, loads_of, next_rate, split_commas
from bladellm_tools.bench.merging import merged
from bladellm_tools.bench.metrics import summarise
from bladellm_tools.bench.mock import check_mock
from bladellm_tools.bench.plot_curves import spread
from bladellm_tools.bench.records import LevelRun, Load, PlannedRequest
from bladellm_tools.bench.search import passes, why_unknown
from bladellm_tools.bench.selfcheck import checks_of
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.stopping import parse_rules
from bladellm_tools.bench.turns import make_turns
from bladellm_tools.bench.workload import plan_requests
from bladellm_tools.recipe import read_recipe
from tests.bench.simulated import simulated_benchmark, simulated_run
from tests.bench.synthetic import run_of
from tests.tools.command import ROOT

A, B, C = (Endpoint(name, url=f"http://{name}") for name in "abc")
LEVELS = [Load(qps=rate) for rate in (1, 2, 4)]


def test_levels_are_read_with_commas_and_without() -> None:
    assert split_commas(["2,4", "8", " 16 ,"]) == ["2", "4", "8", "16"]
    assert loads_of(LevelArgs(qps=["8", "2,4", "2"])) == [Load(qps=2), Load(qps=4), Load(qps=8)]
    assert loads_of(LevelArgs(arrival="closed", concurrency=["4,1"])) == [Load(concurrency=1), Load(concurrency=4)]
    assert is_auto(LevelArgs(qps=["auto"]))
    assert not is_auto(LevelArgs(qps=["auto"], arrival="closed"))


@pytest.mark.parametrize(
    "level",
    [
        LevelArgs(qps=["0"]), LevelArgs(qps=["nan"]), LevelArgs(qps=["-1"]), LevelArgs(qps=[","]),
        LevelArgs(qps=["1e9"]), LevelArgs(arrival="closed", concurrency=["1.5"]),
        LevelArgs(arrival="closed", concurrency=["0"]), LevelArgs(arrival="closed", concurrency=["auto"]),
    ],
)  # fmt: skip
def test_bad_levels_are_refused(level: LevelArgs) -> None:
    with pytest.raises(ConfigError, match="--concurrency" if level.arrival == "closed" else "--qps"):
        loads_of(level)


@pytest.mark.parametrize(
    ("workload", "level", "flag"),
    [
        ({}, {"burstiness": 2.0}, "--burstiness"),
        ({}, {"concurrency": ["3"]}, "--concurrency"),
        ({}, {"arrival": "closed", "qps": ["3"]}, "--qps"),
        ({"prefix_groups": 2}, {}, "--prefix_groups"),
        ({"dataset": "jsonl", "data": "x", "input_len": 5}, {}, "--input_len"),
        ({"dataset": "trace", "data": "x", "output_len": 5}, {}, "--output_len"),
        ({"data": "x"}, {}, "--data"),
    ],
)
def test_flags_without_effect_are_refused(workload: dict, level: dict, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} has no effect"):
        check_effects(WorkloadArgs(**workload), LevelArgs(**level))
    check_effects(WorkloadArgs(), RunLevelArgs())
    check_effects(WorkloadArgs(dataset="prefix", prefix_len=8), LevelArgs(arrival="gamma", burstiness=0.5))
    check_effects(WorkloadArgs(data="x"), LevelArgs(arrival="trace"))


@given(st.floats(0.01, 1e4), st.floats(0.1, 1e4))
def test_the_search_for_capacity_ends_within_its_tolerance(truth: float, start: float) -> None:
    passed: list[float] = [start] if start <= truth else []
    failed: list[float] = [] if start <= truth else [start]
    for _ in range(40):
        rate = next_rate(passed, failed)
        if rate is None:
            break
        (passed if rate <= truth else failed).append(rate)
    else:
        pytest.fail("the search does not end")
    if passed and failed:
        assert max(passed) <= truth <= min(failed) <= max(passed) * CAPACITY_TOLERANCE * (1 + 1e-9)
    else:
        assert truth < 0.02


def test_a_rate_that_passed_above_a_failure_is_luck() -> None:
    rate = next_rate([1.0, 9.0], [4.0])
    assert rate == pytest.approx(2.0)


@given(st.lists(st.floats(0.5, 500), min_size=1, max_size=3))
def test_automatic_levels_reach_from_far_below_to_beyond_every_knee(rates: list[float]) -> None:
    found = [load.qps for load in auto_loads(rates)]
    assert found == sorted(set(found))
    assert found[0] == pytest.approx(0.1 * min(rates), rel=0.06, abs=0.001)
    assert found[-1] >= 1.8 * max(rates)
    for rate in rates:
        assert sum(0.85 * rate <= qps <= 1.3 * rate for qps in found) >= 3


def test_turns_are_abab_level_by_level_and_fair() -> None:
    turns = make_turns([A, B], LEVELS, 2, "abab", 0)
    assert [turn.endpoint.name for turn in turns] == list("abba" * 3)
    assert [turn.load.qps for turn in turns] == [1] * 4 + [2] * 4 + [4] * 4
    for endpoints in ([A], [A, B], [A, B, C]):
        for order in ("abab", "random"):
            turns = make_turns(endpoints, LEVELS, 3, order, random.randrange(100))
            assert len(set(turns)) == len(turns) == 9 * len(endpoints)


def test_endpoints_that_take_turns_get_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that would be drawn for each, and never that of another level or repeat."""
    workload, level = WorkloadArgs(input_len=7), LevelArgs(num_requests=5, warmup=0)
    asked, made = [], []

    async def run_level(target: SimpleNamespace, plan: list[PlannedRequest], load: Load, *rest: object) -> LevelRun:
        asked.append(plan)
        return run_of([], load=load)

    async def target(endpoint: Endpoint) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=None)

    def drawn(*given: Any) -> list[PlannedRequest]:
        made.append(given)
        return plan_requests(*given)

    monkeypatch.setattr(campaign_module, "run_level", run_level)
    monkeypatch.setattr(campaign_module, "plan_requests", drawn)
    servers = SimpleNamespace(target=target, ended=lambda endpoint: None)
    view = SimpleNamespace(level_begins=lambda *given: None, on_event=None)

    async def measured() -> None:
        campaign = Campaign(workload, level, [], [], servers, view, asyncio.Event())
        for turn in make_turns([A, B], LEVELS, 2, "abab", 0):
            await campaign.measure(turn, level)
            assert asked[-1] == plan_requests(workload, level, turn.load, turn.repeat)

    asyncio.run(measured())
    assert len(asked) == 2 * len(made) == 4 * len(LEVELS)


def test_random_turns_follow_the_seed() -> None:
    draws = {tuple(make_turns([A, B, C], LEVELS, 3, "random", seed)) for seed in range(5)}
    assert len(draws) > 1
    assert make_turns([A, B], LEVELS, 3, "random", 7) == make_turns([A, B], LEVELS, 3, "random", 7)


def test_started_servers_take_turns_in_blocks_with_few_starts() -> None:
    started = [Endpoint(name, command=("x", "{port}")) for name in "ab"]
    turns = make_turns(started, LEVELS, 3, "abab", 0)
    owners = [turn.endpoint.name for turn in turns]
    assert owners == list("aaabbbbbbaaaaaabbb")
    starts = 1 + sum(left != right for left, right in pairwise(owners))
    assert starts == 4
    assert [turn.load for turn in turns[:3]] == LEVELS


def test_rules_of_stop_when() -> None:
    steady, failing = simulated_run("a", 5), simulated_run("a", 5, failing=0.5)
    piling = simulated_run("a", 40)
    oversaturated, errors = parse_rules(["oversaturated", "error_rate=0.05"])
    for run, broken in ((steady, (False, False)), (failing, (False, True)), (piling, (True, False))):
        summary = summarise(run)
        assert (oversaturated.is_broken(summary), errors.is_broken(summary)) == broken
    assert parse_rules(["none"]) == []
    for text in ("error_rate", "error_rate=2", "error_rate=x", "slow"):
        with pytest.raises(ConfigError, match="--stop_when"):
            parse_rules([text])


def test_endpoints() -> None:
    assert parse_endpoint("a=http://h:1/") == Endpoint("a", url="http://h:1")
    assert parse_endpoint("a=cmd:serve 'two words' --port {port}").command == ("serve", "two words", "--port", "{port}")
    for text in (
        "a",
        "=http://h",
        "a b=http://h",
        "a=h:1",
        "a=http://",
        "a=http://h:99999",
        "a=cmd:'x {port}",
        "a=cmd:x",
        "a=http://h/v1?key=1",
        "a=http://h/?",
        "a=http://h/#part",
        "a=http://h/日本",
        "a=http://h/a b",
    ):
        with pytest.raises(ConfigError, match="--endpoint"):
            parse_endpoint(text)


def test_nothing_secret_is_kept() -> None:
    target = TargetArgs(
        endpoint=["a=http://user:hush@h:1/v1?key=hush", "b=cmd:serve --api_key hush --port {port} --token=hush -x"],
        api_key="hush",
        header=["X-Secret: hush"],
        extra_body='{"api_key": "hush"}',
    )
    flags = flags_in_effect([target, OutputArgs(title="t")])
    assert "hush" not in str(flags)
    assert flags["title"] == "t"
    assert shown_url("http://user:hush@h:1/v1") == "http://h:1/v1"
    assert without_secrets("b=cmd:serve --tokenizer t --max_tokens 4") == "b=cmd:serve --tokenizer t --max_tokens 4"


def test_the_environment_says_what_a_reader_needs() -> None:
    found = environment()
    assert {"date", "BladeLLM Open", "Python", "aiohttp", "system", "processor", "memory", "clock"} <= set(found)
    assert "perf_counter" in found["clock"]
    assert str(Path.home()) not in str(found)


def test_merging_tells_endpoints_of_one_name_apart() -> None:
    one, two = simulated_benchmark((2.0,), 1), simulated_benchmark((2.0,), 1)
    two.runs = two.runs[:1]
    both = merged([(Path("x/first"), one), (Path("x/second"), two)])
    assert both.endpoints == ["ours@first", "peer", "ours@second"]
    assert len(both.runs) == 3
    assert merged([(Path("x"), one)]) is one


def test_merging_tells_folders_of_one_name_apart() -> None:
    one = simulated_benchmark((2.0,), 1)
    both = merged([(Path("mon/out"), one), (Path("tue/out"), simulated_benchmark((2.0,), 1))])
    assert both.endpoints == ["ours@mon/out", "peer@mon/out", "ours@tue/out", "peer@tue/out"]
    assert {"mon/out: seed", "tue/out: seed"} <= both.flags.keys()
    with pytest.raises(ConfigError, match=r"--results names .*mon/out twice"):
        merged([(Path("mon/out"), one), (Path("mon/x/../out"), one)])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"freeze_for": 1.0}, "--freeze_every"),
        ({"freeze_every": 1.0}, "--freeze_for"),
        ({"freeze_every": 1.0, "freeze_for": 1.0}, "--freeze_for 1 leaves no time"),
        ({"fault_share": 0.5}, "--fault_share"),
    ],
)
def test_flags_of_the_mock_without_effect_are_refused(flags: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_mock(MockArgs(**flags))
    check_mock(MockArgs(freeze_every=2, freeze_for=1, fault="cut", fault_share=0.5))


def test_a_level_that_the_client_limited_may_pass_and_does_not_fail() -> None:
    slow, fast = parse_slo(["ttft_p50=1us"]), parse_slo(["ttft_p50=60s"])
    run = simulated_run("a", 5)
    assert passes(combine([summarise(run, slow)]), slow) is False
    run.client.limited = True
    level = combine([summarise(run, slow)])
    assert passes(level, slow) is None
    assert "the client was the limit" in why_unknown(level)
    assert passes(level, fast) is True


def test_text_that_no_path_can_hold_is_refused() -> None:
    for fields in ({"data": "a\0b"}, {"lora": ["a", "b\0"]}):
        with pytest.raises(ConfigError, match="NUL"):
            WorkloadArgs(**fields)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.1))
def test_labels_are_pushed_apart_in_order(wanted: list[float], distance: float) -> None:
    placed = spread(wanted, distance)
    ranked = sorted(range(len(wanted)), key=lambda number: wanted[number])
    places = [placed[number] for number in ranked]
    assert all(right - left >= distance * (1 - 1e-9) for left, right in pairwise(places))
    assert sum(placed) == pytest.approx(sum(wanted))


def test_a_server_that_cannot_start_says_why(tmp_path) -> None:
    async def start(*words: str, timeout: float = 30.0) -> None:
        await Server(Endpoint("a", command=(*words, "{port}")), tmp_path, timeout).start()

    with pytest.raises(UserError, match="'no-such-program' cannot be run"):
        asyncio.run(start("no-such-program"))
    with pytest.raises(UserError, match=r"exited with code 3: out of luck .*a\.server\.log"):
        asyncio.run(start(sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"))
    with pytest.raises(UserError, match=r"did not answer within 0\.5 s"):
        asyncio.run(start(sys.executable, "-c", "import time; time.sleep(60)", timeout=0.5))


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("bench_*.yaml")), ids=lambda path: path.name)
def test_the_recipes_of_the_repository_are_valid(recipe: Path) -> None:
    first = recipe.read_text().splitlines()[0].split()
    command = cli.COMMANDS["bench " + first[first.index("blade_llm_bench") + 1]]
    values = read_recipe(str(recipe), command.own_flags)
    effective = command.merge(str(recipe), {})
    assert values
    assert {name: effective[name] for name in values} == values
    assert all(parse_endpoint(text) for text in effective["endpoint"])
    if effective["preset"] == "pai":
        assert (effective["input_len"], effective["output_len"], effective["num_requests"]) == (2000, 300, 300)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_level_leaves_the_collector_as_it_was(frozen: bool) -> None:
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        with without_collector():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()  # as the tests' process had it


@pytest.mark.parametrize("streams", [1, 64, 512])
def test_no_check_of_the_machine_takes_the_place_of_another(streams: int) -> None:
    assert len(checks_of(SelfCheckArgs(streams=streams))) == 6


def test_waiting_for_answers_gives_a_busy_client_no_room() -> None:
    """Four seconds at a whole core, then four of waiting; a start of less than a second says nothing."""
    marks = [(0.02 * tick, min(0.02 * tick, 4.0)) for tick in range(1, 401)]
    assert busiest_share(marks, 8.0) == pytest.approx(0.5)
    assert busiest_share(marks, 4.0) == pytest.approx(1.0)
    assert busiest_share(marks, 0.5) == pytest.approx(0.5)
    assert busiest_share([], 1.0) == 0.0
