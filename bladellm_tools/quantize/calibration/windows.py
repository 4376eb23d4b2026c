"""From texts to calibration windows: documents drawn by seed, tokenized, joined and cut."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bladellm_runtime.errors import ParameterError, UserError
from bladellm_runtime.text.chat import render_chat
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.calibration.texts import FLAG, Document, built_in, read_documents

ADVISED_TOKENS = 2**15
"""Below it the second moments of a layer's inputs are poorly known: 64 windows of 512 tokens, a quarter of AWQ's."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """windows: int64 [samples, tokens]. source: where the texts are from. warning: what is wrong with them, if so."""

    windows: torch.Tensor
    source: str
    warning: str | None = None

    @property
    def tokens(self) -> int:
        """In all windows together."""
        return self.windows.numel()


def calibrate_with(args: QuantizeArgs, tokenizer: Tokenizer, length: int) -> Calibration:
    """The windows of the flags' texts, `length` tokens each. Raises `UserError` for texts that cannot be used."""
    documents, source = documents_of(args)
    tokens = draw_tokens(documents, tokenizer, args.max_samples * length, args.seed, source)
    windows = draw_windows(tokens, args.max_samples, length, args.seed)
    return Calibration(windows, source, shortage(windows, args.max_samples * length, source))


def documents_of(args: QuantizeArgs) -> tuple[Sequence[Document], str]:
    """The texts, and what to call them: those of --calib_data and --calib_data_file, else the built-in ones."""
    documents: list[Document] = [text.strip() for text in args.calib_data if text.strip()]
    if args.calib_data and not documents:
        raise UserError("--calib_data holds no text; give one text or more, or leave the flag out")
    if args.calib_data_file is not None:
        documents += read_documents(args.calib_data_file)
    if not documents:
        return built_in(), "the built-in text"
    named = ("--calib_data" if args.calib_data else None, args.calib_data_file and f"{FLAG} {args.calib_data_file}")
    return documents, " and ".join(name for name in named if name)


def draw_tokens(documents: Sequence[Document], tokenizer: Tokenizer, wanted: int, seed: int, source: str) -> list[int]:
    """Tokens of documents in an order drawn by `seed`, each ended by the end token, until `wanted` are there.

    Raises `UserError` where there is not one token, or a chat cannot be rendered.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    end = tokenizer.eos_token_ids[:1]
    tokens: list[int] = []
    for number in order:
        ids = _tokenize(documents[number], tokenizer, f"{source}, text {number + 1}")
        if ids:
            tokens += [*ids, *end]
        if len(tokens) >= wanted:
            break
    if not tokens:
        raise UserError(f"{source} has no tokens; give texts the model knows, about {ADVISED_TOKENS:,} tokens in all")
    return tokens


def _tokenize(document: Document, tokenizer: Tokenizer, place: str) -> list[int]:
    try:
        if isinstance(document, str):
            return tokenizer.encode(document, param="text")
        return render_chat(tokenizer, document, add_generation_prompt=False)
    except ParameterError as error:
        raise UserError(f"{place} cannot be tokenized: {error}") from error


def draw_windows(tokens: Sequence[int], samples: int, length: int, seed: int) -> torch.Tensor:
    """int64 [S, T]: neighbouring stretches of T = length tokens, S of them drawn by `seed` where there are more.

    Fewer tokens than one window make one shorter window.
    """
    ids = torch.tensor(tokens, dtype=torch.int64)
    if len(ids) < length:
        return ids.unsqueeze(0)
    windows = ids[: len(ids) // length * length].view(-1, length)
    chosen = sorted(random.Random(seed).sample(range(len(windows)), min(samples, len(windows))))
    return windows[chosen].contiguous()


def shortage(windows: torch.Tensor, wanted: int, source: str) -> str | None:
    """The warning where there are too few tokens to calibrate well; None where they are as many as asked for."""
    tokens = windows.numel()
    if tokens >= min(ADVISED_TOKENS, wanted):
        return None
    return (
        f"{source} has {tokens:,} tokens and {ADVISED_TOKENS:,} or more are advised: "
        "the result may be worse than without calibration; give more text with --calib_data_file"
    )
