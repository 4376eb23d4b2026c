"""The most memory and disk a run will take, from shapes alone: generous on memory, close on disk."""

from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.weights import Part, weight_table
from bladellm_tools.quantize.algorithms.layer import GROUPS
from bladellm_tools.quantize.job import QuantizeJob
from bladellm_tools.quantize.pipeline.selection import Selection
from bladellm_tools.quantize.pipeline.source import layer_prefix

SOLVER_MATRICES = 4
"""Matrices of a Gram matrix's size a solver holds at a time, the Gram matrix not counted."""
WEIGHT_COPIES = 4
"""float32 copies of a group's weights: as it is, smoothed, being rounded, dequantized."""


def peak_bytes(job: QuantizeJob, spec: ModelSpec, selection: Selection) -> dict[str, int]:
    """`GPU` (of one; only where there is any), `host` and `disk`."""
    on_gpu = job.devices[0].type == "cuda"
    states = _states(job, spec)
    device = _device_bytes(job, spec)
    layer = sum(map(_numel, _layer_parts(spec, 0))) * spec.dtype.itemsize
    host = 5 * layer
    if on_gpu and not job.cpu_offload:
        device += -(-states // len(job.devices))
    else:
        host += states
    disk = disk_bytes(job, spec, selection)
    return {"GPU": device, "host": host, "disk": disk} if on_gpu else {"host": host + device, "disk": disk}


def disk_bytes(job: QuantizeJob, spec: ModelSpec, selection: Selection) -> int:
    """Of the finished safetensors."""
    quantized = {
        f"{layer_prefix(layer)}{member}.weight"
        for layer, groups in enumerate(selection.groups)
        for group in groups
        for member in group.members
    }
    parts = [part for row in weight_table(spec).values() for part in row]
    return sum(
        _stored_bytes(job, spec, part) if part.key in quantized else _numel(part) * spec.dtype.itemsize
        for part in parts
    )


def _stored_bytes(job: QuantizeJob, spec: ModelSpec, part: Part) -> int:
    scales = part.shape[0] * job.scheme.groups(part.shape[1])
    zeros = 0 if job.scheme.symmetric else scales * job.scheme.bits // 8
    return _numel(part) * job.scheme.bits // 8 + scales * spec.dtype.itemsize + zeros


def _states(job: QuantizeJob, spec: ModelSpec) -> int:
    return 0 if job.windows is None else job.windows.numel() * spec.hidden_size * job.dtype.itemsize


def _device_bytes(job: QuantizeJob, spec: ModelSpec) -> int:
    """A layer, its statistics, and the larger of a forward pass and the rounding of a group; without the states."""
    parts = {part.key: part for part in _layer_parts(spec, 0)}
    layer = sum(map(_numel, parts.values()))
    groups = [[parts[f"{layer_prefix(0)}{member}.weight"] for member in group.members] for group in GROUPS]
    rounding = max(WEIGHT_COPIES * 4 * sum(map(_numel, members)) for members in groups)
    if job.windows is None:
        return layer * 2 * spec.dtype.itemsize + rounding
    inputs = [members[0].shape[1] for members in groups]
    grams = 4 * sum(columns**2 for columns in inputs)
    embedding = spec.vocab_size * spec.hidden_size * job.dtype.itemsize
    solving = rounding + SOLVER_MATRICES * 4 * max(inputs) ** 2
    working = layer * (spec.dtype.itemsize + 2 * job.dtype.itemsize) + grams + max(solving, _forward_bytes(job, spec))
    return max(embedding, working)


def _forward_bytes(job: QuantizeJob, spec: ModelSpec) -> int:
    """Activations of one pass: the MLP's three, some of the residual stream, float32 heads in rotation."""
    if job.windows is None:
        return 0
    tokens = min(job.batch, job.windows.shape[0]) * job.windows.shape[1]
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    values = 4 * spec.intermediate_size + 6 * spec.hidden_size + 2 * heads
    return tokens * (values * job.dtype.itemsize + 3 * heads * 4)


def _layer_parts(spec: ModelSpec, layer: int) -> list[Part]:
    return [part for row in weight_table(spec).values() for part in row if part.key.startswith(layer_prefix(layer))]


def _numel(part: Part) -> int:
    return part.shape[0] * (part.shape[1] if len(part.shape) == 2 else 1)
