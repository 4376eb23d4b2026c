"""`QuantizeJob`: everything the pipeline must know, checked before it starts; and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.algorithm import Algorithm
from bladellm_tools.quantize.algorithms.grid import Grid

AlgorithmMaker = Callable[[Grid], Algorithm]


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """One model to quantize.

    windows: calibration tokens, int64 [samples, tokens], None where nothing needs data. devices: they share the
    samples. dtype: of the activations in calibration. batch: samples per forward pass. pad_multiple: the MLP's inner
    size is padded to a multiple of it. ignore: patterns (fnmatch) of module names that stay as they are. settings:
    the flags in effect, for the report and for telling whether a `--resume` continues the same work.
    """

    model: Path
    output: Path
    scheme: Scheme
    format: type[CheckpointFormat]
    algorithm: AlgorithmMaker
    windows: torch.Tensor | None
    devices: tuple[torch.device, ...]
    dtype: torch.dtype
    batch: int = 8
    cpu_offload: bool = False
    fallback_ratio: float = 0.0
    ignore: tuple[str, ...] = ("lm_head",)
    kv_scales: bool = False
    scrambled: bool = False
    pad_multiple: int | None = None
    resume: bool = False
    settings: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class ModuleReport:
    """One quantized linear layer: `error` is the mean squared output error as a share of the outputs' mean square,
    None without data; `fallback` says that it was left in floating point after all."""

    module: str
    scheme: str
    error: float | None
    damp: float | None = None
    note: str | None = None
    fallback: bool = False


@dataclass(slots=True)
class QuantizeResult:
    """What was done. Bytes are those of the safetensors; `stages` are the seconds spent reading, calibrating, ..."""

    output: Path
    modules: list[ModuleReport]
    tokens: int
    seconds: float
    bytes_before: int
    bytes_after: int
    stages: dict[str, float] = field(default_factory=dict)


class Progress:
    """Told what the pipeline is doing; this one says nothing."""

    def plan(self, layers: int, peak_bytes: dict[str, int]) -> None:
        """Before the first layer: how many steps there will be, and the most memory each kind of it will take."""

    def layer(self, index: int, stage: str) -> None:
        """A layer has entered a stage: read, calibrate, round, write, replay."""

    def done(self, index: int) -> None:
        """A layer is finished."""
