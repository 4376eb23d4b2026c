"""Whether the other ranks are well, from what they report and how their processes ended. Times in seconds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bladellm_runtime.ranks.messages import Hello, Pulse, RankFailed, RankReport

PULSE_SECONDS = 0.5
"""The time between two pulses of a rank."""
SILENT_SECONDS = 6.0
"""A rank without a pulse for so long is lost, and so is one that does not begin what it has to do."""
STARTING_SECONDS = 180.0
"""The same until the engine is ready: loading libraries and memory can keep a process from everything else."""


@dataclass(slots=True)
class RankState:
    """What is known of a rank. greeted, pulsed: whether it has said hello, and sent a pulse. heard: when it last
    reported. begun, done, on_device: of its last pulse. moved: when the numbers last changed or there was nothing to be
    late with."""

    greeted: bool = False
    pulsed: bool = False
    heard: float | None = None
    begun: int = 0
    done: int = 0
    on_device: bool = False
    moved: float = 0.0
    failed: RankFailed | None = None


class Watchdog:
    """Follows the ranks, and says what ended the group, in half a sentence.

    A rank hangs when it is silent, when it begins no order although it has finished all that it began, when it does not
    finish what rank 0 has finished, and when its GPU does not finish a step. Of one whose host is in the middle of a
    step nothing can be said: on a CPU steps may be long, and before one a GPU's kernel may have to be compiled.
    """

    def __init__(self, ranks: Iterable[int], stages: int = 1) -> None:
        """stages: of a pipeline, one after the other of which a step passes."""
        self._states = {rank: RankState() for rank in ranks}
        self._stages = stages
        self.serving = False
        """Whether the engine is ready."""

    @property
    def pulsing(self) -> list[int]:
        """Ranks that have reported how far they are."""
        return [rank for rank, state in self._states.items() if state.pulsed]

    @property
    def missing(self) -> list[int]:
        """Ranks that have not said hello yet."""
        return [rank for rank, state in self._states.items() if not state.greeted]

    def hear(self, report: RankReport, now: float) -> None:
        """Take a report; those of unknown ranks are ignored."""
        state = self._states.get(report.rank)
        if state is None:
            return
        state.heard = now
        match report:
            case RankFailed():
                state.failed = state.failed or report
            case Pulse(_, begun, done, on_device):
                state.pulsed, state.on_device = True, on_device
                if (begun, done) != (state.begun, state.done):
                    state.begun, state.done, state.moved = begun, done, now
            case Hello():
                state.greeted, state.moved = True, now

    def trouble(self, exits: Mapping[int, int | None]) -> bool:
        """Whether a rank has said that it ends, or has. exits: exit codes by rank, None for a connection that ended."""
        return bool(exits) or any(state.failed for state in self._states.values())

    def verdict(self, now: float, sent: int, done: int, exits: Mapping[int, int | None]) -> str | None:
        """What is wrong, or None. sent, done: orders that rank 0 has sent and finished.

        A rank's own reason comes before those of others that only miss it.
        """
        failed = {rank: state.failed for rank, state in self._states.items() if state.failed is not None}
        own = [report for report in failed.values() if report.own]
        for rank, code in exits.items():
            if code is not None and code < 0:
                return f"rank {rank} was killed by signal {-code}"
        if own:
            return f"rank {own[0].rank}: {own[0].message}"
        for rank, state in self._states.items():
            if rank not in exits and rank not in failed and (problem := self._hangs(state, now, sent, done)):
                return f"rank {rank} {problem}"
        for report in failed.values():
            return f"rank {report.rank}: {report.message}"
        for rank, code in exits.items():
            return f"rank {rank} is gone" if code is None else f"rank {rank} exited with {code}"
        return None

    def _hangs(self, state: RankState, now: float, sent: int, done: int) -> str | None:
        limit = SILENT_SECONDS if self.serving else STARTING_SECONDS
        if state.heard is not None and now - state.heard > limit:
            return f"has not answered for {limit:g} seconds"
        idle = state.begun == state.done and state.begun < sent
        due = idle or state.done < done
        allowed = limit if due else limit * self._stages
        if not (due or state.on_device):
            state.moved = now
        elif now - state.moved > allowed and (state.heard is None or now - state.heard <= 2 * PULSE_SECONDS):
            # Of one that has fallen silent that is said, which is the cause.
            return f"has done nothing for {allowed:g} seconds, although it had to"
        return None
