"""Plans: when requests leave, and what they ask."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.args import LevelArgs, WorkloadArgs
from bladellm_tools.bench.prompts import SALT_WORDS
from bladellm_tools.bench.records import Load, PlannedRequest
from bladellm_tools.bench.workload import own_qps, plan_requests

MANY = LevelArgs(num_requests=20_000, warmup=0)
SHORT = WorkloadArgs(input_len=1, output_len=1)


def times(level: LevelArgs, qps: float, workload: WorkloadArgs = SHORT, repeat: int = 0) -> np.ndarray:
    plan = plan_requests(workload, level, Load(qps=qps), repeat)
    return np.array([planned.send_at for planned in plan], dtype=float)


@pytest.mark.parametrize(
    ("arrival", "burstiness", "variation"), [("poisson", 1, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4, 0.5)]
)
def test_arrivals_have_the_rate_and_the_spread_asked_for(arrival: str, burstiness: float, variation: float) -> None:
    level = LevelArgs(arrival=arrival, burstiness=burstiness, num_requests=20_000, warmup=0)
    gaps = np.diff(times(level, 50.0))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.06)
    assert (gaps >= 0).all()


def test_gamma_of_shape_one_is_distributed_as_poisson_gaps() -> None:
    gaps = np.diff(times(MANY, 10.0))
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(gaps, share) == pytest.approx(-np.log(1 - share) / 10, rel=0.06)


def test_constant_arrivals_are_even_and_bursts_are_one_instant() -> None:
    assert times(LevelArgs(arrival="constant", num_requests=5, warmup=0), 4) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    burst = times(LevelArgs(arrival="burst", num_requests=5, warmup=1), 4)
    assert list(burst) == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_the_warm_up_comes_first_and_the_level_has_its_duration_and_its_least_requests() -> None:
    level = LevelArgs(duration=20, warmup=5, min_requests=1)
    drawn = times(level, 10)
    assert ((drawn < 5).sum(), (drawn >= 5).sum()) == (pytest.approx(50, abs=30), pytest.approx(200, abs=60))
    assert drawn.max() < 25
    extended = times(LevelArgs(duration=20, warmup=5, min_requests=400), 10)
    assert (extended >= 5).sum() == 400
    exact = times(LevelArgs(duration=20, warmup=5, num_requests=7), 10)
    assert (exact >= 5).sum() == 7


def test_a_plan_follows_from_seed_level_and_repeat_alone() -> None:
    level, workload = LevelArgs(duration=5, warmup=0, min_requests=20), WorkloadArgs(input_len=30, output_len=5)

    def plan(repeat: int = 0, qps: float = 4, seed: int = 0) -> list[PlannedRequest]:
        return plan_requests(WorkloadArgs(input_len=30, output_len=5, seed=seed), level, Load(qps=qps), repeat)

    assert plan() == plan() == plan_requests(workload, level, Load(qps=4), 0)
    others = [plan(repeat=1), plan(qps=5), plan(seed=1)]
    for other in others:
        assert [p.send_at for p in other] != [p.send_at for p in plan()]
        assert not {p.prompt for p in other} & {p.prompt for p in plan()}


def test_every_prompt_begins_differently_unless_prompts_may_repeat() -> None:
    level = LevelArgs(num_requests=300, warmup=0)

    def beginnings(unique: bool) -> list[str]:
        workload = WorkloadArgs(input_len=20, output_len=1, unique_prefix=unique)
        plans = [plan_requests(workload, level, Load(qps=qps), repeat) for qps in (1, 2) for repeat in (0, 1)]
        return [" ".join(planned.prompt.split()[:SALT_WORDS]) for plan in plans for planned in plan]

    assert len(set(beginnings(True))) == 4 * 300
    assert len(set(beginnings(False))) == 300


@pytest.mark.parametrize("distribution", ["fixed", "uniform", "lognormal"])
def test_lengths_have_the_mean_asked_for(distribution: str) -> None:
    workload = WorkloadArgs(input_len=40, output_len=100, len_dist=distribution)
    plan = plan_requests(workload, LevelArgs(num_requests=3000, warmup=0), Load(qps=1), 0)
    outputs = np.array([planned.output_len for planned in plan])
    assert outputs.mean() == pytest.approx(100, rel=0.05)
    assert np.mean([planned.input_len for planned in plan]) == pytest.approx(40, rel=0.05)
    assert all(len(planned.prompt.split()) == planned.input_len for planned in plan)
    spread = {"fixed": 0, "uniform": 100 / np.sqrt(12), "lognormal": 100 * np.sqrt(np.exp(0.25) - 1)}[distribution]
    assert outputs.std() == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("dataset", ["synthetic", "prefix"])
def test_a_tokenizer_makes_lengths_exact(dataset: str, demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    workload = WorkloadArgs(
        dataset=dataset, input_len=150, output_len=1, len_dist="uniform" if dataset == "synthetic" else "fixed",
        prefix_len=60, prefix_groups=3,
    )  # fmt: skip
    plan = plan_requests(workload, LevelArgs(num_requests=150, warmup=0), Load(qps=1), 0, str(demo_model))
    assert all(abs(len(tokenizer.encode(planned.prompt).ids) - planned.input_len) <= 1 for planned in plan)


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    workload = WorkloadArgs(dataset="prefix", input_len=60, output_len=1, prefix_len=40, prefix_groups=4)
    level = LevelArgs(num_requests=100, warmup=0)
    plan = plan_requests(workload, level, Load(qps=1), 0)
    prefixes = {" ".join(planned.prompt.split()[:40]) for planned in plan}
    assert len(prefixes) == 4
    assert len({planned.prompt for planned in plan}) == 100
    again = plan_requests(workload, level, Load(qps=1), 1)
    assert not prefixes & {" ".join(planned.prompt.split()[:40]) for planned in again}


def test_adapters_are_asked_for_in_turn() -> None:
    workload = WorkloadArgs(input_len=1, output_len=1, lora=["a", "b"])
    plan = plan_requests(workload, LevelArgs(num_requests=4, warmup=0), Load(qps=1), 0)
    assert [planned.lora for planned in plan] == ["a", "b", "a", "b"]


def written(folder: Path, rows: list[object]) -> str:
    path = folder / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_a_trace_keeps_its_shape_and_takes_the_rate_of_the_level(tmp_path: Path) -> None:
    rows = [{"t": t, "in": size, "out": 2 * size} for t, size in ((10, 3), (14, 5), (11, 4))]
    workload = WorkloadArgs(dataset="trace", data=written(tmp_path, rows))
    assert own_qps(workload) == pytest.approx(0.5)
    level = LevelArgs(arrival="trace", num_requests=3, warmup=0)
    plan = plan_requests(workload, level, Load(qps=1), 0)
    assert [planned.send_at for planned in plan] == pytest.approx([0, 0.5, 2])
    assert [(planned.input_len, planned.output_len) for planned in plan] == [(3, 6), (4, 8), (5, 10)]
    assert [len(planned.prompt.split()) for planned in plan] == [3, 4, 5]


def test_equal_hash_ids_of_a_trace_give_equal_text(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * t, "input_length": 1100, "output_length": 4, "hash_ids": ids}
        for t, ids in enumerate(([1, 2, 9], [1, 3, 8], [1, 2, 7]))
    ]
    workload = WorkloadArgs(dataset="trace", data=written(tmp_path, rows))
    level = LevelArgs(arrival="trace", num_requests=3, warmup=0)
    words = [planned.prompt.split() for planned in plan_requests(workload, level, Load(qps=1), 0)]
    assert all(len(prompt) == 1100 for prompt in words)
    assert words[0][:1024] == words[2][:1024] != words[1][:1024]
    assert words[0][:512] == words[1][:512]
    assert words[0][1024:] != words[2][1024:]


def test_a_tokenizer_makes_prompts_of_hash_ids_exact(tmp_path: Path, demo_model: Path) -> None:
    """Of shared blocks alone too, and with a few tokens behind them."""
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids = np.random.default_rng().integers(4, size=(20, 6)).tolist()
    sizes = [512 * 6, *np.random.default_rng().integers(512 * 4, 512 * 6 + 40, size=19).tolist()]
    rows = [{"t": t, "in": size, "out": 1, "hash_ids": ids[t]} for t, size in enumerate(sizes)]
    workload = WorkloadArgs(dataset="trace", data=written(tmp_path, rows))
    level = LevelArgs(arrival="trace", num_requests=20, warmup=0)
    plan = plan_requests(workload, level, Load(qps=1), 0, str(demo_model))
    assert [planned.input_len for planned in plan] == sizes
    assert all(abs(len(tokenizer.encode(planned.prompt).ids) - planned.input_len) <= 1 for planned in plan)
    words = [planned.prompt.split() for planned in plan]
    same = [(one, other) for one in range(20) for other in range(one) if ids[one][:2] == ids[other][:2]]
    assert all(words[one][:900] == words[other][:900] for one, other in same)


def test_prompts_of_a_file_are_used_whole_and_again(tmp_path: Path) -> None:
    rows = [{"prompt": "Alpha one"}, {"prompt": "Beta two", "output_len": 9}]
    path = written(tmp_path, rows)
    level = LevelArgs(num_requests=6, warmup=0)
    plain = plan_requests(WorkloadArgs(dataset="jsonl", data=path, unique_prefix=False), level, Load(qps=1), 0)
    assert sorted({(planned.prompt, planned.output_len) for planned in plain}) == [("Alpha one", 256), ("Beta two", 9)]
    salted = plan_requests(WorkloadArgs(dataset="jsonl", data=path), level, Load(qps=1), 0)
    assert len({planned.prompt for planned in salted}) == 6
    assert all(planned.prompt.endswith(("Alpha one", "Beta two")) for planned in salted)


@pytest.mark.parametrize(
    ("fields", "rows", "words"),
    [
        ({"dataset": "jsonl"}, None, "--data FILE"),
        ({"dataset": "jsonl"}, ["{"], "line 1 is not JSON"),
        ({"dataset": "jsonl"}, [{"prompt": "a"}, {"prompt": 3}], 'line 2 needs "prompt"'),
        ({"dataset": "jsonl"}, [], "is empty"),
        ({"dataset": "trace"}, [{"t": -1, "in": 1, "out": 1}], 'needs "t"'),
        ({"dataset": "trace"}, [{"t": 0, "in": 0, "out": 1}], 'needs "in"'),
        ({"dataset": "prefix", "input_len": 10, "prefix_len": 10}, None, "--prefix_len 10"),
    ],
)
def test_files_and_lengths_amiss_are_told_in_a_sentence(
    fields: dict[str, object], rows: list[object] | None, words: str, tmp_path: Path
) -> None:
    data = written(tmp_path, rows) if rows is not None else None
    with pytest.raises(ConfigError) as caught:
        plan_requests(WorkloadArgs(data=data, **fields), LevelArgs(), Load(qps=1), 0)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_within_the_warm_up_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path, [{"t": t, "in": 1, "out": 1} for t in range(3)])
    with pytest.raises(ConfigError, match="--warmup"):
        plan_requests(WorkloadArgs(dataset="trace", data=data), LevelArgs(arrival="trace"), Load(qps=1), 0)


@pytest.mark.parametrize(
    ("workload", "level", "qps"),
    [
        ({}, {"num_requests": 10**7}, 4.0),
        ({"input_len": 10**7}, {}, 4.0),
        ({"input_len": 1}, {"duration": 86400.0}, 1e6),
    ],
)
def test_a_plan_larger_than_memory_is_refused(workload: dict, level: dict, qps: float) -> None:
    with pytest.raises(ConfigError, match=r"GiB to plan; lower --input_len, --num_requests"):
        plan_requests(WorkloadArgs(**workload), LevelArgs(**level), Load(qps=qps), 0)


def test_prompts_of_files_and_prefixes_larger_than_memory_are_refused(tmp_path: Path) -> None:
    trace = written(tmp_path, [{"t": t, "in": 10**7, "out": 1} for t in range(200)])
    level = LevelArgs(num_requests=150, warmup=0)
    with pytest.raises(ConfigError, match=r"GiB to plan; lower --num_requests"):
        plan_requests(WorkloadArgs(dataset="trace", data=trace), level, Load(qps=1), 0)
    prompts = written(tmp_path, [{"prompt": "a" * 10**6}])
    with pytest.raises(ConfigError, match=r"GiB to plan; lower --num_requests"):
        plan_requests(
            WorkloadArgs(dataset="jsonl", data=prompts), LevelArgs(num_requests=10**4, warmup=0), Load(qps=1), 0
        )
    groups = WorkloadArgs(dataset="prefix", prefix_groups=10**6, prefix_len=1000)
    for load, one in ((Load(qps=1), level), (Load(concurrency=1), LevelArgs(arrival="closed"))):
        with pytest.raises(ConfigError, match="lower --prefix_groups or --prefix_len"):
            plan_requests(groups, one, load, 0)


def test_a_closed_loop_of_a_number_of_requests_plans_no_more_than_may_be_under_way_beside_them() -> None:
    level = LevelArgs(arrival="closed", num_requests=50, warmup=0)
    assert len(plan_requests(WorkloadArgs(), level, Load(concurrency=8), 0)) == 50 + 8
