"""From a model folder to a decoder: safetensors streamed into fused parameters, or random weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
import torch

from bladellm_runtime.distributed.manifest import is_split
from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.build import WeightBuilder
from bladellm_runtime.models.checkpoint import Checkpoint, open_checkpoint
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.decoder import Decoder, StageEnds, Weights
from bladellm_runtime.models.lora import LoraMemory, lora_bytes
from bladellm_runtime.models.lora_layout import LoraShape
from bladellm_runtime.models.lora_stacking import stacked_rows
from bladellm_runtime.models.packed_layers import NO_ROOM, PackedRoom, packable_bytes
from bladellm_runtime.models.parallel import TensorParallel, make_plan, share_table
from bladellm_runtime.models.quantized import Schemes, expected_tensors, find_schemes, loading_bytes, weight_bytes
from bladellm_runtime.models.rank_checkpoint import RankCheckpoint
from bladellm_runtime.models.sources import CheckpointSource, DummySource, Source
from bladellm_runtime.models.split_folder import open_rank
from bladellm_runtime.models.stream import TensorStream
from bladellm_runtime.models.streamed import AHEAD_BYTES, StreamedSource
from bladellm_runtime.models.weights import WeightTable, weight_table

GIB = 1024**3


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["auto", "dummy"],
    seed: int,
    parallel: TensorParallel | None = None,
    lora: LoraShape | None = None,
    packed_room: PackedRoom = NO_ROOM,
    precompute_first_layer: bool = False,
) -> Decoder:
    """Load a model's weights to `device`, plain ones as `dtype`; `seed` is that of dummy weights.

    `parallel`: load the part of this rank of a plan; `spec` is the whole model's all the same. `lora`: the decoder gets
    empty slots for adapters, `Decoder.lora`. `packed_room`: for weights packed beside the plain ones, which there
    are none of by default. `precompute_first_layer`: as `Decoder.precompute_first_layer`.
    Peak memory on the device is the model and one fused parameter; a GPU's weights pass through the host in a ring of
    buffers (`models/stream.py`), a CPU's are copied from mapped files. Raises `CheckpointError`, naming file and key,
    before anything is allocated when the folder does not hold exactly the tensors of its config.
    """
    whole = weight_table(spec)
    table = whole if parallel is None else parallel.table(spec)
    model = _Model(folder, spec, table, device, dtype, parallel, table, lora, packed_room, precompute_first_layer)
    if load_format == "dummy":
        config = folder / "config.json"
        schemes = find_schemes(spec, whole, (), config)
        expected_tensors(spec, whole, schemes, config)
        scale_dtype = dtype if spec.quantization is None else spec.quantization.scale_dtype(spec.dtype)
        return model.build(DummySource(whole, seed, scale_dtype), schemes)
    if is_split(folder):
        make_plan(folder, *model.degrees)  # refuses other degrees
        with open_rank(folder, *model.place) as shares:
            return replace(model, table=share_table(table)).read(shares.stored, shares.check(whole, spec), shares)
    with open_checkpoint(folder) as checkpoint:
        return model.read(checkpoint, checkpoint.check(whole, spec))


@dataclass(frozen=True, slots=True)
class _Model:
    """What is to be loaded: the `table` of this rank, to `device` and of `dtype`. `spec`: of the whole model.

    whole: the table as cut from a whole checkpoint, which adapters always are; the other one where that is no split.
    """

    folder: Path
    spec: ModelSpec
    table: WeightTable
    device: torch.device
    dtype: torch.dtype
    parallel: TensorParallel | None
    whole: WeightTable
    lora: LoraShape | None
    packed_room: PackedRoom
    precompute_first_layer: bool

    @property
    def place(self) -> tuple[int, int]:
        """Stage and tensor-parallel rank."""
        return (0, 0) if self.parallel is None else (self.parallel.stage, self.parallel.rank)

    @property
    def degrees(self) -> tuple[int, int]:
        """Tensor-parallel ranks and pipeline stages."""
        plan = None if self.parallel is None else self.parallel.plan
        return (1, 1) if plan is None else (plan.tensor_parallel_size, plan.pipeline_parallel_size)

    def read(self, checkpoint: Checkpoint, schemes: Schemes, shares: RankCheckpoint | None = None) -> Decoder:
        """The decoder of a checkpoint that has been checked."""
        quantization = self.spec.quantization
        if self.device.type == "cpu":
            return self.build(CheckpointSource(checkpoint, quantization, shares), schemes)
        with TensorStream(self.device) as stream:
            source = StreamedSource(checkpoint, quantization, stream, self.table, schemes, shares)
            return self.build(source, schemes)

    def build(self, source: Source, schemes: Schemes) -> Decoder:
        """The decoder of what the source gives. Raises `CheckpointError` where it cannot fit."""
        device, dtype = self.device, self.dtype
        loading = loading_bytes(self.table, schemes, dtype) + (AHEAD_BYTES if schemes and device.type == "cuda" else 0)
        stacked = {} if self.lora is None else stacked_rows(self.whole, self.lora, schemes, dtype)
        loading += 0 if self.lora is None else lora_bytes(self.whole, self.lora, stacked)
        _check_memory(self.folder, weight_bytes(self.table, schemes, dtype, device) + loading, device, dtype)
        weights = WeightBuilder(source, schemes, device, dtype, stacked).build(self.table)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # what held stored weights is free memory again, which the KV cache is sized by
        if self._has_room(packable_bytes(weights.linears)):
            weights = weights.packed()
        if self.lora is not None:
            weights = weights.with_lora(LoraMemory(self.whole, self.lora, device, stacked))
        decoder = self._decoder(weights)
        if self.precompute_first_layer:
            self._check_beside("first layer takes", decoder.first_layer_bytes, "leave out --precompute_first_layer")
            decoder.precompute_first_layer()
        return decoder

    def _decoder(self, weights: Weights) -> Decoder:
        if self.parallel is None:
            return Decoder(self.spec, weights)
        ends = StageEnds(self.parallel.is_first, self.parallel.is_last)
        return Decoder(self.parallel.spec(self.spec), weights, self.parallel.communicator, ends)

    def _has_room(self, packed: int) -> bool:
        """For so many bytes of packed weights. Raises `CheckpointError` where they are asked for and cannot fit."""
        room = self.packed_room
        if not 0 < packed <= room.most:
            return False
        if room.asked:
            self._check_beside("packed weights take", packed, "use --packed_weights off")
        return packed + room.kept <= _free_memory(self.device)

    def _check_beside(self, what: str, needed: int, instead: str) -> None:
        """Raise `CheckpointError` when what is kept beside the weights cannot fit; instead: what to do."""
        free = _free_memory(self.device)
        if needed > free:
            raise CheckpointError(
                f"{self.folder}: its {what} {needed / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free beside the "
                f"weights; {instead}"
            )


def _check_memory(folder: Path, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `CheckpointError` when the parameters cannot fit in the memory that is free."""
    free = _free_memory(device)
    if needed > free:
        raise CheckpointError(
            f"{folder}: its weights take {needed / GIB:.1f} GiB as {str(dtype).removeprefix('torch.')}, but "
            f"{free / GIB:.1f} GiB are free on {device.type}; use a smaller model or a 16-bit --dtype"
        )


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
