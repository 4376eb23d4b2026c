"""The process of a rank besides the first: builds the same runner as rank 0, and follows its orders.

Run as `python -m bladellm_runtime.engine.rank_process`. The first line of standard input is JSON, a `RankLaunch`; the
rest never comes: end of file means that who started it has died.
"""

import logging
import sys
import threading
from pathlib import Path

import msgspec

from bladellm_runtime.engine.process import end
from bladellm_runtime.errors import UserError
from bladellm_runtime.garbage import collect_seldom, keep_objects
from bladellm_runtime.logs import log_to_stderr
from bladellm_runtime.ranks.channel import ChannelBroken, PlanReceiver, Secret
from bladellm_runtime.ranks.launch import RankLaunch, flags_of, read_secret
from bladellm_runtime.ranks.messages import Hello, RankFailed
from bladellm_runtime.ranks.pulse import Pulses, end_rank
from bladellm_runtime.ranks.results import ResultSender
from bladellm_runtime.wire.signals import leave_signals_to_starter

logger = logging.getLogger(__name__)


def run_rank(launch: RankLaunch, port: PlanReceiver, pulses: Pulses) -> None:
    """Build the runner and follow. Raises what goes wrong."""
    from bladellm_runtime.engine.build_runner import StartRecord, build_runner
    from bladellm_runtime.engine.follower import Follower
    from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
    from bladellm_runtime.engine.rank_place import RankPlace
    from bladellm_runtime.models.config import read_model_spec
    from bladellm_runtime.models.parallel import make_plan, plan_digest

    args, folder = launch.args, Path(launch.args.model)
    plan = make_plan(folder, args.tensor_parallel_size, args.pipeline_parallel_size)
    port.send(Hello(launch.rank, flags_of(args), plan_digest(folder, plan)))
    place = RankPlace(launch.rank, launch.meeting.group)
    with KERNEL_COMPILES.expected():
        built = build_runner(launch.args, folder, read_model_spec(folder), place, StartRecord(), None)
        results = None
        if launch.rank == launch.args.result_rank:
            results = ResultSender(launch.meeting.results, read_secret(launch.args))
        in_flight = launch.args.steps_in_flight
        follower = Follower(built.runner, port, pulses, in_flight, results, built.loader, launch.rank)
    keep_objects()
    follower.run()
    if results is not None:
        results.close()
    place.leave(ending=True)


def report_end(launch: RankLaunch, port: PlanReceiver, pulses: Pulses) -> int:
    """Run the rank, and report why it ended if it was not told to; returns the exit code."""
    try:
        run_rank(launch, port, pulses)
        return 0
    except UserError as error:
        port.send(RankFailed(launch.rank, bare(error), True))
    except ChannelBroken as error:
        port.send(RankFailed(launch.rank, str(error), True))
    except Exception as error:
        # Mostly another rank's end: rank 0 knows better.
        logger.debug("the rank stopped", exc_info=True)
        port.send(RankFailed(launch.rank, f"{type(error).__name__}: {error}", False))
    return 1


def bare(error: UserError) -> str:
    """The sentence of an error of a step, without what rank 0 puts before it."""
    return str(error).removeprefix("the engine stopped: ")


def watch_stdin() -> None:
    """Block until standard input ends, then end the process."""
    while sys.stdin.buffer.read(4096):
        pass
    end_rank("who started it is gone")


def connect_ends(launch: RankLaunch, secret: Secret | None) -> tuple[PlanReceiver, Pulses]:
    """Both ways to rank 0."""
    plans = launch.meeting.plans
    return PlanReceiver(plans, launch.rank, secret), Pulses(plans, launch.rank, secret)


def main() -> int:
    """Entry point of the process; returns its exit code."""
    leave_signals_to_starter()
    collect_seldom()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankLaunch)
    launch.bind()
    level = launch.args.log_level
    # What it has to say rank 0 says as well.
    log_to_stderr(level if level == "DEBUG" else "ERROR", f"rank {launch.rank}")
    threading.Thread(target=watch_stdin, name="starter-watch", daemon=True).start()
    port, pulses = connect_ends(launch, read_secret(launch.args))
    pulses.start()
    code = report_end(launch, port, pulses)
    pulses.close()
    port.close()
    return code


if __name__ == "__main__":
    end(main())
