"""A mock server in a process of its own, so that its timing and the client's do not disturb each other."""

import json
import subprocess
import sys
import urllib.request
from dataclasses import asdict
from types import TracebackType
from typing import Self

from bladellm_runtime.errors import UserError
from bladellm_tools.bench.args import MockArgs

STOP_SECONDS = 5.0


class MockProcess:
    """Starts a mock on a free port for a `with` block; `url` is where it answers."""

    def __init__(self, settings: MockArgs) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str]
        self.url = ""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bladellm_tools.bench.mock", json.dumps(asdict(self._settings))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self._process.stdout.readline().strip() if self._process.stdout is not None else ""
        if not self.url:
            self._process.wait()
            raise UserError("the mock server did not start; run blade_llm_bench mock to see why")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def lateness(self) -> dict[str, float]:
        """How late the mock itself was since the last question: late_p50, late_p99, late_max in seconds."""
        with urllib.request.urlopen(self.url + "/stats", timeout=10) as answer:
            return {name: float(value) for name, value in json.load(answer).items()}
