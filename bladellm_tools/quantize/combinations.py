"""Which flags go together: from `QuantizeArgs` to a scheme, and a sentence with what works for those that do not.

`RULES` is the table: each row says which flags it is about, when it objects and why. What works instead is not written
down anywhere: it is searched among the flags' choices, so that every alternative a user reads has been tried.
"""

import copy
import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.registry import FORMATS
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.args import BLOCK, AlgorithmName, FormatName, QuantizeArgs

DEFAULTS: Mapping[str, object] = {item.name: item.default for item in dataclasses.fields(QuantizeArgs)}
WITHOUT_DATA = ("minmax",)
WITH_HESSIANS = ("gptq", "smoothquant_gptq")
WITH_ALPHA = ("smoothquant", "smoothquant+", "smoothquant_gptq")
ALGORITHMS = {
    ("weight_only_quant", "int"): ("minmax", "gptq", "awq", "smoothquant+"),
    ("weight_only_quant", "fp8"): ("minmax",),
    ("act_and_weight_quant", "int"): ("minmax", "gptq", "smoothquant", "smoothquant_gptq"),
    ("act_and_weight_quant", "fp8"): ("minmax", "smoothquant"),
}
"""Algorithms by what is rounded and to which kind of number."""


@dataclass(frozen=True, slots=True)
class Combination:
    """What the flags mean. `scrambled`: the columns of a group are not neighbours, so the checkpoint has a g_idx."""

    algorithm: AlgorithmName
    scheme: Scheme
    format_name: FormatName
    format: type[CheckpointFormat]
    scrambled: bool

    @property
    def needs_data(self) -> bool:
        """Whether the algorithm itself calibrates."""
        return self.algorithm not in WITHOUT_DATA


class CombinationError(ConfigError):
    """Flags that do not go together. `alternatives`: changes, flag by flag, each of which makes them go together."""

    def __init__(self, message: str, alternatives: list[dict[str, object]]) -> None:
        super().__init__(message)
        self.alternatives = alternatives


def combine(args: QuantizeArgs) -> Combination:
    """What the flags mean. Raises `CombinationError` for flags that do not go together, with what works."""
    reason = objection(args)
    if reason is not None:
        found = alternatives(args)
        raise CombinationError(f"{reason}; use {in_words(found)}", found)
    name = args.format
    return Combination(args.quant_algo, scheme_of(args), name, FORMATS[name], is_scrambled(args))


def objection(args: QuantizeArgs) -> str | None:
    """Why the flags do not go together, None where they do."""
    for objects, reason in RULES:
        if objects(args):
            return reason(args)
    refusal = FORMATS[args.format].refusal(scheme_of(args))
    return None if refusal is None else f"--format {args.format} cannot hold this: {refusal}"


def scheme_of(args: QuantizeArgs) -> Scheme:
    """The scheme of the flags, be it one that cannot be."""
    return Scheme(
        bits=8 if is_fp8(args) else args.bits,
        kind="fp8" if is_fp8(args) else "int",
        group_size=group_size_of(args),
        symmetric=is_symmetric(args),
        activations="dynamic" if args.quant_mode == "act_and_weight_quant" else "none",
    )


def is_fp8(args: QuantizeArgs) -> bool:
    return args.quant_dtype != "int"


def group_size_of(args: QuantizeArgs) -> int | None:
    """--group_size; without it 64 with --block_wise_quant, else None: one scale a channel."""
    return args.group_size or (BLOCK if args.block_wise_quant else None)


def is_symmetric(args: QuantizeArgs) -> bool:
    """--sym; without it true, but for the AWQ layout, which has zero points."""
    return args.format != "awq" if args.sym is None else args.sym


def is_scrambled(args: QuantizeArgs) -> bool:
    """Whether GPTQ's order of columns moves them between groups."""
    ordered = args.quant_algo in WITH_HESSIANS and args.desc_act and not args.static_groups
    return ordered and group_size_of(args) is not None


def _algorithms(args: QuantizeArgs) -> tuple[str, ...]:
    return ALGORITHMS[args.quant_mode, "fp8" if is_fp8(args) else "int"]


def _mode_reason(args: QuantizeArgs) -> str:
    inputs = "weights and inputs" if args.quant_mode == "act_and_weight_quant" else "weights alone"
    return f"--quant_algo {args.quant_algo} does not round {inputs} to {args.quant_dtype}"


def _groups_flag(args: QuantizeArgs) -> str:
    return f"--group_size {args.group_size}" if args.group_size is not None else "--block_wise_quant"


Rule = tuple[Callable[[QuantizeArgs], bool], Callable[[QuantizeArgs], str]]
RULES: tuple[Rule, ...] = (
    (
        lambda args: args.quant_dtype == "fp8_e5m2",
        lambda args: "--quant_dtype fp8_e5m2 cannot be stored: checkpoint formats hold fp8 weights as e4m3 alone",
    ),
    (
        lambda args: is_fp8(args) and args.bits != 8,
        lambda args: f"--bit {args.bit} does not go with --quant_dtype {args.quant_dtype}, which has 8 bits",
    ),
    (
        lambda args: args.block_wise_quant and args.group_size is not None and args.group_size != BLOCK,
        lambda args: f"--block_wise_quant means groups of {BLOCK} and --group_size {args.group_size} another size",
    ),
    (
        lambda args: args.quant_mode == "act_and_weight_quant" and not is_fp8(args) and args.bits != 8,
        lambda args: f"--bit {args.bit} does not go with --quant_mode act_and_weight_quant, which multiplies 8 bits",
    ),
    (
        lambda args: args.quant_mode == "act_and_weight_quant" and group_size_of(args) is not None,
        lambda args: f"{_groups_flag(args)} does not go with --quant_mode act_and_weight_quant",
    ),
    (
        lambda args: is_fp8(args) and group_size_of(args) is not None,
        lambda args: f"{_groups_flag(args)} does not go with --quant_dtype {args.quant_dtype}",
    ),
    (
        lambda args: args.sym is False and (is_fp8(args) or args.quant_mode == "act_and_weight_quant"),
        lambda args: f"--sym false goes with integer weights alone, not with {_of_scheme(args)}",
    ),
    (lambda args: args.quant_algo not in _algorithms(args), _mode_reason),
    (
        lambda args: args.alpha is not None and args.quant_algo not in WITH_ALPHA,
        lambda args: f"--alpha {args.alpha:g} has no meaning for --quant_algo {args.quant_algo}",
    ),
    (
        lambda args: args.quant_algo not in WITH_HESSIANS and not (args.desc_act and args.static_groups),
        lambda args: f"--desc_act and --static_groups are of gptq and have no meaning for {args.quant_algo}",
    ),
    (
        lambda args: args.quant_algo not in WITH_HESSIANS and args.damp != DEFAULTS["damp"],
        lambda args: f"--damp {args.damp:g} is of gptq and has no meaning for --quant_algo {args.quant_algo}",
    ),
    (
        lambda args: is_scrambled(args) and args.format != "gptq",
        lambda args: f"--static_groups false scrambles the columns, which --format {args.format} cannot hold",
    ),
    (
        lambda args: args.kv_scales and args.format != "compressed-tensors",
        lambda args: f"--kv_scales have no place in --format {args.format}",
    ),
)
"""(objects, reason), the first that objects speaks. What a format can hold, the format itself says."""


def _of_scheme(args: QuantizeArgs) -> str:
    return f"--quant_dtype {args.quant_dtype}" if is_fp8(args) else f"--quant_mode {args.quant_mode}"


CHOICES: Mapping[str, tuple[object, ...]] = {
    "quant_algo": typing.get_args(AlgorithmName),
    "quant_mode": ("weight_only_quant", "act_and_weight_quant"),
    "quant_dtype": ("int", "fp8_e4m3"),
    "bit": ("8", "4"),
    "format": typing.get_args(FormatName),
}
"""What an alternative may choose differently."""
EXTRAS = ("sym", "block_wise_quant", "group_size", "alpha", "damp", "desc_act", "static_groups", "kv_scales")
"""What an alternative may leave at its default."""
SHOWN = 3


def alternatives(args: QuantizeArgs) -> list[dict[str, object]]:
    """The sets of changes that make the flags go together, all of the smallest size for which there are any."""
    found: list[dict[str, object]] = []
    for size in range(len(CHOICES) + 1):
        if any(len(change) < size for change in found):
            break
        settled = (settle(args, choices) for choices in changes(args, size))
        found += [change for change in settled if change is not None]
    least = min(map(len, found))
    return [change for change in found if len(change) == least]


def changes(args: QuantizeArgs, size: int) -> Iterator[dict[str, object]]:
    """Every change of `size` choices."""
    for names in itertools.combinations(CHOICES, size):
        others = [[value for value in CHOICES[name] if value != getattr(args, name)] for name in names]
        for values in itertools.product(*others):
            yield dict(zip(names, values, strict=True))


def settle(args: QuantizeArgs, choices: dict[str, object]) -> dict[str, object] | None:
    """The choices with those extras at their defaults that stand against them; None where it is not the extras."""
    change = choices | {name: DEFAULTS[name] for name in EXTRAS if getattr(args, name) != DEFAULTS[name]}
    if objection(changed(args, change)) is not None:
        return None
    for name in EXTRAS:
        without = {other: value for other, value in change.items() if other != name}
        if len(without) < len(change) and objection(changed(args, without)) is None:
            change = without
    return change


def changed(args: QuantizeArgs, change: Mapping[str, object]) -> QuantizeArgs:
    """The flags with a change to values that are known to be allowed: a copy without a second check is 100 × faster."""
    other = copy.copy(args)
    vars(other).update(change)
    return other


def in_words(found: list[dict[str, object]]) -> str:
    """`--quant_algo minmax or gptq, or --bit 8`: changes of one flag flag by flag, larger ones one by one, a few."""
    if all(len(change) == 1 for change in found):
        values: dict[str, list[object]] = {}
        for change in found:
            for name, value in change.items():
                values.setdefault(name, []).append(value)
        parts = [_shown(name, *options) for name, options in values.items()]
    else:
        parts = [" with ".join(_shown(name, value) for name, value in change.items()) for change in found]
    return ", or ".join(parts[:SHOWN])


def _shown(name: str, *values: object) -> str:
    if values == (None,):
        return f"no --{name}"
    return f"--{name} {' or '.join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)}"
