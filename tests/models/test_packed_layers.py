"""Which layers of a model are packed, what it takes, and that answers stay those of the plain weights."""

import random

import pytest
import torch
from bladellm_kernels.packed_linear import MAX_ROWS

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.layers import packed_linear
from bladellm_runtime.layers.linear import Linear, StackedLinear
from bladellm_runtime.layers.packed_linear import PackedLinear
from bladellm_runtime.models import loading
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.models.lora_layout import LoraShape
from bladellm_runtime.models.packed_layers import NO_ROOM, PackedRoom, added_bytes, pack_linears, packable_bytes
from tests.models.harness import Sequences, random_prompt, save_tiny

WHOLE_TILES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16, **options) -> Linear:
    return Linear(torch.randn(outputs, inputs).to(dtype), **options)


ROOM = PackedRoom(2**62)


def load(folder, room: PackedRoom = ROOM, lora: LoraShape | None = None):
    return load_model(
        folder, read_model_spec(folder), device=torch.device("cpu"), dtype=torch.bfloat16, load_format="auto", seed=0,
        packed_room=room, lora=lora,
    )  # fmt: skip


def test_plain_layers_of_whole_tiles_are_packed():
    far = torch.randn(64, 64)
    far[:, ::2] *= 2.0**-40  # half of the exponents have no code
    stacked = torch.randn(128, 64).bfloat16()
    linears = {
        "layers.0.qkv": linear(128, 64, bias=torch.randn(128).bfloat16()),
        "layers.0.gate_up": linear(256, 64),
        "layers.1.gate_up": linear(256, 64, bias=torch.randn(256).bfloat16()),
        "layers.0.output": linear(64, 96),
        "layers.0.down": linear(64, 128, torch.float32),
        "layers.1.output": Linear(far.bfloat16()),
        "layers.1.qkv": Linear(stacked[:64], None, stacked),
        "layers.1.down": StackedLinear([linear(64, 64)]),
        "head": linear(320, 64),
    }
    packed = pack_linears(linears)
    assert list(packed) == list(linears)
    assert {name for name in packed if packed[name] is not linears[name]} == {
        "layers.0.qkv",
        "layers.0.gate_up",
        "head",
    }
    found = [layer for layer in packed.values() if isinstance(layer, PackedLinear)]
    assert [layer.packed.gated for layer in found] == [False, True, False]
    assert added_bytes(packed) == sum(layer.packed.bytes for layer in found) <= packable_bytes(linears)
    assert packable_bytes(packed) < packable_bytes(linears)
    assert added_bytes(linears) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_of_packed_weights_are_close_to_those_of_plain_ones(family, tmp_path, monkeypatch):
    save_tiny(tmp_path, family, **WHOLE_TILES)
    served = []
    monkeypatch.setattr(
        packed_linear, "reads_packed", lambda x, weight: len(x) <= MAX_ROWS and served.append(len(x)) is None
    )
    plain, packed = load(tmp_path, NO_ROOM), load(tmp_path)
    assert packed.packed_bytes == packed.weight_bytes - plain.weight_bytes > 0
    assert plain.packed_bytes == 0
    prompt = random_prompt(80)
    both = [Sequences(plain), Sequences(packed)]
    for tokens in (prompt[:70], prompt[70:71], prompt[71:72], prompt[72:]):
        first, second = (sequences.step([(0, tokens)])[0] for sequences in both)
        # As far as rounding to bfloat16 in three layers takes them, of logits some ten wide.
        assert (first - second).abs().max() <= 0.05 * first.abs().max()
        assert bool(served) == (len(tokens) <= MAX_ROWS)
        served.clear()


def test_layers_with_room_for_adapters_behind_their_weight_are_not_packed(tmp_path):
    save_tiny(tmp_path, "llama", **WHOLE_TILES, vocab_size=128)
    model = load(tmp_path, lora=LoraShape(2, 4, torch.bfloat16))
    assert isinstance(model.head, PackedLinear)
    assert model.packed_bytes == model.head.packed.bytes


def test_there_are_none_where_they_would_take_more_than_they_may(tmp_path, monkeypatch):
    save_tiny(tmp_path, "llama", **WHOLE_TILES)
    needed = (
        packable_bytes({str(place): layer for place, layer in enumerate(load(tmp_path, NO_ROOM).layers[0].linears)}) * 3
    )
    assert load(tmp_path, PackedRoom(needed)).packed_bytes == needed
    assert load(tmp_path, PackedRoom(needed - 1)).packed_bytes == 0
    monkeypatch.setattr(loading, "_check_memory", lambda *_: None)
    kept = random.randrange(1, 2**40)
    monkeypatch.setattr(loading, "_free_memory", lambda device: needed + kept)
    assert load(tmp_path, PackedRoom(needed, kept)).packed_bytes == needed
    assert load(tmp_path, PackedRoom(needed, kept + 1)).packed_bytes == 0
    monkeypatch.setattr(loading, "_free_memory", lambda device: needed - 1)
    with pytest.raises(CheckpointError, match="--packed_weights off"):
        load(tmp_path, PackedRoom(needed, asked=True))
