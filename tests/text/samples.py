"""Tokenizers, texts and templates that the tests of this folder share."""

import functools
import random
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bladellm_runtime.request import SamplingParams
from bladellm_runtime.text.template import ChatTemplate
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_runtime.wire.messages import AddRequest

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "models" / "demo"
WORDS = ["▁", "▁the", "▁cat", "the", "cat", "s", "▁你", "你", "好", "é", "<", ">", "/", "|", "a", "b", "▁▁", "\n"]
SPECIALS = ["<s>", "</s>", "<|user|>", "<|end of turn|>"]

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""Any text without surrogates, NUL and unassigned characters included."""
spicy_text = st.lists(
    st.sampled_from(["😀", "👨‍👩‍👧", "é", "e\u0301", " ", "  ", "\n", "\0", "<", "|", "end", "abc", "你好", "�", ">"]),
    max_size=20,
).map("".join)
any_text = unicode_text | spicy_text


@functools.cache
def demo() -> Tokenizer:
    """The demo model's byte-level tokenizer."""
    return Tokenizer.load(DEMO)


def sentencepiece_backend(prepend: str = "normalizer") -> Backend:
    """A tokenizer with `▁` spaces, byte fallback and a decoder like Llama 2's; `prepend` names a variant."""
    vocab = ["<unk>", *SPECIALS[:2], *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    merges = [("▁", "▁"), ("▁", "你")]
    vocab_ids = {token: i for i, token in enumerate(dict.fromkeys(vocab))}
    for piece in ("▁t", "▁th", "th", "▁c", "▁ca", "ca", "h", "e", "t", "c"):
        vocab_ids.setdefault(piece, len(vocab_ids))
    merges += [("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t"), ("▁", "the"), ("▁", "cat")]
    backend = Backend(models.BPE(vocab_ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Metaspace() if prepend == "old decoder" else decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return backend


@functools.cache
def sentencepiece(prepend: str = "normalizer", template: str | None = None) -> Tokenizer:
    """`sentencepiece_backend` as a `Tokenizer`."""
    chat_template = None if template is None else ChatTemplate(template)
    return Tokenizer(sentencepiece_backend(prepend), eos_token_ids=[2], chat_template=chat_template)


def add_request(prompt: list[int] | None = None, **params: object) -> AddRequest:
    """A request as the front end sends it."""
    return AddRequest(1, prompt or [5, 6], SamplingParams(max_tokens=None, **params), 0, 0.0)


def split_randomly(items: list, seed: int) -> list[list]:
    """`items` cut into pieces of 0 to 4."""
    rng = random.Random(seed)
    pieces = []
    while items:
        size = rng.randrange(5)
        pieces.append(items[:size])
        items = items[size:]
    return pieces
