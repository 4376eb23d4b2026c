"""Copies of whole granules and of their first tokens, and the swap space in host memory."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch

from bladellm_runtime.kv.operations import Copy, SwapIn, SwapOut


class GranulePart:
    """One of the tensors that together hold what granules contain, and its swap space.

    `tokens`: [granules, granule_tokens, ...], any strides. `whole`: the same with the dimensions of a granule in the
    order they have in memory, so that a granule is one copy. `host`: as `whole`, for the granules of the swap space,
    dense; page-locked for a CUDA device, by registration: torch's own allocator would round up to a power of two.
    """

    def __init__(self, tokens: torch.Tensor, host_granules: int) -> None:
        self.tokens = tokens
        self.whole = tokens.permute(0, *sorted(range(1, tokens.dim()), key=tokens.stride, reverse=True))
        self.host = torch.empty((host_granules, *self.whole.shape[1:]), dtype=tokens.dtype)
        self._locked = tokens.device.type == "cuda" and host_granules > 0
        if self._locked:
            error = int(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), self.host.nbytes, 0))
            if error:
                raise MemoryError(f"page-locking {self.host.nbytes} bytes of swap space: CUDA error {error}")

    def close(self) -> None:
        """Unlock the swap space, whose copies must be done."""
        if self._locked:
            self._locked = False
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())


class GranuleMover:
    """Executes moves on the parts of granules. Copies are queued and never waited for: on the current stream, those to
    the host on a CUDA stream of their own, so that a step's kernels run beside them."""

    def __init__(self, payload: Sequence[torch.Tensor], scales: torch.Tensor | None, host_granules: int) -> None:
        self._payload = [GranulePart(tokens, host_granules) for tokens in payload]
        self._scales = [] if scales is None else [GranulePart(scales, host_granules)]
        device = payload[0].device
        self._device = device
        self._out = torch.cuda.Stream(device) if device.type == "cuda" and host_granules else None
        self._copying = False

    def move(self, moves: Sequence[Copy | SwapOut | SwapIn], place: Callable[[int], int] = int) -> None:
        """Queue moves in order. `place`: where in the payload a granule is, if not at its number."""
        for swaps, group in groupby(moves, lambda move: isinstance(move, SwapOut)):
            if self._out is None:
                self._queue(group, place)
            elif swaps:
                self._out.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._out):
                    self._queue(group, place)
                self._copying = True
            else:
                self.join(torch.cuda.current_stream(self._device))
                self._queue(group, place)

    def join(self, stream: torch.cuda.Stream) -> bool:
        """Let a stream wait for the copies to the host that were queued since the last call; whether there were any."""
        if self._out is None or not self._copying:
            return False
        stream.wait_stream(self._out)
        self._copying = False
        return True

    def _queue(self, moves: Iterable[Copy | SwapOut | SwapIn], place: Callable[[int], int]) -> None:
        for move in moves:
            for part in self._payload:
                _move(part, move, place)
            for part in self._scales:
                _move(part, move, int)

    def close(self) -> None:
        """Give the swap space back; may be called again."""
        parts = [*self._payload, *self._scales]
        if any(part.tokens.device.type == "cuda" for part in parts):
            torch.cuda.synchronize()
        for part in parts:
            part.close()
        self._payload.clear()
        self._scales.clear()


def _move(part: GranulePart, move: Copy | SwapOut | SwapIn, place: Callable[[int], int]) -> None:
    if isinstance(move, Copy):
        part.tokens[place(move.target), : move.tokens].copy_(part.tokens[place(move.source), : move.tokens])
    elif isinstance(move, SwapOut):
        part.host[move.host].copy_(part.whole[place(move.granule)], non_blocking=True)
    else:
        part.whole[place(move.granule)].copy_(part.host[move.host], non_blocking=True)
