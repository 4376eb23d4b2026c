"""An engine on a CPU whose decode steps take the way of captured graphs: work on static arrays, done again for real."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from bladellm_runtime import LLM
from bladellm_runtime.engine.build import build_engine
from bladellm_runtime.engine.cuda_capture import Work


class Again:
    """Captures work by doing it, and replays it by doing it again, after `before`. `replays` counts."""

    def __init__(self) -> None:
        self.replays = 0
        self.before: Callable[[], None] = lambda: None

    def __call__(self, work: Work) -> Work:
        work()

        def again() -> None:
            self.replays += 1
            with torch.inference_mode():
                self.before()
                work()

        return again


def captured_llm(model: str, capture: Again | None, **options) -> LLM:
    """`LLM` with that way to capture; steps with prefill chunks only where options say so."""
    options = {"cuda_graph_prefill_tokens": [0]} | options
    with mock.patch("bladellm_runtime.llm.build_engine", partial(build_engine, capture=capture)):
        return LLM(model, **options)
