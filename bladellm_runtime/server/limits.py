"""How many requests may be open, and the errors of a server that cannot take one."""

from dataclasses import dataclass

from bladellm_runtime.server.errors import ApiError, generation_error, invalid_request
from bladellm_runtime.server.shared_counts import SharedCount, SharedCounts

RETRY_SECONDS = 1.0


class Admission:
    """Counts open choices against a limit: every choice of every prompt is one request to the engine.

    The limit is on the choices that all front ends have open together. It can be passed by what several admit at the
    very same moment.
    """

    def __init__(self, limit: int, count: SharedCount | None = None) -> None:
        self.limit = limit
        self._count = SharedCounts().open_requests if count is None else count

    @property
    def open(self) -> int:
        """Open choices of this front end."""
        return self._count.own

    @property
    def open_everywhere(self) -> int:
        """Open choices of all front ends."""
        return self._count.total

    def check_room(self) -> None:
        """Raise `ApiError` 429 when not even one more choice can enter."""
        if self.open_everywhere >= self.limit:
            raise too_many_requests(self.limit, self.open_everywhere)

    def enter(self, choices: int) -> None:
        """Count `choices` as open. Raises `ApiError` 429, or 400 for more than the server takes at all."""
        if choices > self.limit:
            raise invalid_request(
                f"prompts times n is {choices}, but this server takes at most {self.limit} at once", "n"
            )
        if self.open_everywhere + choices > self.limit:
            raise too_many_requests(self.limit, self.open_everywhere)
        self._count.add(choices)

    def leave(self, choices: int) -> None:
        """Take back an `enter`."""
        self._count.add(-choices)


def too_many_requests(limit: int, open: int) -> ApiError:
    """The 429 of a queue without room."""
    message = f"The server takes {limit} requests at once, each choice counted, and has {open} now; try again later"
    return ApiError(429, message, code="queue_full", retry_after=RETRY_SECONDS)


def unavailable(code: str) -> ApiError:
    """The 503 for a reason of `UNAVAILABLE`."""
    return ApiError(503, UNAVAILABLE[code], code=code, retry_after=RETRY_SECONDS)


UNAVAILABLE = {
    "engine_dead": "The engine has stopped, and this server is about to exit",
    "engine_stuck": "The engine has not answered for longer than --engine_timeout",
    "engine_overloaded": "The engine does not take requests at the moment; try again later",
    "tokenizer_busy": "Texts of other requests keep the tokenizer busy; try again later",
    "queue_timeout": "The request waited longer than --max_queue_time for its first token; try again later",
    "server_shutting_down": "The server is shutting down; try another one",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without its answer. code: the engine's or the server's own. sentence: the engine's, for the
    client, where the code does not say it all. param: the request field to change, if there is one."""

    code: str
    sentence: str | None = None
    param: str | None = None


def error_of(failure: Failure) -> ApiError:
    """What a client is told when its request ended early."""
    code = failure.code
    if code in UNAVAILABLE:
        return unavailable(code)
    if code == "slow_reader":
        return ApiError(408, "The answer was not read for longer than --send_timeout", code=code)
    return generation_error(code, failure.sentence, failure.param)
