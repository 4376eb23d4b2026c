"""Which deltas of a step go to which front end."""

from collections.abc import Iterable

from bladellm_runtime.wire.messages import Delta, RequestDelta, TokenDeltas, front_end_of


def shares_of(deltas: Iterable[Delta], front_ends: Iterable[int]) -> dict[int, list[Delta]]:
    """Each front end's own, in their order. Raises `KeyError` for a delta of any other one's."""
    shares: dict[int, list[Delta]] = {number: [] for number in front_ends}
    for delta in deltas:
        if isinstance(delta, RequestDelta):
            shares[front_end_of(delta.request_id)].append(delta)
        else:
            for number, share in _split(delta):
                shares[number].append(share)
    return shares


def _split(deltas: TokenDeltas) -> list[tuple[int, TokenDeltas]]:
    rows = [(front_end_of(request_id), request_id, token) for request_id, token in deltas.pairs()]
    found = {number for number, _, _ in rows}
    if len(found) == 1:
        return [(found.pop(), deltas)]
    return [(number, TokenDeltas.of([row[1:] for row in rows if row[0] == number])) for number in sorted(found)]
