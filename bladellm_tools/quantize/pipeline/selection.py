"""Which linear layers are quantized: all of the decoder layers, less those that patterns name.

Members of a group are served as one layer, so a pattern that names one of them leaves the whole group as it is.
The embedding and lm_head always stay in floating point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.weights import weight_table
from bladellm_tools.quantize.algorithms.layer import GROUPS, LinearGroup
from bladellm_tools.quantize.pipeline.source import layer_prefix

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Selection:
    """groups: those to quantize, by decoder layer. left: the other linear layers with why, by full name."""

    groups: tuple[tuple[LinearGroup, ...], ...]
    left: dict[str, str]

    def ignored(self, fallen: Sequence[str] = ()) -> list[str]:
        """Full names of all linear layers that stay in floating point, `fallen` among them, in a fixed order."""
        return [HEAD, *sorted({*self.left, *fallen}, key=_natural)]


def select(spec: ModelSpec, patterns: Sequence[str]) -> Selection:
    """Sort out the linear layers. Raises `ConfigError` for a pattern without effect and where nothing is left."""
    _refuse_idle(spec, patterns)
    left: dict[str, str] = {}
    chosen = []
    for layer in range(spec.layers):
        kept = []
        for group in GROUPS:
            reasons = _reasons([layer_prefix(layer) + member for member in group.members], patterns)
            left |= reasons
            if not reasons:
                kept.append(group)
        chosen.append(tuple(kept))
    if not any(chosen):
        raise ConfigError(f"--ignore {' '.join(patterns)} leaves no linear layer to quantize; name fewer modules")
    return Selection(tuple(chosen), left)


def _reasons(modules: Sequence[str], patterns: Sequence[str]) -> dict[str, str]:
    """Why each of a group's modules stays as it is; empty when the group is quantized."""
    named = [module for module in modules if any(fnmatchcase(module, pattern) for pattern in patterns)]
    if not named:
        return {}
    together = f"with {named[0].rpartition('.')[2]}, which --ignore names: they are served as one layer"
    return {module: "--ignore names it" if module in named else f"left {together}" for module in modules}


def _refuse_idle(spec: ModelSpec, patterns: Sequence[str]) -> None:
    modules = {part.key.rpartition(".")[0] for parts in weight_table(spec).values() for part in parts} | {HEAD}
    for pattern in patterns:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise ConfigError(f"--ignore {pattern!r:.80} names no module of the model; its modules are called such as "
                              "model.layers.0.mlp.down_proj")  # fmt: skip


def _natural(module: str) -> tuple[int, str]:
    """Layer 2 before layer 10."""
    return int(module.split(".")[2]), module
