"""The end of a run: what a model folder holds besides weights, config.json last, then one rename."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from bladellm_runtime.distributed.manifest import MANIFEST_FILE
from bladellm_runtime.models.checkpoint import INDEX_FILE
from bladellm_runtime.models.folder import file_in
from bladellm_tools.quantize.job import ModuleReport, QuantizeJob
from bladellm_tools.quantize.pipeline.files import sync_folder, write_errors, write_file
from bladellm_tools.quantize.pipeline.output import Staging

REPORT = "quantize_report.json"
COPIED = (".json", ".jinja", ".txt")
"""Endings of the small files that go along: tokenizer, chat template, generation defaults. Never code or pickles."""
COPIED_NAMES = ("tokenizer.model",)
NOT_COPIED = ("config.json", REPORT, "evaluation.json", MANIFEST_FILE)


def small_files(folder: Path) -> list[Path]:
    """The files of the float model that its quantized form needs too. Raises `CheckpointError` for links out of it."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    wanted = [name for name in names if name.endswith(COPIED) or name in COPIED_NAMES]
    return [file_in(folder, name) for name in wanted if name not in NOT_COPIED and not name.endswith(".index.json")]


def publish(staging: Staging, copies: Sequence[Path], report: dict[str, Any], config: dict[str, Any]) -> int:
    """Complete the model folder and make it the output; returns the bytes of its safetensors."""
    for path in copies:
        write_file(staging.model / path.name, path.read_bytes())
    total = write_index(staging)
    write_file(staging.model / REPORT, _json(report))
    write_file(staging.model / "config.json", _json(config))
    with write_errors(staging.output):
        staging.model.rename(staging.output)
        sync_folder(staging.output.parent)
    shutil.rmtree(staging.root, ignore_errors=True)
    return total


def write_index(staging: Staging) -> int:
    """Write model.safetensors.index.json; returns the bytes of the shards."""
    weight_map: dict[str, str] = {}
    total = 0
    for index in range(staging.layers + 1):
        path = staging.part(index)
        total += path.stat().st_size
        with safe_open(path, framework="pt") as part:
            weight_map |= dict.fromkeys(part.keys(), path.name)
    values = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(staging.model / INDEX_FILE, _json(values))
    return total


def report_of(
    job: QuantizeJob, algorithm: str, modules: Sequence[ModuleReport], ignored: dict[str, str]
) -> dict[str, Any]:
    """What quantize_report.json says; the same for the same work, so it holds no times."""
    return {
        "algorithm": algorithm,
        "format": job.format.name,
        "scheme": {"name": job.scheme.name, **dataclasses.asdict(job.scheme)},
        "tokens": 0 if job.windows is None else job.windows.numel(),
        "settings": {name: value for name, value in job.settings.items() if name != "resume"},
        "modules": [dataclasses.asdict(module) for module in modules],
        "ignored": ignored,
    }


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False, default=str) + "\n").encode()
