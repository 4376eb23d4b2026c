"""`Scheme`: how a linear layer's weight and input are rounded."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["int", "fp8"]
Activations = Literal["none", "dynamic", "static"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The numbers of one linear layer.

    `kind` int: weight = scale · (code − zero), codes unsigned of `bits` (4 or 8). `kind` fp8: weight = scale · code,
    codes float8_e4m3fn, `bits` 8. `group_size`: inputs that share a scale; None is one scale an output channel.
    `symmetric`: the zero point is 2^(bits − 1) throughout. `activations`: the input is kept as it is (none), rounded to
    the weight's kind with one scale a row found on the fly (dynamic), or with the checkpoint's one scale (static).
    """

    bits: int
    kind: Kind = "int"
    group_size: int | None = None
    symmetric: bool = True
    activations: Activations = "none"

    @property
    def name(self) -> str:
        """`w4a16`, `w8a16`, `w8a8`, `fp8_w8a16` or `fp8_w8a8`."""
        prefix = "fp8_" if self.kind == "fp8" else ""
        return f"{prefix}w{self.bits}a{16 if self.activations == 'none' else 8}"

    @property
    def levels(self) -> int:
        """Codes of an integer scheme."""
        return int(2**self.bits)

    @property
    def middle(self) -> int:
        """Zero point of a symmetric integer scheme."""
        return int(2 ** (self.bits - 1))

    def groups(self, columns: int) -> int:
        """Scales of one output channel with `columns` inputs. `group_size` must divide them."""
        return 1 if self.group_size is None else columns // self.group_size
