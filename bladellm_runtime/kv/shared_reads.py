"""`SharedReads`: which decode rows of a step read the beginning that they share once, where that pays. Numbers only."""

from dataclasses import dataclass

from bladellm_kernels.prefix_groups import PrefixGroup as PrefixGroup
from bladellm_kernels.prefix_groups import PrefixTree

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.operations import Ints


@dataclass(frozen=True, slots=True)
class SharingRule:
    """When reading shared beginnings once pays.

    members: rows that share one read. least_rows, most_rows: of a step. step_tokens, group_tokens: token reads of a
    layer that a step must save, and each of its groups.
    """

    members: int
    least_rows: int
    most_rows: int
    step_tokens: int
    group_tokens: int


class SharedReads:
    """The groups of decode rows, kept while the same rows decode.

    What a sequence shares does not change while it decodes: units become shared in prefills. So slots `enter` when they
    begin to decode and `leave` when they end, and groups are made anew after that.
    """

    def __init__(self, memory: KvAccounting, rule: SharingRule) -> None:
        self.rule = rule
        self._memory = memory
        self._granule_tokens = memory.spec.granule_tokens
        self._tree = PrefixTree()
        self._kept: dict[int, tuple[int, Ints, tuple[PrefixGroup, ...]]] = {}

    def enter(self, slot: int) -> None:
        """A slot decodes from now on; all of its prefill has been planned and remembered."""
        self._tree.enter(slot, self._memory.beginning(slot))

    def leave(self, slot: int) -> None:
        """A slot decodes no more."""
        self._tree.leave(slot)

    def groups(self, slots: Ints, batch: int = 0) -> tuple[PrefixGroup, ...]:
        """The groups among rows with these slots, none where they do not pay. The same object while nothing changes for
        a micro-batch and `slots` is the same one, which must not be changed."""
        if not self.rule.least_rows <= len(slots) <= self.rule.most_rows:
            return ()
        kept = self._kept.get(batch)
        if kept is None or kept[0] != self._tree.changes or kept[1] is not slots:
            kept = self._kept[batch] = self._tree.changes, slots, self._paying(slots)
        return kept[2]

    def _paying(self, slots: Ints) -> tuple[PrefixGroup, ...]:
        rule, size = self.rule, self._granule_tokens
        found = self._tree.groups(rule.members, -(-rule.group_tokens // size))
        rows = {slot: row for row, slot in enumerate(slots.tolist())} if found else {}
        groups: list[PrefixGroup] = []
        saved = 0
        for group in found:
            # A row may be left out of a step, for want of memory.
            group = PrefixGroup(tuple([rows[slot] for slot in group.rows if slot in rows]), group.granules)
            tokens = group.saved_tokens(rule.members, size)
            if tokens > 0:
                groups.append(group)
                saved += tokens
        return tuple(groups) if groups and saved >= rule.step_tokens else ()
