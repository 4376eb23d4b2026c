"""What must hold of the scheduler's state between calls. For tests: visits every sequence."""

from collections import Counter

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.roster import Roster
from bladellm_runtime.scheduler.sequence import State


def check(roster: Roster, limits: SchedulerLimits, memory: KvAccounting) -> None:
    """Raise `RuntimeError` naming every rule the state breaks."""
    memory.check()
    found = [text for text, wrong in {**_list_rules(roster, limits), **_slot_rules(roster, memory)}.items() if wrong]
    if found:
        raise RuntimeError("scheduler: " + "; ".join(found))


def _list_rules(roster: Roster, limits: SchedulerLimits) -> dict[str, bool]:
    running = roster.prefilling + roster.decoding
    on_time = [seq for seq in roster.waiting if not seq.late]
    listed = {
        State.WAITING: roster.waiting,
        State.LATE: roster.late,
        State.PREFILL: roster.prefilling,
        State.DECODE: roster.decoding,
        State.DRAINING: [seq for seq in roster.live.values() if seq.state is State.DRAINING],
    }
    filed = {seq.request_id for sequences in listed.values() for seq in sequences}
    return {
        "a list is out of arrival order": any(
            [seq.order for seq in part] != sorted({seq.order for seq in part}) for part in listed.values()
        ),
        "a sequence is in the wrong list": any(seq.state is not state for state in listed for seq in listed[state]),
        "live and listed sequences differ": filed != set(roster.live),
        "something waiting arrived before something running": bool(running and on_time)
        and max(seq.order for seq in running) > on_time[0].order,
        "a late sequence has begun": any(seq.loaded or not seq.late for seq in roster.late),
        "more sequences decode than fit into a step": any(
            count > limits.max_batch_tokens for count in Counter(seq.group for seq in roster.decoding).values()
        ),
        "a batch has other sequences or counts than those that decode": any(
            (len(batch), batch.planned) != _decoding(roster, group) for group, batch in enumerate(roster.batches)
        ),
        "a sequence is planned beyond its end": any(seq.planned > seq.kv_end for seq in roster.live.values()),
        "a running sequence is planned beyond its memory": any(seq.planned > seq.reserved for seq in running),
    }


def _slot_rules(roster: Roster, memory: KvAccounting) -> dict[str, bool]:
    slots = roster.slots
    running = roster.prefilling + roster.decoding
    held = [seq.slot for seq in running] + [item.slot for item in slots.retired]
    needed = {seq.slot: memory.spec.granules(seq.reserved) for seq in running}
    needed |= {item.slot: item.granules for item in slots.retired}
    return {
        "a slot is held twice": len(held) != len(set(held)),
        "slots are lost": len(held) != memory.live,
        "a running sequence does not own its slot": any(slots.owner[seq.slot] is not seq for seq in running),
        "a slot is owned but not held": any(owner and slot not in held for slot, owner in enumerate(slots.owner)),
        "a retired slot is due": any(item.last_step <= slots.completed for item in slots.retired),
        "reserved tokens are miscounted": slots.reserved != sum(seq.reserved for seq in running),
        "a slot's memory is not what is reserved": any(memory.needed(slot) != count for slot, count in needed.items()),
        "more granules are used than needed": memory.used > sum(needed.values()) + memory.moving,
    }


def _decoding(roster: Roster, group: int) -> tuple[int, int]:
    """The decoding sequences of a micro-batch, and what is planned for them."""
    planned = [seq.planned for seq in roster.decoding if seq.group == group]
    return len(planned), sum(planned)
