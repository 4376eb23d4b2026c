"""Which batch sizes are captured, what the engine says about it, and what it does when it cannot."""

import logging
from itertools import pairwise

import pytest

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.step_graphs import graph_sizes
from bladellm_runtime.errors import ConfigError
from tests.engine import reference
from tests.engine.captured import Again, captured_llm
from tests.engine.test_equality import assert_equal, greedy_params


def sizes(**options) -> list[int]:
    return graph_sizes(EngineArgs(model="m", **options))


def test_default_sizes_end_at_the_slots():
    assert sizes() == [1, 2, 4, *range(8, 257, 8)]
    assert sizes(max_running_requests=20) == [1, 2, 4, 8, 16, 20]
    assert sizes(max_running_requests=1) == [1]
    assert sizes(max_running_requests=1000)[-1] == 256


def test_the_maximum_is_captured_itself():
    assert sizes(cuda_graph_max_batch_size=50) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    assert sizes(cuda_graph_max_batch_size=3) == [1, 2, 3]
    assert sizes(cuda_graph_max_batch_size=300, max_running_requests=500)[-3:] == [256, 288, 300]


def test_large_steps_are_padded_by_an_eighth_at_most():
    large = sizes(cuda_graph_max_batch_size=1024, max_running_requests=1024)
    assert large[-1] == 1024
    assert all(size <= 1.125 * below + 1 for below, size in pairwise(large) if below >= 64)


def test_given_sizes_win_over_the_maximum():
    assert sizes(cuda_graph_batch_sizes=[3, 5], cuda_graph_max_batch_size=4) == [3, 5]
    assert sizes(cuda_graph_batch_sizes=[3, 50, 60], max_running_requests=20) == [3, 20]


def test_disabled_is_disabled():
    assert sizes(disable_cuda_graph=True, cuda_graph_batch_sizes=[3]) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cuda_graph_batch_sizes": [4, 2]}, "--cuda_graph_batch_sizes must be ascending, each size once; got 4 2"),
        ({"cuda_graph_batch_sizes": [2, 2]}, "--cuda_graph_batch_sizes must be ascending"),
        ({"cuda_graph_batch_sizes": [0, 2]}, "--cuda_graph_batch_sizes must be between 1 and 4096, got 0"),
        ({"cuda_graph_batch_sizes": ["2"]}, "--cuda_graph_batch_sizes must be a list of whole numbers"),
        ({"cuda_graph_batch_sizes": [True]}, "--cuda_graph_batch_sizes must be a list of whole numbers"),
        ({"cuda_graph_max_batch_size": 0}, "--cuda_graph_max_batch_size must be between 1 and 4096, got 0"),
    ],
)
def test_wrong_sizes_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs(model="m", **options)


def test_sizes_are_captured_from_large_to_small_before_the_engine_is_ready(demo_model, caplog):
    options = {"cuda_graph_batch_sizes": [1, 2, 7], "cuda_graph_max_batch_size": 9, "kv_cache_gib": 0.05}
    with caplog.at_level(logging.INFO), captured_llm(str(demo_model), Again(), device="cpu", **options):
        said = [record.message for record in caplog.records if "graph" in record.message]
    assert said == [
        "--cuda_graph_max_batch_size is ignored beside --cuda_graph_batch_sizes",
        *(f"caching graph of graph_batch_size={size}" for size in (7, 2, 1)),
    ]


@pytest.mark.parametrize("asked", [{"cuda_graph_max_batch_size": 9}, {"cuda_graph_prefill_tokens": [64]}])
def test_on_a_cpu_sizes_are_answered_with_a_warning(demo_model, caplog, asked):
    options = {"device": "cpu", "kv_cache_gib": 0.05, **asked}
    with caplog.at_level(logging.WARNING), captured_llm(str(demo_model), None, **options):
        assert "no CUDA graphs: they need a CUDA device" in caplog.text


def test_what_cannot_be_captured_is_named_and_runs_eagerly(demo_model, caplog, monkeypatch):
    class Refuse(Again):
        def __call__(self, work):
            with monkeypatch.context() as patch:
                patch.setattr("bladellm_kernels.rotary_kv_write.rotary", boom)
                return super().__call__(work)

    def boom(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1}
    with caplog.at_level(logging.WARNING), captured_llm(str(demo_model), Refuse(), **options) as llm:
        outputs = llm.generate([reference.PROMPTS[0]], greedy_params())
    assert_equal(demo_model, [reference.PROMPTS[0]], [outputs[0].outputs[0].token_ids])
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "rotary_kv_write._turned cannot be captured (operation not permitted" in warnings[0]
