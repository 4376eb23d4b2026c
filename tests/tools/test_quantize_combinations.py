"""Flags that go together make a coherent scheme; those that do not are refused with others that do."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.quantization.registry import FORMATS
from bladellm_tools.flags import flags_of, normalise
from bladellm_tools.quantize.args import QuantizeArgs
from bladellm_tools.quantize.combinations import Combination, CombinationError, combine
from tests.support.cases import examples

NAMES = {flag.name: flag for flag in flags_of(QuantizeArgs)}
CHOICES = ("bit", "quant_mode", "quant_dtype", "quant_algo", "format")
FLAGS = {
    **{name: st.sampled_from(NAMES[name].choices) for name in CHOICES},
    "block_wise_quant": st.booleans(),
    "group_size": st.sampled_from([None, 32, 64, 128]),
    "sym": st.sampled_from([None, True, False]),
    "desc_act": st.booleans(),
    "static_groups": st.booleans(),
    "kv_scales": st.booleans(),
    "alpha": st.sampled_from([None, 0.0, 0.7]),
    "damp": st.sampled_from([0.01, 0.05]),
}
CALIBRATED = {"gptq", "awq", "smoothquant", "smoothquant+", "smoothquant_gptq"}


def check_coherent(args: QuantizeArgs, made: Combination) -> None:
    """What must hold of flags that are accepted, in the words of the documentation."""
    scheme = made.scheme
    assert (made.algorithm, made.format) == (args.quant_algo, FORMATS[args.format])
    assert made.format.refusal(scheme) is None
    assert scheme.bits == int(args.bit)
    assert scheme.kind == ("int" if args.quant_dtype == "int" else "fp8")
    assert args.quant_dtype != "fp8_e5m2"
    assert scheme.activations == ("none" if args.quant_mode == "weight_only_quant" else "dynamic")
    assert made.needs_data == (args.quant_algo in CALIBRATED)
    if scheme.kind == "fp8" or scheme.activations != "none":
        assert (scheme.bits, scheme.group_size, scheme.symmetric) == (8, None, True)
        assert args.quant_algo not in ("awq", "smoothquant+")
    if args.block_wise_quant:
        assert scheme.group_size == 64
    elif args.group_size is not None:
        assert scheme.group_size == args.group_size
    assert scheme.symmetric == (args.format != "awq" if args.sym is None else args.sym)
    if args.quant_algo in ("smoothquant", "smoothquant_gptq"):
        assert scheme.activations != "none"
    if scheme.kind == "fp8":
        assert args.quant_algo in ("minmax", "smoothquant")
    assert args.alpha is None or args.quant_algo.startswith("smoothquant")
    is_gptq = args.quant_algo in ("gptq", "smoothquant_gptq")
    assert is_gptq or (args.damp, args.desc_act, args.static_groups) == (0.01, True, True)
    scrambled = is_gptq and args.desc_act and not args.static_groups and scheme.group_size is not None
    assert made.scrambled == scrambled
    made.format.plan(scheme, ["lm_head"], kv_scales=args.kv_scales, scrambled=made.scrambled)


def options(sentence: str) -> list[list[str]]:
    """The sets of arguments that `use ...` offers, `--flag a or b` one by one; `no --flag` is left to the caller."""
    offered = sentence.split("; use ")[1].split(", or ")
    sets = []
    for option in offered:
        if " with " in option or " or " not in option:
            sets.append(option.split(" with "))
        else:
            flag, values = option.split(" ", 1)
            sets += [[f"{flag} {value}"] for value in values.split(" or ")]
    return sets


def apply(args: QuantizeArgs, changes: list[str]) -> QuantizeArgs:
    values = {name: getattr(args, name) for name in NAMES}
    for change in changes:
        if change.startswith("no --"):
            values[change.removeprefix("no --")] = None
            continue
        name, value = normalise(change.split(" "), list(NAMES.values()))[0].removeprefix("--").split("=")
        values[name] = NAMES[name].convert(value)
    return QuantizeArgs(**values)


@settings(max_examples=examples(600), deadline=None)
@given(st.fixed_dictionaries(FLAGS))
def test_flags_are_accepted_and_coherent_or_refused_with_some_that_are_accepted(values) -> None:
    args = QuantizeArgs(**values)
    try:
        made = combine(args)
    except CombinationError as error:
        sentence = str(error)
        assert sentence.startswith("--")
        assert len(sentence) < 700
        assert "\n" not in sentence
        offered = options(sentence)
        assert offered
        for changes in offered:
            better = apply(args, changes)
            assert better != args
            check_coherent(better, combine(better))
    else:
        check_coherent(args, made)


@settings(max_examples=examples(200), deadline=None)
@given(st.fixed_dictionaries(FLAGS))
def test_every_alternative_is_accepted_and_none_has_a_needless_change(values) -> None:
    args = QuantizeArgs(**values)
    try:
        combine(args)
    except CombinationError as error:
        sizes = {len(change) for change in error.alternatives}
        assert len(sizes) == 1
        for change in error.alternatives[:20]:
            combine(QuantizeArgs(**{**values, **change}))


WORKING = [
    {},
    {"bit": "4"},
    {"bit": "4", "quant_algo": "gptq", "block_wise_quant": True},
    {"bit": "4", "quant_algo": "awq", "group_size": 128, "format": "awq"},
    {"bit": "4", "quant_algo": "awq", "group_size": 128, "sym": False},
    {"bit": "4", "quant_algo": "smoothquant+", "group_size": 128},
    {"bit": "8", "quant_algo": "awq"},
    {"quant_algo": "gptq", "format": "gptq"},
    {"bit": "4", "quant_algo": "gptq", "group_size": 32, "format": "gptq", "static_groups": False},
    {"quant_mode": "act_and_weight_quant"},
    {"quant_mode": "act_and_weight_quant", "quant_algo": "gptq"},
    {"quant_mode": "act_and_weight_quant", "quant_algo": "smoothquant", "alpha": 0.8},
    {"quant_mode": "act_and_weight_quant", "quant_algo": "smoothquant_gptq"},
    {"quant_dtype": "fp8"},
    {"quant_dtype": "fp8_e4m3", "quant_mode": "act_and_weight_quant"},
    {"quant_dtype": "fp8", "quant_mode": "act_and_weight_quant", "quant_algo": "smoothquant"},
    {"kv_scales": True},
]


@pytest.mark.parametrize("values", WORKING, ids=str)
def test_what_the_documentation_promises_is_accepted(values) -> None:
    args = QuantizeArgs(**values)
    check_coherent(args, combine(args))


REFUSED = [
    ({"quant_dtype": "fp8_e5m2"}, "fp8_e5m2", "fp8_e4m3"),
    ({"quant_dtype": "fp8", "bit": "4"}, "--bit 4", "--bit 8"),
    ({"quant_dtype": "fp8", "quant_algo": "gptq"}, "--quant_algo gptq", "minmax"),
    ({"quant_dtype": "fp8", "block_wise_quant": True}, "--block_wise_quant", "--block_wise_quant false"),
    ({"quant_mode": "act_and_weight_quant", "bit": "4"}, "--bit 4", "--bit 8"),
    ({"quant_mode": "act_and_weight_quant", "group_size": 128}, "--group_size 128", "no --group_size"),
    ({"quant_mode": "act_and_weight_quant", "quant_algo": "awq"}, "--quant_algo awq", "weight_only_quant"),
    ({"quant_algo": "smoothquant"}, "--quant_algo smoothquant", "act_and_weight_quant"),
    ({"quant_mode": "act_and_weight_quant", "sym": False}, "--sym false", "weight_only_quant"),
    ({"bit": "8", "format": "awq"}, "--format awq", "--bit 4"),
    ({"quant_mode": "act_and_weight_quant", "format": "gptq"}, "--format gptq", "compressed-tensors"),
    ({"block_wise_quant": True, "group_size": 128}, "--group_size 128", "no --group_size"),
    ({"quant_algo": "gptq", "alpha": 0.5}, "--alpha 0.5", "no --alpha"),
    ({"quant_algo": "awq", "damp": 0.1}, "--damp 0.1", "--damp 0.01"),
    ({"desc_act": False}, "--desc_act", "--desc_act true"),
    ({"kv_scales": True, "format": "gptq"}, "--kv_scales", "compressed-tensors"),
    (
        {"bit": "4", "quant_algo": "gptq", "group_size": 32, "format": "awq", "static_groups": False},
        "--static_groups false",
        "--static_groups true",
    ),
]


@pytest.mark.parametrize(("values", "named", "offered"), REFUSED, ids=str)
def test_refusals_name_the_flag_and_what_works(values, named, offered) -> None:
    with pytest.raises(ConfigError) as caught:
        combine(QuantizeArgs(**values))
    reason, _, advice = str(caught.value).partition("; use ")
    assert named in reason
    assert re.search(rf"{re.escape(offered)}\b", advice), advice
