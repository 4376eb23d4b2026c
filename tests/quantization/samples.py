"""`quantization_config`s of compressed-tensors as checkpoints on hubs have them, with all that comes along."""

import copy
import json
from typing import Any

import torch

from bladellm_runtime.quantization.compressed_tensors import CompressedTensors
from bladellm_runtime.quantization.scheme import Scheme
from tests.quantization.reference import fields

Config = dict[str, Any]

W4A16: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": "weight",
                "block_structure": None,
                "dynamic": False,
                "group_size": 128,
                "num_bits": 4,
                "observer": "mse",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "global_compression_ratio": 1.8960408394474443,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
W8A8: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": "memoryless",
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.2388928930468547,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
    "sparsity_config": {
        "format": "dense",
        "global_sparsity": 0.13,
        "ignore": [],
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
        "targets": [],
    },
}
FP8_DYNAMIC: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.463543865167781,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.11.0",
}
FP8_STATIC_KV: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": False,
                "num_bits": 8,
                "observer": "minmax",
                "strategy": "tensor",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "num_bits": 8,
                "observer": "minmax",
                "strategy": "tensor",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "naive-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": {
        "dynamic": False,
        "num_bits": 8,
        "observer": "minmax",
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    },
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
}
MIXED: Config = {
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "input_activations": {
                "dynamic": True,
                "num_bits": 8,
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["re:.*self_attn\\.(q|k|v)_proj$", "model.layers.2.mlp.up_proj"],
            "weights": {"dynamic": False, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"},
        },
        "group_1": {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": False, "type": "int"},
        },
        "group_2": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["re:.*mlp\\.(up|gate)_proj", "re:.*\\.2\\.mlp.*"],
            "weights": {"group_size": -1, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"},
        },
        "group_3": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["re:.*lay.*\\.2\\..*gate_proj", "re:down_proj"],
            "weights": {"group_size": 16, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"},
        },
    },
    "format": "mixed-precision",
    "ignore": ["lm_head", "model.layers.0.self_attn.q_proj", "re:model\\.layers\\.1\\.mlp\\.down_proj"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "version": "0.12.2",
}
UP = "model.layers.0.mlp.up_proj"
SCHEMES = (
    Scheme(4, "int", 16),
    Scheme(4, "int", 48, symmetric=False),
    Scheme(4),
    Scheme(4, symmetric=False),
    Scheme(8, "int", 24),
    Scheme(8, "int", 16, symmetric=False),
    Scheme(8),
    Scheme(8, symmetric=False),
    Scheme(8, activations="dynamic"),
    Scheme(8, symmetric=False, activations="dynamic"),
    Scheme(8, activations="static"),
    Scheme(8, "fp8"),
    Scheme(8, "fp8", activations="dynamic"),
    Scheme(8, "fp8", activations="static"),
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def parse(values: Config) -> CompressedTensors:
    return CompressedTensors.parse(fields(json.loads(json.dumps(values))))


def changed(values: Config, path: str, value: Any) -> Config:
    """A copy with the value at a dotted path of group_0, or of the whole after a slash, replaced."""
    result = copy.deepcopy(values)
    place = result if path.startswith("/") else result["config_groups"]["group_0"]
    *parents, last = path.removeprefix("/").split(".")
    for parent in parents:
        place = place[parent]
    place[last] = value
    return result
