"""Where the values of parameters come from: a checkpoint, or random numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.checkpoint import Checkpoint
from bladellm_runtime.models.cutting import unpack_share
from bladellm_runtime.models.rank_checkpoint import RankCheckpoint
from bladellm_runtime.models.weights import Part, WeightTable
from bladellm_runtime.quantization.cutting import pad_inputs, take_inputs, take_outputs
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight

FP8_SPREAD = 64.0
"""Standard deviation of random fp8 codes; they reach to 448."""
INPUT_RANGE = 16.0
"""The largest input that a random static scale lets through."""


class Source(Protocol):
    """Gives values part by part."""

    def fill(self, parameter: torch.Tensor, parts: Sequence[Part]) -> None:
        """Fill a plain parameter, its parts one below the other; the values may arrive as late as `finish`."""

    def finish(self) -> None:
        """Return when what the device is given to do from now on finds every parameter filled."""

    def quantized(self, part: Part, scheme: Scheme, device: torch.device) -> QuantizedWeight:
        """The weight of a quantized linear layer on `device`. Raises `CheckpointError` for bad values."""


class CheckpointSource:
    """The tensors of a checkpoint that has been checked. shares: where it is a rank's, what it has of the whole."""

    def __init__(
        self, checkpoint: Checkpoint, quantization: CheckpointFormat | None, shares: RankCheckpoint | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._shares = shares

    def fill(self, parameter: torch.Tensor, parts: Sequence[Part]) -> None:
        """Copy each tensor to its rows, cast on the way."""
        for rows, part in zip(parameter.split([part.held[0] for part in parts]), parts, strict=True):
            part.take(self._checkpoint.read(part.key), rows)

    def finish(self) -> None:
        """Nothing is under way."""

    def quantized(self, part: Part, scheme: Scheme, device: torch.device) -> QuantizedWeight:
        """Move the stored tensors, which are small, then unpack them on the device."""
        if 0 in part.shape:
            return zero_weight(scheme, (part.held[0], part.held[1]), device)
        tensors = self._stored(part, scheme, device)
        try:
            return held_weight(self._unpack(part, scheme, tensors), part)
        except CheckpointError as error:
            file = self._checkpoint.files[f"{part.module}.{next(iter(tensors))}"]
            raise CheckpointError(f"{file}: {part.module}.{error}") from error

    def _unpack(self, part: Part, scheme: Scheme, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        """The whole of what the checkpoint has of a quantized layer."""
        rows, columns = part.shape
        if self._shares is None:
            return self._format.unpack(scheme, rows, columns, tensors)
        cut, packing = self._shares.linear(part.module or ""), self._shares.packing(part.module or "")
        assert cut is not None, "every linear layer of a decoder is cut"
        assert packing is not None, "its scheme was found in the same tensors"
        return unpack_share(self._format, packing, cut, (rows, columns), tensors)

    @property
    def _format(self) -> CheckpointFormat:
        assert self._quantization is not None, "schemes exist only where config.json has a quantization_config"
        return self._quantization

    def _stored(self, part: Part, scheme: Scheme, device: torch.device) -> dict[str, torch.Tensor]:
        """The stored tensors of a quantized layer on `device`, by suffix."""
        keys, files = stored_keys(self._format, part, scheme), self._checkpoint.files
        return {
            suffix: self._checkpoint.read(key).to(device, copy=True) for suffix, key in keys.items() if key in files
        }


class DummySource:
    """Random values: norms 1, biases 0, matrices of a variance of 1 / inputs, so that activations stay finite."""

    def __init__(self, table: WeightTable, seed: int, scale_dtype: torch.dtype) -> None:
        keys = [part.key for parts in table.values() for part in parts]
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._seed = seed
        self._scale_dtype = scale_dtype

    def fill(self, parameter: torch.Tensor, parts: Sequence[Part]) -> None:
        """What is cut is drawn whole, so that ranks hold parts of the model that one rank has."""
        if not any(part.is_cut for part in parts):
            self._draw(parameter, parts[0].key)
            return
        rows = [part.shape[0] for part in parts]
        whole = torch.empty(sum(rows), *parts[0].shape[1:], dtype=parameter.dtype, device=parameter.device)
        self._draw(whole, parts[0].key)
        targets = parameter.split([part.held[0] for part in parts])
        for part, source, target in zip(parts, whole.split(rows), targets, strict=True):
            part.take(source, target)

    def _draw(self, parameter: torch.Tensor, key: str) -> None:
        if key.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif key.endswith(".bias"):
            parameter.zero_()
        else:
            generator = self._generator(key, parameter.device)
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)

    def finish(self) -> None:
        """Nothing is under way but on the current stream."""

    def quantized(self, part: Part, scheme: Scheme, device: torch.device) -> QuantizedWeight:
        generator = self._generator(part.key, device)
        rows, columns = part.shape
        codes, deviation = random_codes(scheme, rows, columns, generator)
        shape = (rows, scheme.groups(columns))
        scales = torch.full(shape, columns**-0.5 / deviation, dtype=self._scale_dtype, device=device)
        zeros = None if scheme.symmetric else torch.full(shape, scheme.middle, dtype=torch.uint8, device=device)
        largest = 448.0 if scheme.kind == "fp8" else 127.0
        input_scale = INPUT_RANGE / largest if scheme.activations == "static" else None
        return held_weight(QuantizedWeight(scheme, codes, scales, zeros, None, input_scale), part)

    def _generator(self, key: str, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed((self._seed + self._numbers[key]) % 2**63)


def stored_keys(quantization: CheckpointFormat, part: Part, scheme: Scheme) -> dict[str, str]:
    """The keys of the tensors that a quantized layer is stored in, by suffix, optional ones included."""
    rows, columns = part.whole or part.shape
    stored = quantization.tensors(scheme, rows, columns)
    return {tensor.suffix: f"{part.module}.{tensor.suffix}" for tensor in stored}


def held_weight(weight: QuantizedWeight, part: Part) -> QuantizedWeight:
    """What is held of a quantized linear layer."""
    device = weight.codes.device
    if part.columns is not None and not part.columns.stored:
        return zero_weight(weight.scheme, (part.held[0], part.held[1]), device)
    if part.rows is not None:
        weight = take_outputs(weight, part.rows.index(device))
    if part.columns is None:
        return weight
    inputs = part.columns.index(device)
    return take_inputs(weight, inputs) if part.whole is None else pad_inputs(weight, inputs)


def zero_weight(scheme: Scheme, shape: tuple[int, int], device: torch.device) -> QuantizedWeight:
    """A weight of zeros, [out, in]: of a rank that has none of a layer's outputs or inputs."""
    rows, columns = shape
    size = scheme.group_size
    if size is not None and columns % size:
        scheme = replace(scheme, group_size=columns)
    scales = torch.ones(rows, scheme.groups(columns), device=device)
    if scheme.kind == "fp8":
        codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    else:
        codes = torch.full((rows, columns), scheme.middle, dtype=torch.uint8, device=device)
    zeros = None if scheme.symmetric else torch.full_like(scales, scheme.middle, dtype=torch.uint8)
    return QuantizedWeight(scheme, codes, scales, zeros, None, 1.0 if scheme.activations == "static" else None)


def random_codes(scheme: Scheme, rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, float]:
    """Codes [rows, columns] of a scheme on the generator's device, and their standard deviation."""
    device = generator.device
    if scheme.kind == "fp8":
        values = torch.randn(rows, columns, device=device, generator=generator) * FP8_SPREAD
        return values.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn), FP8_SPREAD
    codes = torch.randint(0, scheme.levels, (rows, columns), dtype=torch.uint8, device=device, generator=generator)
    return codes, float(((scheme.levels**2 - 1) / 12) ** 0.5)
