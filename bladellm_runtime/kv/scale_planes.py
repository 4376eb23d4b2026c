"""`ScalePlanes`: scales and zeros of quantized keys and values, in ordinary memory, by granule number."""

import torch

from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.spec import KvSpec


class ScalePlanes:
    """float16 [layers, granules, Hk, 2, planes, granule_tokens], zero at first; a layer's are a view of it.

    Small beside the payload (two or four bytes a head and token), so all of it is allocated at the start.
    """

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device) -> None:
        layers = sum(len(group.layers) for group in spec.groups)
        planes = (layers, spec.num_granules, shape.kv_heads, 2, shape.format.planes, spec.granule_tokens)
        self.numbers = torch.zeros(planes, dtype=torch.float16, device=device)

    def layer(self, index: int) -> torch.Tensor:
        """[granules, Hk, 2, planes, granule_tokens]."""
        return self.numbers[index]

    def by_granule(self) -> torch.Tensor:
        """The same memory as [granules, granule_tokens, layers, Hk, 2, planes], for moves."""
        return self.numbers.permute(1, 5, 0, 2, 3, 4)


def make_scales(spec: KvSpec, shape: KvShape, device: torch.device) -> ScalePlanes | None:
    """The scales of a format that has them. Raises `ValueError` where the spec counts other bytes for them."""
    layers = sum(len(group.layers) for group in spec.groups)
    if spec.scale_token_bytes != layers * shape.scale_bytes:
        raise ValueError(
            f"scales of {shape.format.name} take {layers * shape.scale_bytes} bytes a token, not "
            f"{spec.scale_token_bytes}"
        )
    return ScalePlanes(spec, shape, device) if shape.format.planes else None
