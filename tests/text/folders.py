"""Tokenizer folders with the settings that published models have, for a small byte-level and a small `▁` tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tests.text.samples import sentencepiece_backend

Files = dict[str, Any]
"""Content by file name: a text, or what is written as JSON."""

TEXTS = [
    "",
    "the cat",
    " the  cat ",
    "<s>the cat</s>",
    "a<|user|> b <tool>",
    "你好 é\n",
    "<new>x</new>",
    "a <img>b<|im|>",
]
"""Texts with tokens that the folders add, and without."""


def byte_level_backend() -> Backend:
    """A tokenizer of bytes and a few words, like GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|end|>", *alphabet, "th", "the", "Ġc", "Ġca", "Ġcat"])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "c"), ("Ġc", "a"), ("Ġca", "t")]
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<s>", "</s>"])
    return backend


def with_beginning(backend: Backend) -> Backend:
    """`backend` with a beginning-of-text token around every text, like Llama's."""
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return backend


def padded(backend: Backend, pad_token: str) -> Backend:
    """`backend` as saved in the middle of training: it pads and truncates."""
    backend.enable_padding(pad_token=pad_token)
    backend.enable_truncation(7)
    return backend


def backends() -> dict[str, Backend]:
    """The kinds of tokenizer.json."""
    plain = sentencepiece_backend("normalizer")
    plain.add_tokens([AddedToken("<img>", lstrip=True), AddedToken("wide", single_word=True)])
    return {
        "byte-level": byte_level_backend(),
        "byte-level, beginning": with_beginning(byte_level_backend()),
        "prepended": plain,
        "metaspace": with_beginning(sentencepiece_backend("metaspace")),
        "old decoder": sentencepiece_backend("old decoder"),
        "padded": padded(byte_level_backend(), "<s>"),
        "padded with a new token": padded(sentencepiece_backend(), "<nothing>"),
    }


def token(text: str, typed: bool = True, **fields: bool) -> dict[str, Any]:
    """A token as JSON files write it."""
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | fields
    return ({"__type": "AddedToken"} if typed else {}) | {"content": text} | flags


def listed(*tokens: dict[str, Any], first: int = 300) -> dict[str, Any]:
    """`added_tokens_decoder`."""
    return {str(first + i): each for i, each in enumerate(tokens)}


CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
KNOWN: dict[str, Files] = {
    "nothing": {},
    "empty": {CONFIG: {}},
    "strings": {CONFIG: {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "pad_token": "<pad>"}},
    "typed": {CONFIG: {"eos_token": token("</s>", rstrip=True), "bos_token": token("<new>", normalized=True)}},
    "listed": {CONFIG: {"added_tokens_decoder": listed(token("<new>", False), token("</new>", False, special=True))}},
    "listed again": {CONFIG: {"added_tokens_decoder": listed(token("</s>", False, lstrip=True)), "eos_token": "</s>"}},
    "listed, ordinary, named": {CONFIG: {"added_tokens_decoder": listed(token("<new>", False)), "eos_token": "<new>"}},
    "none listed": {CONFIG: {"added_tokens_decoder": {}, "bos_token": "<new>"}, MAP: {"eos_token": "never read"}},
    "additional": {CONFIG: {"additional_special_tokens": ["<new>", "<s>", token("<img>", special=True)]}},
    "extra": {CONFIG: {"extra_special_tokens": ["</new>", "<new>"], "additional_special_tokens": ["ignored"]}},
    "extra, named": {CONFIG: {"extra_special_tokens": {"image_token": "<img>", "im": token("<|im|>", lstrip=True)}}},
    "both, nothing new": {
        CONFIG: {
            "added_tokens_decoder": listed(token("<new>", False, special=True)),
            "additional_special_tokens": ["<new>"],
            "extra_special_tokens": {},
        }
    },
    "model's own": {CONFIG: {"image_token": "<img>", "audio_token": token("<new>"), "eos_token": "<img>"}},
    "llama 2": {
        CONFIG: {
            "add_bos_token": True,
            "add_eos_token": True,
            "bos_token": token("<s>", normalized=True),
            "eos_token": token("</s>", normalized=True),
            "legacy": False,
            "pad_token": None,
            "sp_model_kwargs": {},
            "tokenizer_class": "LlamaTokenizer",
        },
        MAP: {"bos_token": token("<s>", False), "eos_token": token("<|im|>", False), "pad_token": "<new>"},
    },
    "qwen 2": {CONFIG: {"add_bos_token": True, "bos_token": "<s>", "tokenizer_class": "Qwen2Tokenizer"}},
    "older": {
        CONFIG: {"eos_token": "</s>"},
        MAP: {"additional_special_tokens": ["<new>"], "image_token": "<img>", "cls_token": None},
        "added_tokens.json": {"</new>": 410, "</s>": 2, "<new>": 400, "<|user|>": 401},
    },
    "older, extra": {CONFIG: {"additional_special_tokens": ["</new>"]}, MAP: {"additional_special_tokens": ["<new>"]}},
    "template": {CONFIG: {"chat_template": "{{ messages }}", "clean_up_tokenization_spaces": True}},
    "template file": {CONFIG: {"chat_template": "no"}, "chat_template.jinja": "{{ messages }}\r\n你"},
    "templates": {CONFIG: {"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}},
    "no default": {CONFIG: {"chat_template": [{"name": "rag", "template": "r"}]}},
}
"""Folders that are read without transformers."""

UNKNOWN: dict[str, Files] = {
    "pattern": {CONFIG: {"fix_mistral_regex": True}},
    "no text": {CONFIG: {"eos_token": ""}},
    "ids twice": {"added_tokens.json": {"<new>": 400, "</new>": 400}},
    "ids twice, listed": {CONFIG: {"added_tokens_decoder": {"300": token("<new>", False), "0300": token("x", False)}}},
    "split": {CONFIG: {"split_special_tokens": True}},
    "versions": {CONFIG: {"fast_tokenizer_files": ["tokenizer.json"]}},
    "both": {CONFIG: {"additional_special_tokens": ["<new>"], "extra_special_tokens": []}},
    "both, listed": {
        CONFIG: {"added_tokens_decoder": {}, "additional_special_tokens": ["<new>"], "extra_special_tokens": []}
    },
    "added in the map": {CONFIG: {"bos_token": "<s>"}, MAP: {"add_bos_token": True}},
    "extra in the map": {MAP: {"extra_special_tokens": ["<new>"]}},
    "template folder": {CONFIG: {"chat_template": "no"}, "additional_chat_templates/default.jinja": "yes"},
}
"""Folders that transformers reads."""

BROKEN: dict[str, Files] = {
    "no object": {CONFIG: []},
    "no JSON": {CONFIG: "{"},
    "untyped token": {CONFIG: {"eos_token": token("</s>", typed=False)}},
    "number": {CONFIG: {"eos_token": 7}},
    "side": {CONFIG: {"padding_side": "top"}},
    "listed text": {CONFIG: {"added_tokens_decoder": {"7": "<new>"}}},
    "method": {CONFIG: {"encode": "x"}},
    "extra number": {CONFIG: {"extra_special_tokens": 7}},
    "map": {MAP: "["},
}
"""Folders that cannot be read."""


def write_folder(folder: Path, backend: Backend, files: Files) -> Path:
    """`folder`, with the tokenizer and the files in it."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_bytes(text.encode())
    return folder
