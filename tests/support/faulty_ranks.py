"""The runtime's own engine process whose other ranks have a fault of `faulty_engine`, or one of their own:

`python -m tests.support.faulty_ranks FAULT`

- `deaf`: the step that sets it off is the last order that a rank takes, but it goes on reporting that it is alive
- `dead`: every other rank exits when it has been told what to do, before it says anything
- `killed_reading`: every other rank is killed in the middle of reading an adapter
- `other_flags`: every other rank was started with another --max_running_requests
"""

import dataclasses
import os
import signal
import sys
import time
from typing import Any

from bladellm_runtime.engine import process, rank_process
from bladellm_runtime.lora.peft_folder import AdapterReader
from bladellm_runtime.ranks import launch
from bladellm_runtime.ranks.channel import PlanReceiver
from bladellm_runtime.ranks.messages import RunStep
from tests.support.faulty_engine import TRIGGER, Fault


def go_deaf() -> None:
    receive, deaf = PlanReceiver.receive, []

    def receive_until(port: PlanReceiver, timeout: float | None) -> Any:
        while deaf:
            time.sleep(1.0)
        order = receive(port, timeout)
        if isinstance(order, RunStep) and any(load.ids()[0] == TRIGGER for load in order.loads):
            deaf.append(True)
        return order

    PlanReceiver.receive = receive_until


def change_flags() -> None:
    flags_of = rank_process.flags_of
    rank_process.flags_of = lambda args: flags_of(dataclasses.replace(args, max_running_requests=7))


def die_reading() -> None:
    def read(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    AdapterReader.read = read


OWN = {
    "deaf": go_deaf, "killed_reading": die_reading, "dead": lambda: sys.exit(3), "other_flags": change_flags,
}  # fmt: skip


def main(fault: str, rank: bool) -> int:
    if not rank:
        launch.COMMAND[:] = [sys.executable, "-m", "tests.support.faulty_ranks", fault, "rank"]
        return process.main()
    if fault in OWN:
        OWN[fault]()
    else:
        Fault([fault]).install()
    return rank_process.main()


if __name__ == "__main__":
    process.end(main(sys.argv[1], len(sys.argv) > 2))
