"""`AdapterStore`: adapters by use, in the slots of one rank, from the host's copies or from disk."""

import time
from typing import Protocol

from bladellm_runtime.lora.loader import Outcome
from bladellm_runtime.lora.policy import AdapterPolicy, Move


class Loader(Protocol):
    """Carries moves out in order, in the background; as `AdapterLoader`."""

    def begin(self, move: Move) -> None: ...

    def poll(self) -> list[Outcome]: ...

    def drop(self, adapter: str) -> None: ...

    def close(self) -> None: ...


class AdapterStore:
    """Counts the uses of adapters, brings them to slots in the background and keeps them there while they are used.

    All calls come from one thread, that of the steps. Of several ranks one has a policy, and every one a loader, which
    is given the policy's moves in order; an adapter is ready when it is on all of them.
    """

    def __init__(self, policy: AdapterPolicy, loader: Loader) -> None:
        self.policy = policy
        self._loader = loader
        self._begun: dict[str, float] = {}
        self.loads = 0
        """Adapters that came to a slot."""
        self.evictions = 0
        """Adapters that lost theirs to another one."""
        self.load_seconds = 0.0
        """From the first request for an adapter to its being there, or given up, summed."""

    def acquire(self, adapter: str) -> bool:
        """Count a use and see that the adapter comes to a slot; False where it must wait for a release."""
        acquired = self.policy.acquire(adapter)
        if acquired is not None and acquired.move is not None:
            self._begun[adapter] = time.monotonic()
            self.evictions += acquired.move.evicted is not None
            self._loader.begin(acquired.move)
        return acquired is not None

    def release(self, adapter: str) -> None:
        """End a use: also one whose adapter could not be loaded."""
        self.policy.release(adapter)

    def poll(self) -> list[Outcome]:
        """What was loaded, or given up, since the last call. Never waits."""
        outcomes = self._loader.poll()
        for outcome in outcomes:
            self.load_seconds += time.monotonic() - self._begun.pop(outcome.adapter)
            self.loads += outcome.error is None
            (self.policy.loaded if outcome.error is None else self.policy.failed)(outcome.adapter)
        return outcomes

    def ready_slot(self, adapter: str) -> int | None:
        """The slot of an adapter that steps may use from now on; None before."""
        return self.policy.ready_slot(adapter)

    def version(self, adapter: str) -> int:
        """Of an adapter in a slot: another one than before once its folder was read again."""
        return self.policy.version(adapter)

    def unload(self, adapter: str) -> bool:
        """Take an adapter off device and host, so that its folder is read anew; False while it is used or loaded."""
        if not self.policy.forget(adapter):
            return False
        self._loader.drop(adapter)
        return True

    def close(self) -> None:
        """End the background work."""
        self._loader.close()
