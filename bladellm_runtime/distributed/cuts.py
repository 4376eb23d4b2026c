"""What of every tensor of a linear layer a rank holds: ranges along one dimension, for all the ways layers are stored.

With N outputs, K inputs and groups of g inputs; a column-parallel layer is cut along N, a row-parallel one along K:

- weight [N, K], bias [N] (of a row-parallel layer whole, and on the first rank alone);
- gptq: qweight [K·b/32, N], qzeros [K/g, N·b/32], scales [K/g, N], g_idx [K];
- awq: qweight [K, N/8], qzeros [K/g, N/8], scales [K/g, N];
- compressed-tensors: weight or weight_packed [N, K·b/32], weight_scale [N, K/g], weight_zero_point [N or N·b/32, K/g],
  weight_g_idx [K], weight_shape [2]. Scales of a whole layer and of its input are held whole.

A group that a border cuts has its scale and zero point on both sides. Where g_idx scatters a group's inputs, a
row-parallel layer keeps the scales of all groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.quantization.scheme import Scheme

INDICES = ("g_idx", "weight_g_idx")


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A rank's share of a stored tensor.

    `ranges`: along `dim`, in the tensor's own elements, one after the other; a tensor of `dim` None is held whole.
    `rebase`: what indices of groups (values of 0 and more) are lowered by. `rewrite`: (position, value here, value in
    the whole model) of the one value that is another, in a tensor that holds a shape.
    """

    dim: int | None = None
    ranges: tuple[range, ...] = ()
    rebase: int = 0
    rewrite: tuple[int, int, int] | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the share of a tensor of shape `whole`."""
        if self.dim is None:
            return whole
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])


WHOLE = TensorCut()


@dataclass(frozen=True, slots=True)
class LinearCut:
    """A rank's share of a linear layer: ranges of its `size` outputs (`rows`) or of its `size` inputs."""

    rows: bool
    ranges: tuple[range, ...]
    size: int

    @property
    def length(self) -> int:
        """Outputs or inputs of the rank."""
        return sum(map(len, self.ranges))


@dataclass(frozen=True, slots=True)
class Packing:
    """How a quantized layer is stored. `method`: the `quant_method`. `scattered`: its g_idx is not in order."""

    method: str
    scheme: Scheme
    scattered: bool = False


@dataclass(frozen=True, slots=True)
class Dims:
    """Which dimension of a stored tensor runs over the outputs and which over the inputs, None where none does, and
    how many of them one element stands for. `grouped`: it holds one element a group of inputs."""

    rows: int | None
    columns: int | None
    per_row: int = 1
    per_column: int = 1
    grouped: bool = False


def cut_stored(module: str, suffix: str, shape: tuple[int, ...], cut: LinearCut, packing: Packing | None) -> TensorCut:
    """The share of the tensor `module.suffix` of `shape` in a rank's share of its layer.

    Raises `CheckpointError` where a border lies within a word of packed numbers, or the shape is not the layer's.
    """
    if suffix == "weight_shape":
        return TensorCut(rewrite=(0 if cut.rows else 1, cut.length, cut.size))
    dims = _dims(suffix, shape, cut, packing)
    dim, per = (dims.rows, dims.per_row) if cut.rows else (dims.columns, dims.per_column)
    if dim is None:
        return WHOLE
    key = f"{module}.{suffix}"
    _check_size(key, shape, dim, -(-cut.size // per))
    if not cut.rows and dims.grouped:
        return _cut_groups(cut.ranges, dim, per, packing)
    ranges = tuple(_in_words(key, part, per, cut.size) for part in cut.ranges)
    if suffix not in INDICES or packing is None or packing.scattered or packing.scheme.group_size is None:
        return TensorCut(dim, ranges)
    return TensorCut(dim, ranges, rebase=_first(cut.ranges) // packing.scheme.group_size)


def groups_of(cut: LinearCut, packing: Packing) -> list[int] | None:
    """The group, counted from the rank's first one, of every input of a share of a row-parallel layer; None where the
    share is whole groups in order, or its g_idx says it."""
    size = packing.scheme.group_size
    if cut.rows or size is None or packing.scattered:
        return None
    first, last = _first(cut.ranges), _last(cut.ranges)
    if first % size == 0 and last % size == 0:
        return None
    return [column // size - first // size for column in range(first, last)]


def _dims(suffix: str, shape: tuple[int, ...], cut: LinearCut, packing: Packing | None) -> Dims:
    nothing = Dims(None, None)
    if packing is None:
        return {"weight": Dims(0, 1), "bias": Dims(0, None)}.get(suffix, nothing)
    word, group = 32 // packing.scheme.bits, packing.scheme.group_size
    first, second = (None, None) if group is None else (0, 1)
    per = group or 1
    table: Mapping[str, Dims] = {
        "weight": Dims(0, 1),
        "weight_packed": Dims(0, 1, per_column=word),
        "weight_scale": Dims(0, second, per_column=per, grouped=True),
        "weight_zero_point": Dims(0, second, _per_row(shape, cut, word), per, grouped=True),
        "weight_g_idx": Dims(None, 0),
        "bias": Dims(0, None),
        "g_idx": Dims(None, 0),
        "scales": Dims(1, first, per_column=per, grouped=True),
        "qzeros": Dims(1, first, word, per, grouped=True),
        "qweight": Dims(1, 0, per_row=8) if packing.method == "awq" else Dims(1, 0, per_column=word),
    }
    is_one_scale = suffix in ("weight_scale", "weight_zero_point") and len(shape) < 2
    return nothing if is_one_scale else table.get(suffix, nothing)


def _per_row(shape: tuple[int, ...], cut: LinearCut, word: int) -> int:
    """Outputs that a row of zero points stands for: one, or a word of them where they are packed."""
    return word if cut.rows and shape[:1] != (cut.size,) else 1


def _cut_groups(ranges: tuple[range, ...], dim: int, size: int, packing: Packing | None) -> TensorCut:
    if packing is not None and packing.scattered:
        return WHOLE
    return TensorCut(dim, (range(_first(ranges) // size, -(-_last(ranges) // size)),))


def _in_words(key: str, part: range, per: int, size: int) -> range:
    """A range of channels as a range of elements that stand for `per` of them."""
    if part.start % per or (part.stop % per and part.stop != size):
        raise CheckpointError(
            f"{key} packs {per} channels in a word, and a border at {part.start if part.start % per else part.stop} "
            "would cut one; use another --tensor_parallel_size"
        )
    return range(part.start // per, -(-part.stop // per))


def _check_size(key: str, shape: tuple[int, ...], dim: int, size: int) -> None:
    if dim >= len(shape) or shape[dim] != size:
        raise CheckpointError(f"{key} has shape {list(shape)}, but config.json asks for {size} in dimension {dim}")


def _first(ranges: tuple[range, ...]) -> int:
    return ranges[0].start


def _last(ranges: tuple[range, ...]) -> int:
    return max(ranges[-1].stop, ranges[0].start)
