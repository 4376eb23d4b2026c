"""Model folders without weights, for `--load_format dummy`: `python recipes/benchmarks/shapes.py MODELS [NAME ...]`.

Writes config.json and a tokenizer, which a server needs, to MODELS/NAME. `tiny` is for trying things out.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[1] / "models" / "demo"
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
LLAMA31 = LLAMA | {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072}
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
    "checkpoint_format": "gptq",
}  # fmt: skip
LLAMA31_8B = LLAMA31 | dict(zip(NAMES, (4096, 14336, 32, 32, 8), strict=True))
SHAPES: dict[str, dict[str, Any]] = {
    "llama31-8b": LLAMA31_8B,
    "llama31-8b-w4": LLAMA31_8B | {"quantization_config": GPTQ},
    # 131 GiB in bf16: two H200s hold half of it each, and KV of some 350,000 tokens.
    "llama31-70b": LLAMA31 | dict(zip(NAMES, (8192, 28672, 80, 64, 8), strict=True)),
    # As long as the longest context measured; the model itself was trained for 4,096 tokens.
    "llama2-13b": LLAMA
    | dict(zip(NAMES, (5120, 13824, 40, 40, 40), strict=True))
    | {"vocab_size": 32000, "rope_theta": 10000.0, "max_position_embeddings": 300000},
    "qwen25-7b": QWEN2
    | dict(zip(NAMES, (3584, 18944, 28, 28, 4), strict=True))
    | {"vocab_size": 152064, "rope_theta": 1000000.0, "max_position_embeddings": 131072},
    "tiny": LLAMA
    | dict(zip(NAMES, (128, 256, 2, 4, 2), strict=True))
    | {"vocab_size": 8192, "rope_theta": 10000.0, "max_position_embeddings": 8192},
}
"""config.json by name."""


def write_shape(folder: Path, name: str, tokenizer: Path = TOKENIZER) -> Path:
    """Write config.json and the tokenizer's files to `folder`/`name`, over what is there; return where."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    copy_tokenizer(tokenizer, target)
    return target


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer between model folders."""
    for pattern in ("*token*.json", "vocab.json", "merges.txt", "chat_template.*"):
        for file in source.glob(pattern):
            shutil.copy(file, target / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model folders go")
    parser.add_argument("names", nargs="*", default=list(SHAPES), metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--tokenizer_dir", type=Path, default=TOKENIZER, help="any folder with a tokenizer")
    args = parser.parse_args()
    for name in args.names:
        if name not in SHAPES:
            parser.error(f"no shape {name}; there are {', '.join(SHAPES)}")
        print(write_shape(args.folder, name, args.tokenizer_dir))


if __name__ == "__main__":
    main()
