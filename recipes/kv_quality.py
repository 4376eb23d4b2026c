"""What a quantized KV cache costs: perplexity and KL of each KV format beside the unquantized cache, as a table.

    python recipes/kv_quality.py MODEL --data FILE ... [--window 2048] [--outliers 4 --factor 16] [--json FILE]

The model runs in transformers; every token's key, after rotary, and value is rounded and read back where it enters the
cache, so attention sees what our engine stores. `rotated` formats turn keys by the Hadamard rotation first. Large
models have channels of keys far above the others (Liu et al., KIVI, 2024); --outliers raises some channels by a factor
before rounding and lowers them after, which is what such a model would do, its queries made smaller as much.
"""

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bladellm_kernels.hadamard import hadamard, hadamard_matrix
from bladellm_kernels.kv_format import KV_FORMATS, KvFormat
from bladellm_kernels.kv_quantize import kv_quantize
from bladellm_kernels.kv_read import dequantize_kv
from transformers import AutoModelForCausalLM, DynamicCache

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.console import fail
from bladellm_tools.evaluate.scoring import PairScores, Scores, compare_tokens
from bladellm_tools.evaluate.summary import Summary, summarise
from bladellm_tools.evaluate.windows import TextWindows, read_text, tokenize

ROTATED = ("int4", "int4_affine")


@dataclass(frozen=True, slots=True)
class Variant:
    """How keys and values are stored. channels: float32 [D], what keys are multiplied by first; None for nothing."""

    format: KvFormat
    rotate: bool = False
    channels: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return self.format.name + (" rotated" if self.rotate else "")

    def bits(self, head_dim: int) -> float:
        """Bits a number takes, scales included."""
        return 8 * self.format.number_bytes(torch.bfloat16) + 16 * self.format.planes / head_dim

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys [..., D] as they are read back."""
        raised = x if self.channels is None else x * self.channels.to(x)
        if self.rotate:
            matrix = hadamard_matrix(x.shape[-1], torch.float32, x.device)
            back = hadamard(self.values(hadamard(raised, matrix)), matrix.T)
        else:
            back = self.values(raised)
        return back if self.channels is None else back / self.channels.to(x)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Values [..., D] as they are read back."""
        if not self.format.quantized:
            return x
        return dequantize_kv(*kv_quantize(x, self.format), self.format).to(x.dtype)


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """A cache that holds what a variant reads back."""

    def __init__(self, config: Any, variant: Variant) -> None:
        super().__init__(config=config)
        self.variant = variant

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.variant.keys(key_states), self.variant.values(value_states)
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(k, v, *args, **kwargs)
        return updated


@torch.inference_mode()
def log_probabilities(model: Any, ids: torch.Tensor, variant: Variant) -> torch.Tensor:
    """float32 [T, vocab] of a window [T] of tokens."""
    cache = RoundedCache(model.config, variant)
    logits: torch.Tensor = model(ids.unsqueeze(0), past_key_values=cache, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


@torch.inference_mode()
def measure(model: Any, windows: torch.Tensor, variants: list[Variant]) -> list[Scores]:
    """Scores of every variant beside the unquantized cache. windows: int64 [W, T]."""
    parts: list[list[Scores]] = [[] for _ in variants]
    for window in windows.to(model.device):
        baseline = log_probabilities(model, window[:-1], Variant(KV_FORMATS["no_quant"]))
        for kept, variant in zip(parts, variants, strict=True):
            found = compare_tokens(log_probabilities(model, window[:-1], variant), baseline, window[1:])
            assert found.baseline is not None
            assert found.kl is not None
            assert found.equal is not None
            pair = PairScores(_mean(found.baseline), found.kl.cpu()[None], _mean(found.equal))
            kept.append(Scores(_mean(found.losses), pair))
    return [_joined(kept) for kept in parts]


def _mean(values: torch.Tensor) -> torch.Tensor:
    return values.double().mean().cpu()[None]


def _joined(parts: list[Scores]) -> Scores:
    pairs = [part.pair for part in parts if part.pair is not None]
    fields = ("losses", "kl", "agreement")
    pair = PairScores(*(torch.cat([getattr(pair, field) for pair in pairs]) for field in fields))
    return Scores(torch.cat([part.losses for part in parts]), pair)


def outlier_channels(head_dim: int, channels: int, factor: float, seed: int) -> torch.Tensor:
    """float32 [D]: `factor` in `channels` channels at random and in their rotary partners, 1 in the others."""
    if not 1 <= channels <= head_dim // 2:
        raise ConfigError(f"--outliers {channels} must be from 1 to {head_dim // 2}, half the head size")
    half = torch.ones(head_dim // 2)
    half[torch.randperm(head_dim // 2, generator=torch.Generator().manual_seed(seed))[:channels]] = factor
    return torch.cat((half, half))


def variants_of(args: argparse.Namespace, head_dim: int) -> list[Variant]:
    channels = None
    if args.outliers:
        channels = outlier_channels(head_dim, args.outliers, args.factor, args.seed)
    made = []
    for name in args.format:
        made.append(Variant(KV_FORMATS[name], channels=channels))
        if name in ROTATED:
            made.append(Variant(KV_FORMATS[name], rotate=True, channels=channels))
    return made


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def markdown(rows: list[tuple[Variant, Summary]], head_dim: int) -> str:
    header = ("KV format", "bits", "perplexity", "against no_quant", "KL", "KL p99", "top-1")
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    first = rows[0][1].baseline
    if first is not None:
        lines.append(f"| no_quant | 16 | {first.perplexity.value:.3f} | | | | |")
    for variant, summary in rows:
        pair = summary.baseline
        if pair is None:
            continue
        cells = (
            variant.name,
            f"{variant.bits(head_dim):.2f}",
            f"{summary.perplexity.value:.3f}",
            f"{(pair.ratio.value - 1) * 100:+.3f} %",
            f"{pair.kl_mean.value:.6f}",
            f"{pair.kl_p99:.5f}",
            f"{pair.agreement.value * 100:.2f} %",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    formats = [name for name, format in KV_FORMATS.items() if format.quantized]
    parser.add_argument("model", type=Path, help="model folder that transformers loads")
    parser.add_argument("--data", nargs="+", required=True, help="texts to evaluate on")
    parser.add_argument("--format", nargs="+", default=formats, choices=formats, help="KV formats")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--max_windows", type=int, default=10, help="windows of each text")
    parser.add_argument("--outliers", type=int, default=0, help="channels of keys to raise, with their rotary partners")
    parser.add_argument("--factor", type=float, default=16.0, help="how far they are raised")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of channels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="type of the model")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(given)


def run(given: list[str]) -> None:
    args = arguments(given)
    tokenizer = Tokenizer.load(args.model)
    texts: list[TextWindows] = []
    for path in args.data:
        # A window's inputs have the length asked for; its last token is a target only.
        texts.append(tokenize(read_text(path), tokenizer, args.window + 1, args.max_windows))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    head_dim = head_dim_of(model.config)
    variants = variants_of(args, head_dim)
    scores = [measure(model, text.windows, variants) for text in texts]
    rows = [
        (variant, summarise([text[index] for text in scores], args.window + 1))
        for index, variant in enumerate(variants)
    ]
    print(markdown(rows, head_dim), end="")
    if args.json is not None:
        names = ("data", "window", "max_windows", "outliers", "factor", "seed", "device", "dtype")
        settings = {"model": str(args.model), **{name: getattr(args, name) for name in names}}
        figures = [
            {"format": variant.name, "bits": variant.bits(head_dim), **asdict(summary)} for variant, summary in rows
        ]
        found = {"settings": settings, "torch": torch.__version__, "machine": platform.machine(), "rows": figures}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def main() -> int:
    try:
        run(sys.argv[1:])
    except UserError as error:
        fail(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
