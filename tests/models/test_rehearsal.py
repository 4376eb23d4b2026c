"""Steps that run as few layers as need all kernels: those and no others write K and V, and whole steps are as ever."""

import random

import pytest
import torch

from tests.models.harness import Sequences, load_tiny, random_prompt, reference_logits, save_tiny

LIMIT = 1e-4


def written(sequences: Sequences) -> list[int]:
    """The layers whose K and V are in memory."""
    rows = sequences.arena.rows
    return [layer for layer in range(rows.shape[1]) if not rows[:, layer].isnan().all()]


def expected_layers(kinds: list[str]) -> list[int]:
    """By another way than the decoder's: what has fewer than two of its kind in front of it, and the last."""
    last = len(kinds) - 1
    return [n for n, kind in enumerate(kinds) if n == last or kinds[:n].count(kind) < 2]


@pytest.fixture(scope="module", params=[1, 2, 5, 9])
def mixed(request, tmp_path_factory):
    """A model with layers of two kinds in random order, and which layer is of which."""
    folder = tmp_path_factory.mktemp("mixed")
    kinds = random.choices(["sliding_attention", "full_attention"], k=request.param)
    options = {"use_sliding_window": True, "sliding_window": 7, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    return folder, save_tiny(folder, "qwen2", **options), kinds


def test_the_layers_of_a_rehearsal_are_of_every_kind(mixed):
    folder, reference, kinds = mixed
    model = load_tiny(folder)
    rehearsed = Sequences(model)
    with model.rehearsal():
        rehearsed.step([(0, random_prompt(9))])
        rehearsed.step([(0, random_prompt(1))])
    assert written(rehearsed) == expected_layers(kinds)
    prompt = random_prompt(random.randint(8, 30))
    whole = Sequences(model)
    found = whole.step([(0, prompt)])[0]
    assert written(whole) == list(range(len(kinds)))
    expected = reference_logits(reference, prompt)
    assert (found - expected).abs().max() < LIMIT * expected.abs().max()


def test_layers_with_other_weights_are_of_another_kind(tmp_path):
    """Such as those that a quantizer left alone: their kernels are others."""
    save_tiny(tmp_path, "llama", num_hidden_layers=8)
    model = load_tiny(tmp_path)
    other = random.randint(2, 6)
    model.layers[other].mlp.down.bytes += 1
    sequences = Sequences(model)
    with model.rehearsal():
        sequences.step([(0, random_prompt(5))])
    assert written(sequences) == sorted({0, 1, other, 7})


def test_a_rehearsal_that_fails_leaves_the_model_whole(tmp_path):
    save_tiny(tmp_path, "llama", num_hidden_layers=6)
    model = load_tiny(tmp_path)
    with pytest.raises(torch.OutOfMemoryError), model.rehearsal():
        raise torch.OutOfMemoryError("no memory")
    sequences = Sequences(model)
    sequences.step([(0, random_prompt(5))])
    assert written(sequences) == list(range(6))


def test_ranks_run_all_layers(tmp_path):
    """One that left out a sum would let the others wait for it."""
    save_tiny(tmp_path, "llama", num_hidden_layers=6)
    model = load_tiny(tmp_path)
    model._communicator = object()
    sequences = Sequences(model)
    with model.rehearsal():
        sequences.step([(0, random_prompt(5))])
    assert written(sequences) == list(range(6))
