"""Random checkpoints of families that are not served, by transformers or, for ChatGLM, by their names and shapes."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

FILE = "model.safetensors"


def save_bloom(folder: Path) -> None:
    config = transformers.BloomConfig(vocab_size=200, hidden_size=48, n_layer=2, n_head=6)
    transformers.BloomForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def save_opt(folder: Path) -> None:
    config = transformers.OPTConfig(
        vocab_size=200, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, ffn_dim=100, word_embed_proj_dim=48
    )
    transformers.OPTForCausalLM(config).to(torch.float16).save_pretrained(folder)


def save_chatglm(folder: Path) -> None:
    """ChatGLM2 and 3: query, key and value heads one kind after the other, gate above up."""
    heads, kv_heads, dim, hidden, inner, vocab = 6, 2, 8, 48, 52, 200
    config = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 2, "num_attention_heads": heads,
        "multi_query_attention": True, "multi_query_group_num": kv_heads, "kv_channels": dim, "hidden_size": hidden,
        "ffn_hidden_size": inner, "padded_vocab_size": vocab,
    }  # fmt: skip
    rows = (heads + 2 * kv_heads) * dim
    tensors = {
        "transformer.embedding.word_embeddings.weight": torch.randn(vocab, hidden),
        "transformer.rotary_pos_emb.inv_freq": torch.randn(dim // 4),
        "transformer.encoder.final_layernorm.weight": torch.randn(hidden),
        "transformer.output_layer.weight": torch.randn(vocab, hidden),
    }
    for layer in range(2):
        tensors |= {
            f"transformer.encoder.layers.{layer}.{name}": torch.randn(shape)
            for name, shape in {
                "input_layernorm.weight": (hidden,),
                "self_attention.query_key_value.weight": (rows, hidden),
                "self_attention.query_key_value.bias": (rows,),
                "self_attention.dense.weight": (hidden, heads * dim),
                "post_attention_layernorm.weight": (hidden,),
                "mlp.dense_h_to_4h.weight": (2 * inner, hidden),
                "mlp.dense_4h_to_h.weight": (hidden, inner),
            }.items()
        }
    _save(folder, config, tensors)


def save_chatglm_6b(folder: Path) -> None:
    """The first ChatGLM: query, key and value of one head after the other, with biases everywhere."""
    heads, hidden, vocab = 6, 48, 200
    config = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 2, "num_attention_heads": heads,
        "hidden_size": hidden, "inner_hidden_size": 4 * hidden, "vocab_size": vocab,
    }  # fmt: skip
    tensors = {
        "transformer.word_embeddings.weight": torch.randn(vocab, hidden),
        "transformer.final_layernorm.weight": torch.randn(hidden),
        "lm_head.weight": torch.randn(vocab, hidden),
    }
    sizes = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (4 * hidden, hidden),
        "mlp.dense_4h_to_h": (hidden, 4 * hidden),
    }
    for layer in range(2):
        for name, shape in sizes.items():
            tensors[f"transformer.layers.{layer}.{name}.weight"] = torch.randn(shape)
            tensors[f"transformer.layers.{layer}.{name}.bias"] = torch.randn(shape[0])
    _save(folder, config, tensors)


def _save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.half() for key, tensor in tensors.items()}, folder / FILE, metadata={"format": "pt"})


SAVED = {"bloom": save_bloom, "opt": save_opt, "chatglm": save_chatglm, "chatglm-6b": save_chatglm_6b}
