"""The model to quantize: a folder in floating point, read decoder layer by decoder layer and never written to."""

import dataclasses
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.checkpoint import Checkpoint
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.folder import file_in, read_json
from bladellm_runtime.models.split_folder import open_whole
from bladellm_runtime.models.weights import weight_table
from bladellm_tools.quantize.algorithms.layer import LayerWeights

QUANTIZED_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB")
"""Tensors only a quantized checkpoint has, should its config not say so."""


class FloatModel:
    """An open model. `spec` and `config` (config.json) count the padding; `files` are the safetensors."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, inner: int, pin: bool) -> None:
        self.folder = folder
        self.config = read_json(file_in(folder, "config.json"))
        stored = read_model_spec(folder)
        self.spec = dataclasses.replace(stored, intermediate_size=inner)
        self.files = checkpoint.paths
        self._stored_inner = stored.intermediate_size
        self._checkpoint = checkpoint
        self._pin = pin
        self._keys = [part.key for row in weight_table(stored).values() for part in row]
        if inner != stored.intermediate_size:
            self.config["intermediate_size"] = inner

    @property
    def bytes(self) -> int:
        """Of the safetensors files."""
        return sum(path.stat().st_size for path in self.files)

    def layer(self, index: int) -> LayerWeights:
        """The tensors of decoder layer `index` on the CPU, of the types they are stored in, padded."""
        prefix = layer_prefix(index)
        names = (key.removeprefix(prefix) for key in self._keys if key.startswith(prefix))
        return {name: self._read(prefix + name) for name in names}

    def layers(self, first: int = 0) -> Generator[tuple[int, LayerWeights]]:
        """(index, tensors) of the layers from `first` on; the next one is read while the caller works."""
        if first >= self.spec.layers:
            return
        with ThreadPoolExecutor(1, "read-ahead") as pool:
            ahead = pool.submit(self.layer, first)
            for index in range(first, self.spec.layers):
                weights = ahead.result()
                if index + 1 < self.spec.layers:
                    ahead = pool.submit(self.layer, index + 1)
                yield index, weights
                del weights

    def outer(self) -> dict[str, torch.Tensor]:
        """The tensors outside the decoder layers by their keys: embedding, final norm, head where it is its own."""
        keys = [key for key in self._keys if not key.startswith("model.layers.")]
        return {key: self._read(key) for key in keys}

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden], as stored, on the CPU."""
        return self._read("model.embed_tokens.weight")

    def refuse_unusable(self, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
        """Raise `CheckpointError` naming file and tensor where a value is NaN or infinite; waits for the device once.

        prefix: what the names in `tensors` lack of their keys.
        """
        if not tensors:
            return
        finite = torch.stack([torch.isfinite(tensor.sum(dtype=torch.float32)) for tensor in tensors.values()])
        if bool(finite.all()):
            return
        for name, tensor in tensors.items():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                file, values = self._checkpoint.files[prefix + name], "1 value" if bad == 1 else f"{bad} values"
                raise CheckpointError(
                    f"{file}: {prefix}{name} holds {values} that are NaN or infinite; download the model again"
                )

    def _read(self, key: str) -> torch.Tensor:
        """One tensor, really read (not only mapped), padded where it has the MLP's inner size."""
        tensor = self._checkpoint.read(key)
        extra = self.spec.intermediate_size - self._stored_inner
        if extra:
            tensor = _pad(key, tensor, extra)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
        return copy.copy_(tensor)


@contextmanager
def open_float_model(folder: Path, pad_multiple: int | None = None, pin: bool = False) -> Iterator[FloatModel]:
    """Open a model folder, be it a split one, and check it against its config.

    pad_multiple: the MLP's inner size is padded with zeros to a multiple of it, which changes no output. pin: layers
    are read into pinned memory, for devices to copy from. Raises `CheckpointError` for a folder that cannot be loaded
    or is quantized already.
    """
    _refuse_quantized(folder, read_json(file_in(folder, "config.json")))
    spec = read_model_spec(folder)
    with open_whole(folder) as checkpoint:
        for key, file in checkpoint.files.items():
            if key.endswith(QUANTIZED_SUFFIXES):
                raise CheckpointError(
                    f"{file}: {key} says that the model is quantized already; give --model the float one"
                )
        checkpoint.check(weight_table(spec), spec)
        multiple = pad_multiple or 1
        yield FloatModel(folder, checkpoint, -(-spec.intermediate_size // multiple) * multiple, pin)


def layer_prefix(index: int) -> str:
    """What the keys of a decoder layer's tensors begin with."""
    return f"model.layers.{index}."


def _refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    section = config.get("quantization_config") or config.get("compression_config")
    if section:
        method = section.get("quant_method", "unnamed") if isinstance(section, dict) else "unnamed"
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization_config says that the model is quantized already ({method!r:.40}); "
            "give --model the float one"
        )


def _pad(key: str, tensor: torch.Tensor, extra: int) -> torch.Tensor:
    """Zero rows below the gate's and up's weights and biases, zero columns beside down's."""
    if ".mlp.gate_proj." in key or ".mlp.up_proj." in key:
        return F.pad(tensor, (0, 0, 0, extra) if tensor.dim() == 2 else (0, extra))
    return F.pad(tensor, (0, extra)) if key.endswith(".mlp.down_proj.weight") else tensor
