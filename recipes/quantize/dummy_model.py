"""Model folders of real shapes with random bf16 weights, for measurements where values do not matter."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.weights import Part, weight_table

LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SMALL = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "llama31-8b": LLAMA31 | dict(zip(NAMES, (4096, 14336, 32, 32, 8), strict=True)),
    "llama31-70b": LLAMA31 | dict(zip(NAMES, (8192, 28672, 80, 64, 8), strict=True)),
    "tiny": LLAMA31 | SMALL | dict(zip(NAMES, (128, 256, 4, 4, 2), strict=True)),
}
"""config.json by name; `tiny` is for trying things out."""


def write_dummy_model(folder: Path, shape: str, layers: int | None, device: torch.device) -> Path:
    """Write `shape` with `layers` decoder layers (all by default) below `folder`, unless it is there; return where.

    One file a layer. Matrices are normal with a variance of 1 / inputs, norms 1. `device` makes the random numbers.
    """
    config = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    target = folder / f"{shape}-{config['num_hidden_layers']}"
    index = target / "model.safetensors.index.json"
    if index.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    files: dict[str, list[Part]] = {}
    for row in weight_table(read_model_spec(target)).values():
        for part in row:
            files.setdefault(_file_of(part.key), []).append(part)
    generator = torch.Generator(device).manual_seed(0)
    for name, parts in files.items():
        save_file({part.key: _random(part, generator) for part in parts}, target / name, {"format": "pt"})
    weight_map = {part.key: name for name, parts in files.items() for part in parts}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def drop_from_page_cache(folder: Path) -> None:
    """Make the next reader of a folder's files read the disk, where the system can be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _file_of(key: str) -> str:
    """model.layers.7.mlp.up_proj.weight lies in model-layer-00007.safetensors."""
    words = key.split(".")
    return f"model-layer-{int(words[2]):05d}.safetensors" if words[1] == "layers" else "model-outer.safetensors"


def _random(part: Part, generator: torch.Generator) -> torch.Tensor:
    if len(part.shape) == 1:
        return torch.ones(part.shape, dtype=torch.bfloat16)
    made = torch.empty(part.shape, dtype=torch.bfloat16, device=generator.device)
    return made.normal_(0.0, part.shape[1] ** -0.5, generator=generator).cpu()
