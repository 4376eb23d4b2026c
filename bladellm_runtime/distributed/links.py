"""`Link`: one way from a rank to another, in order; and the links of a rank in a pipeline.

Every link is a group of its own. On GPUs its operations are enqueued on the current stream; on CPUs a send returns at
once. What is sent is never more than `most` messages ahead of what is received: who uses it must see to that.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class Link:
    """An end of a link; `peer` is the rank at the other one."""

    def __init__(self, group: dist.ProcessGroup, peer: int, most: int) -> None:
        self._group = group
        self._peer = peer
        self._most = most
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        """Send x, contiguous; on a CPU it may be changed afterwards."""
        if x.is_cuda:
            dist.send(x, self._peer, self._group)
            return
        if len(self._sent) == self._most:
            self._sent.popleft()[0].wait()
        kept = x.clone()
        self._sent.append((dist.isend(kept, self._peer, self._group), kept))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out`, contiguous, with the next message, of its size and type. Returns it."""
        dist.recv(out, self._peer, self._group)
        return out


@dataclass(frozen=True, slots=True)
class PipelineLinks:
    """hidden states come from the stage `before` and go to the one `behind`; `tokens` lead from the last stage to the
    first. None where a rank has no part in them."""

    before: Link | None
    behind: Link | None
    tokens: Link | None


def make_links(tensor_parallel_size: int, stages: int, device: torch.device, most: int) -> PipelineLinks:
    """This rank's links; all ranks of a run call this. Stage by stage, ranks are numbered by tensor-parallel rank.

    most: messages on the way, steps in flight at most.
    """
    own = dist.get_rank()
    degree = tensor_parallel_size
    ways = [(rank, rank + degree) for rank in range((stages - 1) * degree)]
    back = [((stages - 1) * degree + rank, rank) for rank in range(degree)]
    ends: dict[tuple[int, int], Link] = {}
    for way in (*ways, *back):
        group = dist.new_group(list(way))
        if own in way:
            ends[way] = Link(group, way[0] if own == way[1] else way[1], most)
            _open(ends[way], own == way[0], device)
    return PipelineLinks(
        before=ends.get((own - degree, own)),
        behind=ends.get((own, own + degree)),
        tokens=next((ends[way] for way in back if way in ends), None),
    )


def _open(link: Link, is_sender: bool, device: torch.device) -> None:
    """Pass a first message, so that what the link needs is there before memory is shared out."""
    message = torch.zeros(1, dtype=torch.int64, device=device)
    if is_sender:
        link.send(message)
    else:
        link.receive(message)
