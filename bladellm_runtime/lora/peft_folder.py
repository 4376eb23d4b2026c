"""A PEFT folder read into one array, laid out as the slots of `LoraMemory` and cut for the rank."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.lora.peft_config import AdapterConfig, ends_with, read_adapter_config
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.folder import file_in
from bladellm_runtime.models.lora_layout import LoraLayout
from bladellm_runtime.models.weights import Part, weight_table

TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
HEADER_BYTES = 16 * 2**20
DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """numbers: [layout.numbers]; scales: float32 [layout.scales]; on the host, pinned where the device is a GPU."""

    numbers: torch.Tensor
    scales: torch.Tensor


def empty_adapter(layout: LoraLayout, dtype: torch.dtype, pinned: bool) -> HostAdapter:
    """Memory for any adapter of a layout."""
    return HostAdapter(
        torch.zeros(layout.numbers, dtype=dtype, pin_memory=pinned), torch.zeros(layout.scales, pin_memory=pinned)
    )


class AdapterReader:
    """Reads adapters of the model `spec`, of which a rank holds what `layout` says."""

    def __init__(self, spec: ModelSpec, layout: LoraLayout) -> None:
        self._layout = layout
        parts = (part for parts in weight_table(spec).values() for part in parts)
        layers = [part for part in parts if part.module is not None and part.module.startswith("model.layers.")]
        self._parts: dict[str, Part] = {str(part.module): part for part in layers}
        self._most_bytes = HEADER_BYTES + sum(4 * layout.max_rank * sum(part.shape) for part in layers)

    def check(self, folder: Path) -> AdapterConfig:
        """An adapter's config, checked with its tensors' names, types and shapes. Raises `CheckpointError`."""
        with ExitStack() as stack:
            return self._open(folder, stack)[0]

    def read(self, folder: Path, target: HostAdapter) -> None:
        """Fill `target` with an adapter. Raises `CheckpointError`, naming file and field or tensor, where the folder is
        not one for the model, or has numbers that are not finite in the type of `target`; target is undefined then."""
        target.numbers.zero_()
        target.scales.zero_()
        with ExitStack() as stack:
            config, file, handle, modules = self._open(folder, stack)
            for module in modules:
                if module in self._layout.modules:
                    a, b = (_tensor(file, handle, _key(module, matrix)) for matrix in "AB")
                    self._fill(module, a, b, target)
                    place, number = self._layout.modules[module]
                    target.scales[place.scale + number] = config.scale_of(module)
        if not bool(target.numbers.isfinite().all()):
            dtype = str(target.numbers.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{folder / TENSOR_FILE} has numbers that are not finite as {dtype}; train the adapter again or use "
                "another --lora_dtype"
            )

    def _open(self, folder: Path, stack: ExitStack) -> tuple[AdapterConfig, Path, Any, list[str]]:
        """The config, the file of tensors and its handle, and the modules it is for, all checked."""
        config = read_adapter_config(folder, self._layout.max_rank, set(self._parts))
        file = file_in(folder, TENSOR_FILE)
        size = file.stat().st_size
        if size > self._most_bytes:
            raise CheckpointError(f"{file} has {size} bytes; an adapter of this model has {self._most_bytes} at most")
        try:
            handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is not a whole safetensors file ({error}); copy the adapter again"
            ) from error
        modules = sorted({_module(file, key) for key in handle.keys()})  # noqa: SIM118 (a handle is no mapping)
        self._check(file, handle, modules, config)
        return config, file, handle, modules

    def _check(self, file: Path, handle: Any, modules: list[str], config: AdapterConfig) -> None:
        keys = set(handle.keys())
        for module in modules:
            targeted = not config.targets or any(ends_with(module, target) for target in config.targets)
            if module not in self._parts or not targeted:
                raise CheckpointError(f"{file}: {module!r:.120} is not a module that the adapter may have")
            rank, part = config.rank_of(module), self._parts[module]
            for matrix, shape in (("A", (rank, part.shape[1])), ("B", (part.shape[0], rank))):
                _check_tensor(file, handle, keys, _key(module, matrix), shape)
        expected = self._expected(config) if config.all_layers else iter(())
        missing = next((module for module in expected if module not in modules), None)
        if missing is not None or not modules:
            raise CheckpointError(f"{file}: the matrices of {missing or 'all modules'} are missing")

    def _expected(self, config: AdapterConfig) -> Iterator[str]:
        return (module for module in self._parts if any(ends_with(module, target) for target in config.targets))

    def _fill(self, module: str, a: torch.Tensor, b: torch.Tensor, target: HostAdapter) -> None:
        place, number = self._layout.modules[module]
        part, rank = place.parts[number], len(a)
        first, end = number * self._layout.max_rank, list(accumulate(place.rows))[number]
        all_a, all_b = self._layout.views(place, target.numbers)
        own_a, own_b = all_a[first : first + rank], all_b[end - place.rows[number] : end, :rank]
        if part.columns is None:
            own_a.copy_(a)
        else:
            part.columns.copy(a, own_a, 1)
        if part.rows is None:
            own_b.copy_(b)
        else:
            part.rows.copy(b, own_b, 0)


def _key(module: str, matrix: str) -> str:
    return f"{PREFIX}{module}.lora_{matrix}.weight"


def _module(file: Path, key: str) -> str:
    """The module of a tensor. Raises `CheckpointError` for tensors that are not LoRA's."""
    module = key.removeprefix(PREFIX)
    for matrix in "AB":
        if key.startswith(PREFIX) and module.endswith(f".lora_{matrix}.weight"):
            return module.removesuffix(f".lora_{matrix}.weight")
    raise CheckpointError(f"{file}: {key!r:.120} is not a matrix of a LoRA layer; only those are supported")


def _check_tensor(file: Path, handle: Any, keys: set[str], key: str, shape: tuple[int, ...]) -> None:
    if key not in keys:
        raise CheckpointError(f"{file}: {key:.120} is missing")
    view = handle.get_slice(key)
    if view.get_dtype() not in DTYPES:
        raise CheckpointError(
            f"{file}: {key:.120} is of type {view.get_dtype()}; it must be one of {', '.join(DTYPES)}"
        )
    if tuple(view.get_shape()) != shape:
        raise CheckpointError(
            f"{file}: {key:.120} has shape {list(view.get_shape())}, but the base model and the adapter's rank ask for "
            f"{list(shape)}"
        )


def _tensor(file: Path, handle: Any, key: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = handle.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {key:.120} cannot be read: {error}") from error
    return tensor
