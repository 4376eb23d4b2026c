"""The staging folder beside the output: what is finished of a run, kept until all of it is.

`<output>.partial/model` becomes the output by one rename; beside it lie manifest.json and `folds`.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools.output_folder import check_new_folder, partial_folder
from bladellm_tools.quantize.job import ModuleReport
from bladellm_tools.quantize.pipeline.files import (
    TEMPORARY,
    digest,
    file_digest,
    tensor_bytes,
    write_errors,
    write_file,
)
from bladellm_tools.quantize.pipeline.fingerprint import Fingerprint, differences
from bladellm_tools.quantize.pipeline.manifest import LayerRecord, Manifest, load_manifest


@dataclass(slots=True)
class Staging:
    """The files of an unfinished output and their manifest. `layers`: the decoder layers the model has."""

    output: Path
    layers: int
    manifest: Manifest

    @property
    def root(self) -> Path:
        return partial_folder(self.output)

    @property
    def model(self) -> Path:
        """The folder that becomes the output."""
        return self.root / "model"

    def part_name(self, index: int) -> str:
        """The shard of decoder layer `index`; after the last layer's comes that of the outer tensors."""
        return f"model-{index + 1:05d}-of-{self.layers + 1:05d}.safetensors"

    def part(self, index: int) -> Path:
        return self.model / self.part_name(index)

    def folds(self, index: int) -> Path:
        """What the inputs of a layer's groups were divided by, by group."""
        return self.root / "folds" / f"{index:05d}.safetensors"

    def save_layer(
        self, tensors: dict[str, torch.Tensor], reports: list[ModuleReport], folds: dict[str, torch.Tensor]
    ) -> None:
        """Write the next layer's part and, where there are any, its folds; then count it as finished."""
        index = len(self.manifest.layers)
        folded = self._save(self.folds(index), folds) if folds else None
        self.manifest.layers.append(LayerRecord(self._save(self.part(index), tensors), reports, folded))
        self.save_manifest()

    def save_outer(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the part of the tensors outside the decoder layers."""
        self.manifest.outer = self._save(self.part(self.layers), tensors)
        self.save_manifest()

    def rewrite_layer(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        """Replace a finished part. The manifest knows of both until it is done: either may be there after a kill."""
        data = tensor_bytes(tensors)
        self.manifest.layers[index].rewritten = digest(data)
        self.save_manifest()
        write_file(self.part(index), data)

    def save_manifest(self) -> None:
        self.manifest.save(manifest_path(self.root))

    def verify(self) -> None:
        """Raise `UserError` unless every finished file is as it was written."""
        for index, record in enumerate(self.manifest.layers):
            self._verify(self.part(index), record.sha256, record.rewritten)
            if record.folds is not None:
                self._verify(self.folds(index), record.folds)
        if self.manifest.outer is not None:
            self._verify(self.part(self.layers), self.manifest.outer)

    def is_rewritten(self, index: int) -> bool:
        """Whether a part is already the one with groups back in floating point."""
        rewritten = self.manifest.layers[index].rewritten
        return rewritten is not None and file_digest(self.part(index)) == rewritten

    def _save(self, path: Path, tensors: dict[str, torch.Tensor]) -> str:
        data = tensor_bytes(tensors)
        write_file(path, data)
        return digest(data)

    def _verify(self, path: Path, *known: str | None) -> None:
        if file_digest(path) not in [one for one in known if one is not None]:
            raise UserError(f"{path} is not as it was written; delete {self.root} and start again without --resume")


def manifest_path(root: Path) -> Path:
    return root / "manifest.json"


def check_output(output: Path, model: Path, resume: bool) -> None:
    """Raise `ConfigError` or `UserError`, before any work, where the result has no place to go."""
    check_new_folder(output, model)
    root = partial_folder(output)
    if root.exists() and not resume:
        raise ConfigError(f"{root} holds an interrupted run; go on with it by --resume, or delete it")


def open_staging(output: Path, layers: int, fingerprint: Fingerprint) -> Staging:
    """The staging folder, new or as an interrupted run of the same work left it.

    Raises `UserError` where it cannot be written or read, and `ConfigError` where it is of other work.
    """
    root = partial_folder(output)
    staging = Staging(output, layers, Manifest(fingerprint))
    with write_errors(root):
        for folder in (staging.model, root / "folds"):
            folder.mkdir(parents=True, exist_ok=True)
    if manifest_path(root).exists():
        staging.manifest = load_manifest(manifest_path(root))
        if changed := differences(staging.manifest.fingerprint, fingerprint):
            raise ConfigError(
                f"{root} was begun with something else: {', '.join(changed[:3])}; "
                "run --resume with the same model, data and flags, or delete the folder"
            )
        staging.verify()
    _clear_temporary(root)
    staging.save_manifest()
    return staging


def check_space(root: Path, needed: int) -> None:
    """Raise `UserError` where the disk of a folder has less than `needed` bytes free."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise UserError(
            f"{root}: the result takes about {needed / 2**30:.2f} GiB and its disk has {free / 2**30:.2f} GiB free; "
            "free some space, then go on with --resume"
        )


def _clear_temporary(root: Path) -> None:
    with write_errors(root):
        for path in root.rglob("*" + TEMPORARY):
            path.unlink()
