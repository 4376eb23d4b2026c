"""Decoders whose A lies behind the weights: steps are those of A apart, whatever slots hold that are not used."""

from dataclasses import replace

import pytest
import torch

from bladellm_runtime.layers.residual import FusedStream
from bladellm_runtime.models import lora_stacking
from bladellm_runtime.models.weights import weight_table
from tests.lora.test_layers import SHAPE, Adapted, assert_merged, family, load, run
from tests.models.harness import random_prompt

__all__ = ["family"]  # a fixture
SLOTS = [1, -1, 0, 2, 1]
WAYS = {"apart": (False, True), "stacked": (True, False), "stacked with delayed norms": (True, True)}
"""By name: whether A is stacked, and whether norms are delayed."""


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    stacked, delayed = WAYS[request.param]
    monkeypatch.setattr(lora_stacking, "STACKED", stacked)
    monkeypatch.setattr("bladellm_runtime.layers.lora.DELAYED_NORMS", delayed)
    return request.param


@pytest.fixture
def fused(monkeypatch):
    """Fused streams that were started."""
    started, start = [], FusedStream.start.__func__

    def counted(kind, x, norm):
        started.append(norm)
        return start(kind, x, norm)

    monkeypatch.setattr(FusedStream, "start", classmethod(counted))
    return started


def test_every_way_gives_the_logits_of_merged_weights(family, way, fused):
    folder, adapters, references = family
    prompts = [random_prompt(length) for length in (9, 5, 17, 4, 11)]
    model = load(folder, adapters)
    assert (model.layers[0].mlp.down.stacked is None) == (way == "apart")
    assert_merged(run(model, SLOTS, prompts), prompts, [references[slot + 1] for slot in SLOTS])
    assert len(fused) == (2 if way == "stacked with delayed norms" else 0), "two decode steps"


def test_slots_that_no_row_has_may_hold_anything(family):
    """Also slots that change while steps run, and the rows that fill a weight up."""
    folder, adapters, references = family
    model = load(folder, adapters, shape=replace(SHAPE, max_rank=9))
    for name, linear in ((name, linear) for layer in model.layers for name, linear in named(layer).items()):
        rows = linear.layer.stacked[len(linear.layer.weight) :]
        used = 2 * linear.weights.a.shape[1]
        rows[used:] = torch.nan
        assert len(rows) >= 4 * linear.weights.a.shape[1], name
        assert len(linear.layer.stacked) % lora_stacking.ALIGNMENT == 0
        linear.weights.b[2:] = torch.nan
        linear.weights.scales[2:] = torch.nan
    slots = [1, -1, 0]
    prompts = [random_prompt(length) for length in (9, 6, 13)]
    assert_merged(run(model, slots, prompts), prompts, [references[slot + 1] for slot in slots])


def named(layer):
    return {
        "qkv": layer.attention.qkv, "output": layer.attention.output,
        "gate_up": layer.mlp.gate_up, "down": layer.mlp.down,
    }  # fmt: skip


def test_layers_whose_a_is_large_or_of_another_type_keep_it_apart(family, monkeypatch, fused):
    folder, adapters, references = family
    plain = load(folder, adapters, shape=replace(SHAPE, dtype=torch.bfloat16))
    assert all(linear.stacked is None for linear in named(plain.layers[0]).values())
    # The inputs of `down` are the most: it alone does not fit.
    table = weight_table(plain.spec)
    monkeypatch.setattr(lora_stacking, "MOST_BYTES", 4 * 4 * 8 * 3 * 48)
    rows = lora_stacking.stacked_rows(table, SHAPE, {}, torch.float32)
    assert {name.rpartition(".")[2] for name in rows} == {"qkv", "output", "gate_up", "down"}
    monkeypatch.setattr(lora_stacking, "MOST_BYTES", 4 * 4 * 8 * 58 - 1)
    assert {name.rpartition(".")[2] for name in lora_stacking.stacked_rows(table, SHAPE, {}, torch.float32)} == {
        "output"
    }
    quantized = {"model.layers.1.self_attn.o_proj": None}
    assert len(lora_stacking.stacked_rows(table, SHAPE, quantized, torch.float32)) == len(plain.layers) - 1
    model = load(folder, adapters)
    assert [linear.stacked is None for linear in named(model.layers[0]).values()] == [True, False, True, True]
    prompts = [random_prompt(length) for length in (9, 5, 17, 4, 11)]
    assert_merged(run(model, SLOTS, prompts), prompts, [references[slot + 1] for slot in SLOTS])
    assert not fused


def test_steps_in_half_precision_are_near_those_in_float32(family, monkeypatch, fused):
    """In float16 norms are not delayed: what they have not yet divided may be out of its range."""
    folder, adapters, _ = family
    prompt = random_prompt(12)
    logits = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load(folder, adapters, shape=replace(SHAPE, dtype=dtype), dtype=dtype)
        logits[dtype] = run(model, [0], [prompt])[0].float()
        assert len(fused) == (0 if dtype == torch.float16 else 2)
        fused.clear()
        limit = {torch.float32: 0, torch.bfloat16: 0.08, torch.float16: 0.02}[dtype]
        wanted = logits[torch.float32]
        assert (logits[dtype] - wanted).abs().max() <= limit * wanted.abs().max()


def test_steps_in_tiles_after_steps_by_rows(family):
    folder, adapters, references = family
    sequences = Adapted(load(folder, adapters), [0])
    prompt = random_prompt(9)
    found = sequences.step([(0, prompt[:-2])])
    found += sequences.step([(0, [prompt[-2]])])
    sequences.tiled = True
    found += sequences.step([(0, [prompt[-1]])])
    assert_merged([torch.cat(found)], [prompt], [references[1]])
