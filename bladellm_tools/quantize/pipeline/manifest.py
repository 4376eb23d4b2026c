"""The manifest of an unfinished output: what it is made from and which files of it are finished."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bladellm_runtime.errors import UserError
from bladellm_tools.quantize.job import ModuleReport
from bladellm_tools.quantize.pipeline.files import write_file
from bladellm_tools.quantize.pipeline.fingerprint import Fingerprint

VERSION = 1


@dataclass(slots=True)
class LayerRecord:
    """A finished decoder layer.

    sha256: of its part; rewritten: of the part with some groups back in floating point, None before that is decided;
    folds: of the file with what its inputs were divided by, None where there is no such file.
    """

    sha256: str
    reports: list[ModuleReport]
    folds: str | None = None
    rewritten: str | None = None


@dataclass(slots=True)
class Manifest:
    """layers: the first so many decoder layers, in order; outer: SHA-256 of the tensors outside of them."""

    fingerprint: Fingerprint
    version: int = VERSION
    layers: list[LayerRecord] = field(default_factory=list)
    outer: str | None = None

    def save(self, path: Path) -> None:
        """Replace the file, atomically."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self), indent=1))

    @property
    def reports(self) -> list[ModuleReport]:
        return [report for record in self.layers for report in record.reports]


def load_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises `UserError` for one that this version did not write."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; delete {path.parent} and start again") from error
    if manifest.version != VERSION:
        raise UserError(f"{path} is of another version; delete {path.parent} and start again")
    return manifest
