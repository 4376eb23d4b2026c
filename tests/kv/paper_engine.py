"""An accounting whose plans are executed on KV memory on paper: what the directed tests of the prompt cache run on."""

import random
import zlib

from bladellm_runtime.kv.accounting import Admission, KvAccounting
from bladellm_runtime.kv.operations import MemoryPlan, Show, SwapOut
from bladellm_runtime.kv.spec import KvSpec
from tests.kv.fake_memory import FakeMemory


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


def states(tokens: list[int]) -> list[int]:
    found, state = [], 0
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        found.append(state)
    return found


class Engine:
    """An accounting and the memory its plans are executed on, one plan at a time. Every slot is checked and filled in
    each step up to its known tokens."""

    def __init__(self, spec: KvSpec, **options: bool) -> None:
        self.accounting = KvAccounting(spec, **options)
        self.memory = FakeMemory(spec)
        self.live: dict[int, tuple[str, list[int], int]] = {}
        self.steps = 0
        self.spilled: list[SwapOut] = []

    def admit(self, tokens: list[int], key: str = "", room: int = 0) -> Admission:
        admission = self.accounting.admit(tokens, max(room, len(tokens)), 0, key)
        assert admission is not None
        self.live[admission.slot] = (key, tokens, admission.cached)
        self.accounting.remember(admission.slot, tokens, len(tokens))
        return admission

    def append(self, slot: int, tokens: list[int]) -> None:
        """Tokens that the next step decodes, all at once."""
        key, known, cached = self.live[slot]
        self.live[slot] = (key, known + tokens, cached)
        assert self.accounting.grow(slot, len(known + tokens))

    def step(self) -> MemoryPlan:
        plan = self.accounting.drain_ops()
        self.steps += 1
        self.spilled += [move for move in plan.moves if isinstance(move, SwapOut)]
        self.memory.apply(plan)
        for slot, (key, tokens, cached) in self.live.items():
            wanted = [(key, state) for state in states(tokens)]
            assert [self.memory.read(slot, p) for p in range(cached)] == wanted[:cached]
            for position in range(cached, len(tokens)):
                self.memory.write(slot, position, wanted[position])
            self.live[slot] = (key, tokens, len(tokens))
        self.accounting.complete(self.steps)
        self.accounting.check()
        return plan

    def release(self, slot: int, **how: bool) -> None:
        _, tokens, written = self.live.pop(slot)
        self.accounting.release_slot(slot, tokens, written, **how)
        self.accounting.check()

    def serve(self, tokens: list[int], key: str = "", answer: list[int] | None = None, **how: bool) -> Admission:
        """A request from beginning to end."""
        admission = self.admit(tokens, key)
        self.step()
        if answer:
            self.append(admission.slot, answer)
            self.step()
        self.release(admission.slot, **how)
        return admission

    def cached(self, tokens: list[int], key: str = "") -> int:
        """What a request with these tokens and one more finds; it is cached itself then."""
        admission = self.admit([*tokens, 1000], key)
        self.step()
        self.release(admission.slot)
        return admission.cached


def shows(plan: MemoryPlan) -> list[Show]:
    return [view for view in plan.views if isinstance(view, Show)]


def bytes_of(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def spill(engine: Engine) -> None:
    """Idle steps, until nothing is left to copy to the host."""
    moves = [engine.step().moves for _ in range(30)]
    assert moves[-1] == []
