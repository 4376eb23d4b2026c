"""What a benchmark writes down. All times are `time.perf_counter()` seconds relative to the start of their level.

One `RequestRecord` a request is everything later steps know; every metric is computed from these, never during a run.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended, as the client saw it."""

    OK = "ok"
    HTTP_ERROR = "http_error"
    STREAM_ERROR = "stream_error"
    CUT = "cut"
    GARBAGE = "garbage"
    TIMEOUT = "timeout"
    CONNECT = "connect"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a schedule, drawn before the level starts and equal for all endpoints.

    `send_at` is the intended time; None in a closed loop, where a request follows an answer. `output_len` is what is
    asked for as max_tokens. `lora` replaces the model name; `turn` and `session` order multi-turn requests.
    """

    index: int
    send_at: float | None
    prompt: str
    input_len: int
    output_len: int
    lora: str | None = None
    session: int | None = None
    turn: int = 0


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request.

    `intended` is the time it should have left (in a closed loop, when its stream became free), `sent` when it did,
    `headers` when the status line came, `first_chunk` the first event of any kind. `times` are the arrival times of the
    chunks with text, reasoning or a tool delta; `tokens` how many tokens each held (all ones only if the server says
    so; spread from the usage otherwise). `ended` is the end of the body. Counts are the server's own from `usage`, or
    the local tokenizer's (`counted_by`: "usage", "tokenizer" or "chunks").
    """

    index: int
    intended: float
    sent: float | None = None
    headers: float | None = None
    first_chunk: float | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: float | None = None
    outcome: Outcome = Outcome.CANCELLED
    status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    asked_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    counted_by: str = "usage"


@dataclass(frozen=True, slots=True)
class Load:
    """One level: an open-loop rate in requests a second, or a closed loop's concurrency; exactly one is set."""

    qps: float | None = None
    concurrency: int | None = None

    @property
    def label(self) -> str:
        """How tables and files name the level."""
        return f"{self.qps:g} QPS" if self.qps is not None else f"{self.concurrency} streams"


@dataclass(slots=True)
class ClientHealth:
    """Whether the client kept up: its processor share, event-loop lag and lateness against the schedule, in seconds.

    `chunk_cost` is processor seconds a chunk; `headroom` how many times more chunks a second it could have taken.
    `limited` marks a level whose figures are the client's, not the server's: it is never averaged in.
    """

    cpu_share: float = 0.0
    loop_lag_p99: float = 0.0
    schedule_lag_p50: float = 0.0
    schedule_lag_p99: float = 0.0
    late_share: float = 0.0
    chunk_cost: float = 0.0
    headroom: float = 0.0
    limited: bool = False


@dataclass(slots=True)
class LevelRun:
    """One repeat of one level against one endpoint.

    `began` is the wall-clock time (seconds since the epoch) of time 0; `duration` the end of the last intended
    arrival; `warmup` the seconds before it that only warm the server. `aborted` says why a run ended early.
    """

    endpoint: str
    load: Load
    repeat: int
    seed: int
    began: float
    duration: float
    warmup: float
    requests: list[RequestRecord]
    client: ClientHealth
    aborted: str | None = None


@dataclass(slots=True)
class Benchmark:
    """Everything one invocation measured, and where: what is stored, plotted and compared.

    `environment` has versions, machine, git commit and clock; `flags` the arguments in effect; `notes` what to know
    beyond single levels, as that it was interrupted, a sentence each.
    """

    title: str
    flags: dict[str, object]
    environment: dict[str, str]
    runs: list[LevelRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def endpoints(self) -> list[str]:
        """Endpoint names in the order they were given."""
        return list(dict.fromkeys(run.endpoint for run in self.runs))

    @property
    def loads(self) -> list[Load]:
        """Levels in increasing order."""
        loads = dict.fromkeys(run.load for run in self.runs)
        return sorted(loads, key=lambda load: (load.qps or 0.0, load.concurrency or 0))
