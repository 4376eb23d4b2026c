"""PEFT folders with random matrices for tiny models, and those models with an adapter merged in."""

import copy
import json
import random
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
    folder: Path, model: transformers.PreTrainedModel, rank: int = 4, targets: tuple[str, ...] = MODULES, **fields
) -> Path:
    """A random adapter for every layer of a model. fields: further ones of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1.5 * rank, "target_modules": list(targets), **fields}
    (folder / CONFIG).write_text(json.dumps(config))
    ranks = fields.get("rank_pattern", {})
    tensors = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in targets:
            own = ranks.get(leaf, rank)
            size = 0.15 * random.uniform(0.5, 1.5)
            tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(own, module.in_features) * size
            tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(module.out_features, own) * size
    save_file(tensors, folder / TENSORS)
    return folder


def edit_config(folder: Path, **fields) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(folder: Path, **changes) -> None:
    """Replace, add or, where a change is None, remove tensors."""
    tensors = load_file(folder / TENSORS) | changes
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / TENSORS)


@torch.no_grad()
def merged(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """A copy of the model whose weights are `W + scale · B A`, computed in float64."""
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / TENSORS)
    model = copy.deepcopy(model).float()
    for name, module in model.named_modules():
        key, leaf = f"{PREFIX}{name}", name.rpartition(".")[2]
        if f"{key}.lora_A.weight" not in tensors:
            continue
        a, b = (tensors[f"{key}.lora_{matrix}.weight"].double() for matrix in "AB")
        alpha = config.get("alpha_pattern", {}).get(leaf, config["lora_alpha"])
        scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        module.weight.copy_(module.weight.double() + scale * (b @ a))
    return model
