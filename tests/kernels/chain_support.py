"""Layers one behind the other in a CUDA graph, each starting early."""

from collections.abc import Callable

import torch


def assert_replays_read_what_is_in_front(
    chain: Callable[[], None],
    given: torch.Tensor,
    written: tuple[torch.Tensor, torch.Tensor],
    expected: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """chain: from half of `given` to the first of `written`, by way of the second; expected: of what it begins with."""
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(5):
        given.normal_()
        for matrix in written:
            matrix.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(written[0].float(), expected(given * 0.5).float(), atol=0.1, rtol=0.05)
