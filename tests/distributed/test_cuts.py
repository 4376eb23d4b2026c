"""Shares of tensors: what ranks hold is the whole model, and computes what the whole model computes."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bladellm_runtime.distributed.shares import Merge, same_bytes
from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.fields import Fields
from bladellm_runtime.layers.quantized_linear import QuantizedLinear
from bladellm_runtime.models.checkpoint import open_checkpoint
from bladellm_runtime.models.cutting import describe, describe_shape, unpack_share
from bladellm_runtime.models.folder import read_json
from bladellm_runtime.models.rank_checkpoint import RankCheckpoint, cut_checkpoint
from bladellm_runtime.quantization.registry import read_quantization
from bladellm_runtime.quantization.weight import QuantizedWeight
from tests.distributed.models import Random, random_heads
from tests.models.quantized import SCHEMES, STORED
from tests.support.cases import sample_of

CASES = [(None, "plain", False), *((method, name, False) for method, name in STORED)]
CASES += [("gptq", "w4 g16", True), ("gptq", "w8 g16", True), ("gptq", "w4 g16 asymmetric", True)]
CASES += [("compressed-tensors", "w4 g16 asymmetric", True)]
STORED_ALIKE = [("awq", "w4 g16", False), ("compressed-tensors", "w4 g16 asymmetric", False)]
STORED_ALIKE += [("compressed-tensors", "fp8 static", False)]
QUICK = [(None, "plain", False), ("gptq", "w4 g16", True), *sample_of(STORED_ALIKE, 1)]


def random_model(folder: Path, method: str | None, scheme: str, scrambled: bool) -> Random:
    while True:
        heads, kv_heads = random_heads()
        size = SCHEMES[scheme].group_size if method else None
        if size is None or heads * 8 % size == 0:
            return Random(
                folder, heads=heads, kv_heads=kv_heads, inner=random.randint(2, 9), method=method, scheme=scheme,
                scrambled=scrambled, vocab=random.choice((64, 104, 200, 640)), tied=random.random() < 0.3,
                biases=random.random() < 0.5, dtype=random.choice((torch.bfloat16, torch.float16, torch.float32)),
            )  # fmt: skip


def sampled(marked: list, quick: list) -> list:
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in marked]


@pytest.mark.parametrize(("method", "scheme", "scrambled"), sampled(CASES, QUICK))
def test_shares_are_the_whole_model(tmp_path: Path, method: str | None, scheme: str, scrambled: bool) -> None:
    model = random_model(tmp_path, method, scheme, scrambled)
    with open_checkpoint(tmp_path) as checkpoint:
        for degree in range(1, min(8, model.config["num_attention_heads"]) + 1):
            for stages in (1, 2):
                ranks = [
                    cut_checkpoint(checkpoint, model.fields, (degree, stages), stage, rank)
                    for stage in range(stages)
                    for rank in range(degree)
                ]
                assert {key for rank in ranks for key in rank.files} == set(model.tensors)
                for key, tensor in model.tensors.items():
                    merge = Merge(tuple(tensor.shape), tensor.dtype)
                    held = [rank for rank in ranks if key in rank.files]
                    assert all(merge.add(rank.read(key), rank.cuts[key]) for rank in held), key
                    assert merge.is_complete()
                    assert same_bytes(merge.whole, tensor), key


def quantized_share(rank: RankCheckpoint, module: str, size: tuple[int, int]) -> tuple[QuantizedWeight, range]:
    """A rank's share of a quantized layer, and its outputs or inputs in the whole layer."""
    cut, packing = rank.linear(module), rank.packing(module)
    assert cut is not None
    assert packing is not None
    (part,) = cut.ranges
    shape = (len(part), size[1]) if cut.rows else (size[0], len(part))
    stored = {key.rpartition(".")[2]: rank.read(key) for key in rank.files if key.startswith(f"{module}.")}
    stored.pop("bias", None)
    weight = unpack_share(read_quantization(model_fields(rank)), packing, cut, shape, stored)
    assert weight.columns % weight.scales.shape[1] == 0
    return weight, part


def share_of(rank: RankCheckpoint, module: str, size: tuple[int, int]) -> tuple[torch.Tensor, range]:
    """The float32 weight of a rank's share, and its outputs or inputs in the whole layer."""
    if rank.packing(module) is None:
        return rank.read(f"{module}.weight").float(), rank.linear(module).ranges[0]
    weight, part = quantized_share(rank, module, size)
    return weight.dequantize(), part


def rank_size(rank: RankCheckpoint, module: str) -> int:
    cut = rank.linear(module)
    assert cut is not None
    return cut.size


def model_fields(rank: RankCheckpoint) -> Fields:
    file = next(iter(rank.files.values()))
    return Fields(file, read_json(file.parent / "config.json")).nested("quantization_config")


@pytest.mark.parametrize(("method", "scheme", "scrambled"), sampled(CASES, QUICK))
def test_shares_compute_what_the_model_computes(
    tmp_path: Path, method: str | None, scheme: str, scrambled: bool
) -> None:
    """Rows of a column-parallel layer are the model's, bit for bit; products of a row-parallel one add up to it."""
    model = random_model(tmp_path, method, scheme, scrambled)
    with open_checkpoint(tmp_path) as checkpoint:
        (alone,) = [cut_checkpoint(checkpoint, model.fields, (1, 1), 0, 0)]
        for degree in range(2, min(8, model.config["num_attention_heads"]) + 1):
            ranks = [cut_checkpoint(checkpoint, model.fields, (degree, 1), 0, rank) for rank in range(degree)]
            for name, size in model.sizes.items():
                module = f"model.layers.1.{name}"
                whole, _ = share_of(alone, module, size)
                assert whole.shape == size
                held = [rank for rank in ranks if rank.linear(module).length > 0]
                shares = [share_of(rank, module, size) for rank in held]
                assert {row for _, part in shares for row in part} == set(range(rank_size(ranks[0], module)))
                for weight, part in shares:
                    if name in ("self_attn.o_proj", "mlp.down_proj"):
                        assert torch.equal(weight, whole[:, part.start : part.stop]), (name, degree)
                    else:
                        assert torch.equal(weight, whole[part.start : part.stop]), (name, degree)
                biases = [rank.files.get(f"{module}.bias") for rank in ranks]
                if model.biases and name in ("self_attn.o_proj", "mlp.down_proj"):
                    assert [bias is not None for bias in biases] == [True] + [False] * (degree - 1)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_the_operator_takes_groups_that_were_filled_up(tmp_path: Path, name: str) -> None:
    """The products of all ranks, each with the inputs it has, add up to the whole layer's."""
    model = Random(tmp_path, heads=8, kv_heads=8, method="gptq", scheme="w4 g16 asymmetric", scrambled=True)
    module, x = f"model.layers.0.{name}", torch.randn(5, model.sizes[name][1])
    with open_checkpoint(tmp_path) as checkpoint:
        degree = random.randint(2, 5)
        alone = cut_checkpoint(checkpoint, model.fields, (1, 1), 0, 0)
        wanted = x @ share_of(alone, module, model.sizes[name])[0].t()
        total = torch.zeros_like(wanted)
        for number in range(degree):
            rank = cut_checkpoint(checkpoint, model.fields, (degree, 1), 0, number)
            weight, part = quantized_share(rank, module, model.sizes[name])
            total += QuantizedLinear(weight, None, torch.float32)(x[:, part.start : part.stop])
    assert torch.allclose(total, wanted, atol=1e-4)


def test_the_shape_without_weights_is_the_shape_with_them(tmp_path: Path) -> None:
    for number, (method, scheme, _) in enumerate(QUICK):
        model = Random(tmp_path / str(number), heads=4, kv_heads=2, inner=9, method=method, scheme=scheme)
        with open_checkpoint(model.folder) as checkpoint:
            for degree in range(1, 5):
                assert describe(checkpoint, model.fields, degree).shape == describe_shape(model.fields, degree)


def test_planning_imports_no_torch() -> None:
    names = [f"bladellm_runtime.distributed.{name}" for name in ("plan", "cuts", "layouts", "table", "manifest")]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_group_that_a_border_cuts_has_its_scale_on_both_sides(tmp_path: Path) -> None:
    model = Random(tmp_path, heads=6, kv_heads=6, method="gptq", scheme="w4 g16")
    key = "model.layers.0.self_attn.o_proj.scales"
    with open_checkpoint(tmp_path) as checkpoint:
        first, second = (cut_checkpoint(checkpoint, model.fields, (2, 1), 0, rank).read(key) for rank in range(2))
    assert len(first) == len(second) == 2
    assert torch.equal(first[1], second[0])
    assert torch.equal(first[1], model.tensors[key][1])


def test_a_border_within_a_packed_word_is_refused_in_one_sentence(tmp_path: Path) -> None:
    model = Random(tmp_path, heads=4, kv_heads=4, method="awq", scheme="w4 channel")
    model.config["head_dim"], model.config["num_attention_heads"] = 4, 8
    model.config["num_key_value_heads"] = 8
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"packs 8 channels in a word"):
        cut_checkpoint(checkpoint, model.fields, (8, 1), 0, 1)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", r"^model.layers.1.mlp.down_proj is missing"),
        ("model.embed_tokens.weight", r"^model.embed_tokens.weight is missing"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, key: str, message: str) -> None:
    model = Random(tmp_path, heads=4, kv_heads=2, biases=False)
    with open_checkpoint(tmp_path) as checkpoint:
        del checkpoint.files[key]
        with pytest.raises(CheckpointError, match=message):
            cut_checkpoint(checkpoint, model.fields, (2, 1), 0, 0)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    model = Random(tmp_path, heads=4, kv_heads=2)
    model.config["intermediate_size"] = 96
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"mlp\.[\w.]+ has shape \[.*112"),
    ):
        cut_checkpoint(checkpoint, model.fields, (2, 1), 0, 0)


def test_only_the_stages_that_need_it_hold_the_embedding(tmp_path: Path) -> None:
    for tied in (False, True):
        model = Random(tmp_path / str(tied), heads=4, kv_heads=2, layers=3, tied=tied)
        with open_checkpoint(model.folder) as checkpoint:
            stages = [cut_checkpoint(checkpoint, model.fields, (1, 3), stage, 0) for stage in range(3)]
        held = ["model.embed_tokens.weight" in stage.files for stage in stages]
        assert held == [True, False, tied]
        assert ["model.norm.weight" in stage.files for stage in stages] == [False, False, True]


def test_rows_can_be_found_in_the_file(tmp_path: Path) -> None:
    model = Random(tmp_path, heads=6, kv_heads=3)
    with open_checkpoint(tmp_path) as checkpoint:
        rank = cut_checkpoint(checkpoint, model.fields, (4, 1), 0, random.randrange(4))
        seen = 0
        for key in rank.files:
            ranges = rank.locate(key)
            if ranges is not None:
                data = b"".join(part.file.read_bytes()[part.start : part.start + part.size] for part in ranges)
                assert data == rank.read(key).contiguous().view(torch.uint8).numpy().tobytes()
                assert sum(part.shape[0] for part in ranges) == rank.shape(key)[0]
                seen += 1
        assert seen > 10
        assert rank.locate("model.layers.0.self_attn.o_proj.weight") is None


def test_describe_names_families_it_does_not_know(tmp_path: Path) -> None:
    model = Random(tmp_path, heads=4, kv_heads=2)
    model.config["architectures"] = ["GPT2LMHeadModel"]
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"cannot be split"),
    ):
        describe(checkpoint, model.fields, 2)
