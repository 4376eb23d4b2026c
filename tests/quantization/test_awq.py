"""AWQ GEMM layers and configs, against a slow reading of the format and the converter of compressed-tensors."""

import json
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.quantization.awq import Awq
from bladellm_runtime.quantization.scheme import Scheme
from tests.quantization.reference import assert_same, awq_weight, fields, random_weight

AUTOAWQ = {
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "group_size": 128,
    "modules_to_fuse": None,
    "modules_to_not_convert": ["visual", "mlp.gate"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
OLD = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}


def parse(**changes: Any) -> Awq:
    return Awq.parse(fields({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"} | changes))


def random_tensors(rows: int, columns: int, groups: int) -> dict[str, torch.Tensor]:
    """A layer of random words, as another tool may have written it."""
    words = {"qweight": (columns, rows // 8), "qzeros": (groups, rows // 8)}
    tensors = {name: torch.randint(-(2**31), 2**31, shape, dtype=torch.int32) for name, shape in words.items()}
    return tensors | {"scales": torch.randn(groups, rows).half()}


@settings(deadline=None)
@given(st.integers(1, 5), st.sampled_from((None, 1, 7, 21)))
def test_weights_are_what_the_specification_says(n: int, group_size: int | None) -> None:
    rows, columns = n * 8, 42
    form = parse(group_size=group_size or -1)
    scheme = form.scheme_of("model.layers.0.mlp.up_proj", set())
    assert scheme == Scheme(4, "int", group_size, symmetric=False)
    tensors = random_tensors(rows, columns, scheme.groups(columns))
    for entry in form.tensors(scheme, rows, columns):
        assert tuple(tensors[entry.suffix].shape) == entry.shape
        assert entry.required
    weight = form.unpack(scheme, rows, columns, tensors)
    expected = torch.from_numpy(awq_weight(tensors, group_size or columns))
    assert torch.equal(weight.dequantize(), expected.float())
    assert all(part is None or part.is_contiguous() for part in (weight.codes, weight.scales, weight.zeros))
    for name, tensor in form.pack(weight).items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.is_contiguous()


def test_codes_are_those_compressed_tensors_converts_to() -> None:
    tensors = random_tensors(40, 64, 2)
    signed, scales, zeros = AutoAWQConverter(group_size=32)._convert_gemm_module(
        tensors["qweight"], tensors["scales"], tensors["qzeros"]
    )
    weight = parse().unpack(Scheme(4, "int", 32, symmetric=False), 40, 64, tensors)
    assert torch.equal(weight.codes.int() - 8, signed.int())
    assert torch.equal(weight.scales, scales)
    assert weight.zeros is not None
    assert zeros is not None
    assert torch.equal(weight.zeros.int() - 8, zeros.int())


@pytest.mark.parametrize("group_size", [16, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_new_checkpoints_read_back(group_size: int | None, symmetric: bool, device: str) -> None:
    """A symmetric scheme reads back with its zero points, all 8: AWQ stores them always."""
    scheme = Scheme(4, "int", group_size, symmetric)
    form = Awq.plan(scheme, [])
    weight = random_weight(scheme, 24, 48, device=device)
    tensors = form.pack(weight)
    table = {entry.suffix: entry.shape for entry in form.tensors(scheme, 24, 48)}
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert_same(weight, form.unpack(scheme, 24, 48, tensors))
    again = Awq.parse(fields(json.loads(json.dumps(form.config()))))
    read = again.scheme_of("model.layers.0.mlp.up_proj", set())
    assert read == Scheme(4, "int", group_size, symmetric=False)
    back = again.unpack(read, 24, 48, tensors)
    assert back.zeros is not None
    assert symmetric == (back.zeros.unique().tolist() == [8])
    assert torch.equal(back.dequantize(), weight.dequantize())


def test_an_autoawq_config() -> None:
    form = Awq.parse(fields(AUTOAWQ))
    scheme = Scheme(4, "int", 128, symmetric=False)
    assert form.scheme_of("model.layers.0.self_attn.q_proj", set()) == scheme
    assert form.scheme_of("model.layers.0.mlp.gate_proj", set()) is None
    assert form.scheme_of("model.visual.blocks.0.fc1", set()) is None
    assert form.scheme_of("lm_head", set()) is None
    assert form.config() == AUTOAWQ
    assert Awq.parse(fields(OLD)).scheme_of("a.q_proj", set()) == Scheme(4, "int", 64, symmetric=False)


def test_the_tensors_decide_where_there_are_any() -> None:
    form = parse(modules_to_not_convert=["down"])
    keys = {"a.up_proj.weight", "a.down_proj.qweight", "lm_head.qweight"}
    assert form.scheme_of("a.up_proj", keys) is None
    assert form.scheme_of("a.down_proj", keys) is not None
    assert form.scheme_of("lm_head", keys) is not None


def test_a_checkpoint_without_zero_points() -> None:
    form = parse(zero_point=False)
    scheme = form.scheme_of("a.q_proj", set())
    assert scheme == Scheme(4, "int", 32)
    assert {entry.suffix for entry in form.tensors(scheme, 8, 64) if entry.required} == {"qweight", "scales"}
    tensors = random_tensors(8, 64, 2)
    with pytest.raises(CheckpointError, match=r"^qzeros has zero points other than 8, .*zero_point false"):
        form.unpack(scheme, 8, 64, tensors)
    without = form.unpack(scheme, 8, 64, {name: tensors[name] for name in ("qweight", "scales")})
    tensors["qzeros"].fill_(0x88888888 - 2**32)
    assert without.zeros is None
    assert torch.equal(without.dequantize(), torch.from_numpy(awq_weight(tensors, 32)).float())
    assert_same(without, form.unpack(scheme, 8, 64, tensors))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 8}, "bits 8 is not supported; it must be 4"),
        ({"bits": None, "w_bit": 3}, "w_bit 3 is not supported; it must be 4"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": 0}, "group_size must be -1 or positive"),
        ({"group_size": None, "q_group_size": -2}, "q_group_size must be a whole number from -1"),
        ({"version": "gemv_fast"}, "version 'gemv_fast' is not supported; it must be gemm"),
        ({"version": None, "format": "exllama"}, "format 'exllama' is not supported; it must be gemm"),
        ({"backend": "llm-awq"}, "backend 'llm-awq' is not supported"),
        ({"zero_point": "yes"}, "zero_point must be true or false"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of strings"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert str(caught.value).startswith(f"config.json: quantization_config.{says}")
    assert "\n" not in str(caught.value)


def test_bad_values_and_shapes_are_refused() -> None:
    form, scheme = parse(), Scheme(4, "int", 32, symmetric=False)
    tensors = random_tensors(8, 64, 2)
    tensors["scales"][1, 4] = float("inf")
    with pytest.raises(CheckpointError, match=r"^scales has NaN or infinite values"):
        form.unpack(scheme, 8, 64, tensors)
    with pytest.raises(CheckpointError, match=r"^qweight has 12 outputs, not a multiple of 8"):
        form.tensors(scheme, 12, 64)
    with pytest.raises(CheckpointError, match=r"^qweight has 48 inputs, not a multiple of the group size 32"):
        form.tensors(scheme, 8, 48)


def test_plans() -> None:
    for scheme in (Scheme(8), Scheme(8, "fp8"), Scheme(4, activations="dynamic")):
        assert Awq.refusal(scheme) is not None
        with pytest.raises(ConfigError, match="--format awq cannot hold"):
            Awq.plan(scheme, [])
    with pytest.raises(ConfigError, match="--kv_scales needs --format compressed-tensors"):
        Awq.plan(Scheme(4), [], kv_scales=True)
    with pytest.raises(ConfigError, match="--format gptq"):
        Awq.plan(Scheme(4, "int", 32), [], scrambled=True)
    ignore = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head"]
    form = Awq.plan(Scheme(4, "int", 128), ignore)
    assert form.config() == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "modules_to_not_convert": [*ignore, "model.layers.1.mlp.gate_up_proj"],
    }
    assert form.scheme_of("model.layers.11.mlp.gate_proj", set()) is not None
    assert form.scheme_of("model.layers.1.mlp.gate_proj", set()) is None
    assert form.scale_dtype(torch.bfloat16) == torch.float16
