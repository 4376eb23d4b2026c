"""Groups, GPUs and padding against a model's shapes: refused before the work, with what fits."""

import dataclasses
import random
import re
from pathlib import Path

import pytest

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.config import ModelSpec, read_model_spec
from bladellm_runtime.quantization.registry import FORMATS
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.engines import engines
from bladellm_tools.quantize.pipeline.selection import select
from bladellm_tools.quantize.shapes import (
    check_degree,
    check_groups,
    check_storable,
    linears,
    pad_multiple,
    padded,
)


@pytest.fixture(scope="module")
def spec(demo_model: Path) -> ModelSpec:
    """hidden 192, 6 heads of 32, MLP 512."""
    return read_model_spec(demo_model)


def check(spec: ModelSpec, size: int | None, degree: int = 1, pad: bool = False, ignore: tuple[str, ...] = ()) -> None:
    scheme = Scheme(4, group_size=size)
    whole = dataclasses.replace(spec, intermediate_size=padded(spec, pad_multiple(scheme, degree) if pad else None))
    check_degree(whole, degree, pad)
    check_groups(linears(whole, select(whole, ignore), degree), scheme, degree, can_pad=not pad)


def test_every_linear_layer_has_its_shape(spec) -> None:
    layers = {layer.module: layer for layer in linears(spec, select(spec, ("*.1.mlp.down_proj",)), 2)}
    assert len(layers) == 7 * 4 - 1
    assert "model.layers.1.mlp.down_proj" not in layers
    shapes = {layer.own: (layer.rows, layer.columns, layer.cut) for layer in layers.values()}
    assert shapes["self_attn.q_proj"] == (192, 192, 192)
    assert shapes["self_attn.k_proj"] == (64, 192, 192)
    assert shapes["self_attn.o_proj"] == (192, 192, 96)
    assert shapes["mlp.up_proj"] == (512, 192, 192)
    assert shapes["mlp.down_proj"] == (192, 512, 256)


@pytest.mark.parametrize("size", [None, 8, 16, 32, 64])
def test_sizes_that_divide(spec, size) -> None:
    check(spec, size)


@pytest.mark.parametrize("size", [128, 24, 100])
def test_sizes_that_do_not_are_refused_with_those_that_do(spec, size) -> None:
    with pytest.raises(ConfigError) as caught:
        check(spec, size)
    reason, _, advice = str(caught.value).partition("; use ")
    assert f"--group_size {size}" in reason
    columns = {
        "q_proj": 192,
        "k_proj": 192,
        "v_proj": 192,
        "o_proj": 192,
        "gate_proj": 192,
        "up_proj": 192,
        "down_proj": 512,
    }
    for name, inputs in columns.items():
        assert (f"{name} ({inputs})" in reason) == (inputs % size > 0)
    offered = [int(word) for word in re.findall(r"\d+", advice)]
    assert offered == [64, 32, 16, 8]
    for better in offered:
        check(spec, better)


def test_gpus_cut_the_inputs_of_two_layers(spec) -> None:
    with pytest.raises(ConfigError, match=r"o_proj \(192 / 2 = 96\); use --group_size 32 or 16 or 8$"):
        check(spec, 64, degree=2)
    check(spec, 32, degree=2)
    check(spec, 128, degree=2, ignore=("*q_proj", "*o_proj", "*gate_proj"))
    wide = dataclasses.replace(spec, intermediate_size=29568 // 8, heads=64)  # Qwen2-72B's, on 4 GPUs
    with pytest.raises(ConfigError, match=r"down_proj \(3696 / 4 = 924\).*--experimental_pad"):
        check(wide, 64, degree=4)
    check(wide, 64, degree=4, pad=True)


def test_degrees_that_do_not_divide(spec) -> None:
    with pytest.raises(ConfigError, match="6 attention heads; use 1 or 2 or 3 or 6"):
        check(spec, 32, degree=4)
    with pytest.raises(ConfigError, match="inner size 512; use --experimental_pad or 1 or 2"):
        check(spec, None, degree=3)
    check(spec, None, degree=3, pad=True)


def test_padding_is_the_least_that_gives_every_gpu_whole_groups(spec) -> None:
    for _ in range(50):
        size, degree = random.choice([None, 8, 32, 64, 128]), random.randint(1, 9)
        inner = random.randint(1, 5000)
        found = padded(
            dataclasses.replace(spec, intermediate_size=inner), pad_multiple(Scheme(4, group_size=size), degree)
        )
        fits = [n for n in range(inner, inner + 2000) if n % degree == 0 and n // degree % (size or 1) == 0]
        assert found == fits[0]


def test_shapes_a_format_cannot_store_are_refused(spec) -> None:
    odd = dataclasses.replace(spec, intermediate_size=516)
    scheme = Scheme(4)
    layers = linears(odd, select(odd, ()), 1)
    check_storable(layers, scheme, FORMATS["compressed-tensors"].plan(scheme, ["lm_head"]))
    for name in ("gptq", "awq"):
        with pytest.raises(ConfigError, match=rf"--format {name} cannot hold mlp\.\w+ of this model: .*516"):
            check_storable(layers, scheme, FORMATS[name].plan(scheme, ["lm_head"]))


@pytest.mark.parametrize(
    ("form", "scheme", "scrambled", "refusing"),
    [
        ("compressed-tensors", Scheme(4, group_size=128), False, set()),
        ("compressed-tensors", Scheme(4, group_size=64), False, {"LMDeploy TurboMind"}),
        ("compressed-tensors", Scheme(8, activations="dynamic"), False, {"LMDeploy TurboMind"}),
        ("gptq", Scheme(4, group_size=128), False, set()),
        ("gptq", Scheme(4, group_size=128), True, {"LMDeploy TurboMind"}),
        ("gptq", Scheme(4, group_size=128, symmetric=False), False, {"LMDeploy TurboMind", "vLLM", "SGLang"}),
        ("awq", Scheme(4, group_size=128, symmetric=False), False, set()),
        ("awq", Scheme(4, group_size=64, symmetric=False), False, {"LMDeploy TurboMind"}),
    ],
)
def test_the_table_of_engines(form, scheme, scrambled, refusing) -> None:
    rows = dict(engines(form, scheme, scrambled))
    assert {name for name, verdict in rows.items() if verdict.startswith("no")} == refusing
    assert rows["BladeLLM Open"] == "yes"
    assert rows["transformers"].startswith("yes, with")
