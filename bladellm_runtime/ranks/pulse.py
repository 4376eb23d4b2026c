"""`Pulses`: a rank's sign of life, from a thread of its own, and its end when rank 0 gives none."""

import logging
import os
import threading
import time

import zmq

from bladellm_runtime.ranks.channel import ENDED, PULSE, Secret, connect
from bladellm_runtime.ranks.messages import Pulse, encode
from bladellm_runtime.ranks.watchdog import PULSE_SECONDS, SILENT_SECONDS, STARTING_SECONDS
from bladellm_runtime.wire.contexts import end_context, open_context

logger = logging.getLogger(__name__)


class Pulses:
    """Reports how far this rank is. When rank 0 says that the group has ended, or says nothing any more, the process
    ends at once: what its other threads wait for will not come.

    begun, done, on_device: as in `Pulse`; serving: whether the start is over. To be kept up to date.
    """

    def __init__(self, address: str, rank: int, secret: Secret | None) -> None:
        self.begun = 0
        self.done = 0
        self.on_device = False
        self.serving = False
        self._rank = rank
        self._context = open_context()
        self._socket = connect(self._context, address, b"%d" % rank + PULSE, secret)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Report from now on."""
        self._thread.start()

    def close(self) -> None:
        """Report no more."""
        self._closing.set()
        self._thread.join()
        end_context(self._context, linger_ms=0)

    def _run(self) -> None:
        heard = time.monotonic()
        while not self._closing.wait(PULSE_SECONDS):
            try:
                self._socket.send(encode(Pulse(self._rank, self.begun, self.done, self.on_device)), zmq.NOBLOCK)
            except zmq.Again:
                logger.debug("rank 0 takes no reports")
            while self._socket.poll(0):
                heard = time.monotonic()
                if self._socket.recv() == ENDED:
                    end_rank("the group has ended")
            # Rank 0 may be killed so that nothing is closed, and on another host.
            if time.monotonic() - heard > (SILENT_SECONDS if self.serving else STARTING_SECONDS):
                end_rank("rank 0 is silent")


def end_rank(reason: str) -> None:
    """End this process at once."""
    logger.info("%s: this rank ends", reason)
    logging.shutdown()
    os._exit(1)
