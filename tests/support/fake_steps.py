"""How a step of the engine without a model goes over the wire: as the real one's does."""

from collections.abc import Sequence

from bladellm_runtime.wire.messages import Delta, RequestDelta, TokenDeltas


def together(deltas: Sequence[RequestDelta]) -> list[Delta]:
    """The same deltas with those of one token and nothing else in one message; some request's others keep their
    order, and no request has both in a step."""
    plain = [(delta.request_id, delta.tokens[0]) for delta in deltas if _is_plain(delta)]
    others: list[Delta] = [delta for delta in deltas if not _is_plain(delta)]
    return [TokenDeltas.of(plain), *others] if plain else others


def _is_plain(delta: RequestDelta) -> bool:
    return len(delta.tokens) == 1 and delta == RequestDelta(delta.request_id, delta.tokens)
