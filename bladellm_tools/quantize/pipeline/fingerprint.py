"""What makes two runs the same work, as digests by name: a resumed run must have all of them in common."""

import json
import os
from pathlib import Path

import torch

import bladellm_runtime
from bladellm_tools.quantize.job import QuantizeJob
from bladellm_tools.quantize.pipeline.files import digest
from bladellm_tools.quantize.pipeline.source import FloatModel

Fingerprint = dict[str, str]

WITHOUT_EFFECT = (
    "batch_size",
    "cpu_offload",
    "device",
    "model",
    "num_gpus",
    "output_dir",
    "report",
    "report_data",
    "resume",
)
"""Settings that change where and how fast, not what. The model and the data count by what is in them."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each weight file so many pieces of this length are hashed, evenly spaced."""


def fingerprint_of(job: QuantizeJob, model: FloatModel, algorithm: str) -> Fingerprint:
    """All that decides the result."""
    parts = {f"model file {path.relative_to(model.folder)}": weight_file_digest(path) for path in model.files}
    parts["model file config.json"] = digest((model.folder / "config.json").read_bytes())
    parts["calibration data"] = windows_digest(job.windows)
    parts["version of BladeLLM Open"] = bladellm_runtime.__version__
    values: dict[str, object] = {
        "scheme": str(job.scheme),
        "format": job.format.name,
        "algorithm": algorithm,
        "type of activations": str(job.dtype),
        "fallback_ratio": job.fallback_ratio,
        "ignore": job.ignore,
        "kv_scales": job.kv_scales,
        "scrambled": job.scrambled,
        "pad_multiple": job.pad_multiple,
    }
    values |= {f"--{name}": value for name, value in job.settings.items() if name not in WITHOUT_EFFECT}
    return parts | {name: json.dumps(value, default=str) for name, value in values.items()}


def differences(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Names of what is not the same, shown with both values where they are short."""
    return [_shown(name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)]


def weight_file_digest(path: Path) -> str:
    """Of a safetensors file: its size, time of change, header, and samples of its bytes; reads at most 300 KiB more
    than the header."""
    status = path.stat()
    with path.open("rb") as file:
        header = file.read(8 + min(int.from_bytes(file.read(8), "little"), status.st_size))
        pieces = [str((status.st_size, status.st_mtime_ns)).encode(), header]
        for number in range(SAMPLES):
            file.seek(max(status.st_size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1), os.SEEK_SET)
            pieces.append(file.read(SAMPLE_BYTES))
    return digest(b"".join(pieces))


def windows_digest(windows: torch.Tensor | None) -> str:
    if windows is None:
        return "none"
    return digest(str(tuple(windows.shape)).encode() + windows.cpu().contiguous().numpy().tobytes())


def _shown(name: str, old: str | None, new: str | None) -> str:
    if name.startswith(("model file", "calibration data")):
        return name
    return f"{name} ({old} then, {new} now)"[:120]
