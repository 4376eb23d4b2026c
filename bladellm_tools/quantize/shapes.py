"""Whether a model's linear layers can be cut into groups, and into groups on every GPU: found out before any work."""

from dataclasses import dataclass
from math import gcd

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.weights import weight_table
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.layer import DOWN, OUTPUT
from bladellm_tools.quantize.pipeline.selection import Selection
from bladellm_tools.quantize.pipeline.source import layer_prefix

ROW_PARALLEL = (*OUTPUT.members, *DOWN.members)
"""Layers whose inputs are cut when a model is served on several GPUs; the others' outputs are."""
SIZES = (256, 128, 64, 32, 16, 8)
"""Group sizes worth naming."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of the checkpoint. `own`: its name within its decoder layer; `cut`: its inputs on one GPU."""

    module: str
    own: str
    rows: int
    columns: int
    cut: int


def linears(spec: ModelSpec, selection: Selection, degree: int) -> list[Linear]:
    """The layers to quantize, each with its shape."""
    shapes = {part.key: part.shape for parts in weight_table(spec).values() for part in parts}
    found = []
    for index, groups in enumerate(selection.groups):
        for own in (member for group in groups for member in group.members):
            module = layer_prefix(index) + own
            rows, columns = shapes[f"{module}.weight"]
            found.append(Linear(module, own, rows, columns, columns // degree if own in ROW_PARALLEL else columns))
    return found


def pad_multiple(scheme: Scheme, degree: int) -> int:
    """What --experimental_pad makes the MLP's inner size a multiple of."""
    return degree * (scheme.group_size or 1)


def padded(spec: ModelSpec, multiple: int | None) -> int:
    """The MLP's inner size once it is padded."""
    return spec.intermediate_size if multiple is None else -(-spec.intermediate_size // multiple) * multiple


def check_degree(spec: ModelSpec, degree: int, pad: bool) -> None:
    """Raise `ConfigError` where the inputs of a layer cannot be shared out equally over the GPUs."""
    if spec.heads % degree:
        raise ConfigError(
            f"--tensor_parallel_size {degree} does not divide the {spec.heads} attention heads; "
            f"use {_divisors(spec.heads)}"
        )
    if spec.intermediate_size % degree and not pad:
        most = gcd(spec.heads, spec.intermediate_size)
        raise ConfigError(
            f"--tensor_parallel_size {degree} does not divide the MLP's inner size {spec.intermediate_size}; "
            f"use --experimental_pad or {_divisors(most)}"
        )


def check_groups(layers: list[Linear], scheme: Scheme, degree: int, can_pad: bool) -> None:
    """Raise `ConfigError`, listing the layers and the sizes that work, where groups do not fill a layer's inputs."""
    size = scheme.group_size
    if size is None:
        return
    broken = {layer.own: layer for layer in layers if layer.cut % size}
    if not broken:
        return
    inputs = ", ".join(f"{own} ({_inputs(layer, degree)})" for own, layer in broken.items())
    sizes = " or ".join(map(str, fitting_sizes(layers)))
    advice = [f"--group_size {sizes}"] if sizes else []
    if can_pad and set(broken) == set(DOWN.members):
        advice.append("--experimental_pad")
    if not advice:
        advice.append("no --group_size and no --block_wise_quant: one scale a channel")
    raise ConfigError(f"--group_size {size} does not divide the inputs of {inputs}; use {' or '.join(advice)}")


def fitting_sizes(layers: list[Linear]) -> list[int]:
    """The usual group sizes that divide the inputs of every layer on every GPU, largest first."""
    return [size for size in SIZES if all(layer.cut % size == 0 for layer in layers)]


def check_storable(layers: list[Linear], scheme: Scheme, form: CheckpointFormat) -> None:
    """Raise `ConfigError` where the format cannot store a layer of this shape."""
    for own, layer in {layer.own: layer for layer in layers}.items():
        try:
            form.tensors(scheme, layer.rows, layer.columns)
        except CheckpointError as error:
            raise ConfigError(f"--format {form.name} cannot hold {own} of this model: {error}") from error


def _divisors(number: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _inputs(layer: Linear, degree: int) -> str:
    return str(layer.columns) if layer.cut == layer.columns else f"{layer.columns} / {degree} = {layer.cut}"
