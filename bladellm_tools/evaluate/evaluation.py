"""Evaluate a model, or compare it with a baseline, both in memory at once: what the command and other tools call."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from bladellm_runtime.config import Device, Dtype
from bladellm_runtime.engine.device import pick_device, pick_dtype
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.evaluate.scoring import OnWindows, Scores, score
from bladellm_tools.evaluate.summary import Summary, summarise
from bladellm_tools.evaluate.windows import EvaluationText, TextWindows, tokenize


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """Folders of the models, the texts, and how to cut and run them. `tokenizer`: None is the model's."""

    model: Path
    texts: tuple[EvaluationText, ...]
    baseline: Path | None = None
    tokenizer: Path | None = None
    window: int = 2048
    max_windows: int | None = None
    batch: int = 1
    device: Device = "auto"
    dtype: Dtype = "auto"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model's safetensors, and of its weights as they were run."""

    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class TextResult:
    """One text: `tokens` counts all of it, `summary` speaks of its windows."""

    name: str
    tokens: int
    summary: Summary


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of each text, and of all windows together."""

    model: str
    baseline: str | None
    window: int
    device: str
    dtype: str
    size: ModelSize
    baseline_size: ModelSize | None
    overall: Summary
    texts: list[TextResult] = field(default_factory=list)


class Watcher:
    """Told how an evaluation goes on; this one says nothing."""

    def plan(self, windows: int) -> None:
        """Before the first window: how many there are."""

    def windows(self, count: int) -> None:
        """So many more are done."""


def evaluate(job: EvaluationJob, watcher: Watcher | None = None) -> Evaluation:
    """Load the models, run every window of every text, and sum up.

    Raises `UserError` for anything the user can mend, and as much of it as can be before the models are loaded.
    """
    watcher = watcher or Watcher()
    spec = read_model_spec(job.model)
    other_spec = read_model_spec(job.baseline) if job.baseline is not None else None
    check_specs(job, spec, other_spec)
    texts = read_windows(job, spec)
    device = pick_device(job.device)
    model = load(job, job.model, spec, device)
    baseline = load(job, job.baseline, other_spec, device) if job.baseline is not None and other_spec else None
    watcher.plan(sum(len(text.windows) for text in texts))
    scores = [_score(job, model, baseline, text, watcher.windows) for text in texts]
    return Evaluation(
        model=str(job.model),
        baseline=None if job.baseline is None else str(job.baseline),
        window=job.window,
        device=str(device),
        dtype=str(model.dtype).removeprefix("torch."),
        size=_size(job.model, model),
        baseline_size=_size(job.baseline, baseline) if job.baseline is not None and baseline else None,
        overall=summarise(scores, job.window),
        texts=[
            TextResult(text.name, text.tokens, summarise([result], job.window))
            for text, result in zip(texts, scores, strict=True)
        ],
    )


def check_specs(job: EvaluationJob, spec: ModelSpec, baseline: ModelSpec | None) -> None:
    """Raise `ConfigError` for models that cannot be compared, or windows above what they were made for."""
    if baseline is not None and baseline.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"--model has a vocabulary of {spec.vocab_size} tokens and --baseline one of {baseline.vocab_size}; "
            "give the model that --model was made from"
        )
    for name, one in (("model", spec), ("baseline", baseline)):
        if one is not None and job.window > one.max_position_embeddings:
            raise ConfigError(
                f"--window {job.window} is above the --{name}'s max_position_embeddings of "
                f"{one.max_position_embeddings}; lower --window"
            )


def read_windows(job: EvaluationJob, spec: ModelSpec) -> list[TextWindows]:
    """The windows of every text. Raises `ConfigError` where model and baseline read a text as different tokens."""
    tokenizer = _tokenizer(job.tokenizer or job.model, spec)
    texts = [tokenize(text, tokenizer, job.window, job.max_windows) for text in job.texts]
    if job.tokenizer is None and job.baseline is not None and (job.baseline / "tokenizer.json").is_file():
        other = _tokenizer(job.baseline, spec)
        for text, windows in zip(job.texts, texts, strict=True):
            if not torch.equal(windows.windows, tokenize(text, other, job.window, job.max_windows).windows):
                raise ConfigError(
                    f"--model and --baseline tokenize {text.name} differently; give --tokenizer_dir to use one for both"
                )
    return texts


def load(job: EvaluationJob, folder: Path, spec: ModelSpec, device: torch.device) -> Decoder:
    """A model as the server loads it."""
    dtype = pick_dtype(job.dtype, spec.dtype, device)
    return load_model(folder, spec, device=device, dtype=dtype, load_format="auto", seed=0)


def disk_bytes(folder: Path) -> int:
    """Bytes of a folder's safetensors."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    tokenizer.check_vocabulary(spec.vocab_size)
    return tokenizer


def _score(
    job: EvaluationJob, model: Decoder, baseline: Decoder | None, text: TextWindows, on_windows: OnWindows
) -> Scores:
    return score(model, text.windows, baseline, batch=job.batch, on_windows=on_windows)


def _size(folder: Path, model: Decoder) -> ModelSize:
    return ModelSize(disk_bytes(folder), model.weight_bytes)
