"""adapter_config.json of a PEFT folder as checked values; whatever would change the result otherwise is refused."""

import re
from dataclasses import dataclass
from pathlib import Path

from bladellm_runtime.fields import Fields
from bladellm_runtime.models.folder import file_in, read_json

CONFIG_FILE = "adapter_config.json"
MAX_PATTERNS = 4096
PLAIN_NAME = re.compile(r"[\w.]{1,200}")
REFUSED = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "lora_bias": "a bias of B is not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "modules_to_save": "whole modules beside LoRA are not supported",
    "trainable_token_indices": "trained embeddings are not supported",
    "target_parameters": "parameters that are no linear layer are not supported",
    "layer_replication": "repeated layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
}
"""Fields that must be missing, false or empty."""
HARMLESS = ("eva_config", "runtime_config")
"""Of the fields that describe variants of LoRA those that only the training knows."""
INITIAL = ("gaussian", "orthogonal", "eva")
"""Ways to begin the training that leave the base model as it is."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """targets: the ends of module names, () where a pattern takes their place: it is not evaluated, the tensors say
    which modules have adapters. all_layers: every layer has all targets. ranks, alphas: of modules by the end of their
    names, where they are not `rank` and `alpha`."""

    rank: int
    alpha: float
    stabilised: bool
    targets: tuple[str, ...]
    all_layers: bool
    ranks: dict[str, int]
    alphas: dict[str, float]

    def rank_of(self, module: str) -> int:
        return next((rank for end, rank in self.ranks.items() if ends_with(module, end)), self.rank)

    def scale_of(self, module: str) -> float:
        """Factor of `B A`: alpha / rank, or alpha / √rank where it is rank-stabilised (arXiv 2312.03732)."""
        alpha = next((alpha for end, alpha in self.alphas.items() if ends_with(module, end)), self.alpha)
        rank = self.rank_of(module)
        return float(alpha / (rank**0.5 if self.stabilised else rank))


def read_adapter_config(folder: Path, max_rank: int, modules: set[str]) -> AdapterConfig:
    """Read and check an adapter's config; modules: the base model's. Raises `CheckpointError`, file and field named."""
    file = file_in(folder, CONFIG_FILE)
    config = Fields(file, read_json(file))
    if config.text("peft_type").upper() != "LORA":
        raise config.error("peft_type", f"must be LORA, got {config.text('peft_type')!r:.60}")
    if config.text("bias", default="none") != "none":
        raise config.error("bias", "must be none: biases of adapters are not supported")
    for name, problem in REFUSED.items():
        if config.values.get(name):
            raise config.error(name, f"must not be set: {problem}")
    for name, value in config.values.items():
        if name.endswith("_config") and name not in HARMLESS and value:
            raise config.error(f"{name:.60}", "must not be set: only plain LoRA is supported")
    start = config.values.get("init_lora_weights")
    if isinstance(start, str) and start not in INITIAL:
        raise config.error(
            "init_lora_weights", f"{start!r:.60} changes the base model; convert the adapter to plain LoRA"
        )
    rank = _rank(config, "r", max_rank)
    targets = _read_targets(config, modules)
    return AdapterConfig(
        rank=rank,
        alpha=config.number("lora_alpha", 0.0, 1e6),
        stabilised=config.boolean("use_rslora", default=False),
        targets=targets,
        all_layers=bool(targets)
        and not any(config.values.get(name) for name in ("layers_to_transform", "exclude_modules")),
        ranks={end: _rank(config.nested("rank_pattern"), end, max_rank) for end in _patterns(config, "rank_pattern")},
        alphas={
            end: config.nested("alpha_pattern").number(end, 0.0, 1e6) for end in _patterns(config, "alpha_pattern")
        },
    )


def ends_with(module: str, end: str) -> bool:
    """Whether a module's name is `end`, or ends with it behind a dot."""
    return module == end or module.endswith(f".{end}")


def _rank(fields: Fields, name: str, max_rank: int) -> int:
    rank = fields.integer(name, 1, 2**16)
    if rank > max_rank:
        raise fields.error(name, f"{rank} is larger than --max_lora_rank {max_rank}")
    return rank


def _read_targets(config: Fields, modules: set[str]) -> tuple[str, ...]:
    targets = config.values.get("target_modules")
    if isinstance(targets, str) and targets:
        return ()
    if not isinstance(targets, list) or not targets or len(targets) > MAX_PATTERNS:
        raise config.error("target_modules", f"must be a list of module names or a pattern, got {targets!r:.60}")
    for target in targets:
        if not isinstance(target, str) or not any(ends_with(module, target) for module in modules):
            known = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
            raise config.error("target_modules", f"names {target!r:.60}; adapters may have {known}")
    return tuple(targets)


def _patterns(config: Fields, name: str) -> list[str]:
    """The keys of an object by the ends of module names."""
    ends = list(config.nested(name).values)
    wrong = next((end for end in ends if not PLAIN_NAME.fullmatch(end)), None)
    if wrong is not None or len(ends) > MAX_PATTERNS:
        raise config.error(name, f"must have names of modules as keys, got {wrong!r:.60}")
    return ends
