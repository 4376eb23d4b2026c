"""Requests as an engine without arrays reads them."""

from array import array

from msgspec.structs import replace

from bladellm_runtime.wire.messages import AddRequest


def unpacked(request: AddRequest) -> AddRequest:
    """A request with its tokens one by one."""
    if not isinstance(request.prompt, bytes):
        return request
    return replace(request, prompt=array("i", request.prompt).tolist())
