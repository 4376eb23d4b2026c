"""Tiny models to quantize, jobs with and without data, and what every finished output must be."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

from bladellm_runtime.quantization.compressed_tensors import CompressedTensors
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.registry import make_algorithm
from bladellm_tools.quantize.job import Progress, QuantizeJob

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
W4 = Scheme(4, "int", 16)
W4_ASYMMETRIC = Scheme(4, "int", 32, symmetric=False)
W8A8 = Scheme(8, "int", activations="dynamic")
FP8 = Scheme(8, "fp8", activations="dynamic")
CPU = torch.device("cpu")
GATE_MEMBERS = ("mlp.gate_proj", "mlp.up_proj")


def save_model(folder: Path, family: str = "llama", **options):
    """A random model of three layers with a few small files beside it, and one of code."""
    from tests.models.harness import save_tiny  # and with it transformers, which a job alone has no use for

    model = save_tiny(folder, family, **{**SIZES, **options})
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return model


def windows(samples: int = 6, tokens: int = 21) -> torch.Tensor:
    from tests.models.harness import VOCAB

    return torch.randint(0, VOCAB, (samples, tokens))


def job_of(model: Path, output: Path, algorithm: str = "gptq", **options) -> QuantizeJob:
    """A 4-bit job on the CPU in float32 with fresh windows, as far as `options` do not say otherwise."""
    fields = {
        "scheme": W4,
        "format": CompressedTensors,
        "windows": options["windows"] if "windows" in options else windows(),
        "devices": (CPU,),
        "dtype": torch.float32,
        "batch": 4,
        "settings": {"algorithm": algorithm, "damp": 0.01},
    }
    make = partial(make_algorithm, algorithm, alpha=0.6 if "smoothquant" in algorithm else None)
    return QuantizeJob(model=model, output=output, algorithm=make, **{**fields, **options})


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found


class Steps(Progress):
    """Counts the calls and does `act` at the one numbered `at`; `seen` lists them."""

    def __init__(self, at: int = -1, act: Callable[[], None] | None = None) -> None:
        self.at, self.act = at, act
        self.seen: list[tuple] = []
        self.peak: dict[str, int] = {}

    def plan(self, layers: int, peak_bytes: dict[str, int]) -> None:
        self.peak = peak_bytes
        self._step("plan", layers)

    def layer(self, index: int, stage: str) -> None:
        self._step(stage, index)

    def done(self, index: int) -> None:
        self._step("done", index)

    def _step(self, *what) -> None:
        self.seen.append(what)
        if len(self.seen) - 1 == self.at and self.act is not None:
            self.act()
