"""A stream beside the layer's own: A is multiplied there while the layer reads its weight, which bounds both."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.lora_tokens import TokenAdapters


@contextmanager
def beside(adapters: TokenAdapters) -> Iterator[None]:
    """What is launched inside follows what the current stream was given, and runs beside what it is given next."""
    if adapters.beside is None:
        yield
        return
    adapters.beside.wait_stream(torch.cuda.current_stream(adapters.slots.device))
    with torch.cuda.stream(adapters.beside):
        yield


def join(adapters: TokenAdapters) -> None:
    """The current stream waits for what was launched `beside` it."""
    if adapters.beside is not None:
        torch.cuda.current_stream(adapters.slots.device).wait_stream(adapters.beside)


def adapter_launch(adapters: TokenAdapters, device: torch.device) -> dict[str, bool]:
    """Launch options of kernels for these tokens: behind another stream's work no kernel can start early."""
    return early_launch(device) if adapters.beside is None else {"EARLY": False}
