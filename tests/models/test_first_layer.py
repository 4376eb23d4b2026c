"""What the first layer projects, looked up by token: transformers' logits all the same, and nobody asks the layer."""

from unittest import mock

import pytest
import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models import loading
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.loading import load_model
from tests.distributed.ranks import load_rank
from tests.distributed.threads import ThreadCommunicator, run_ranks
from tests.models.harness import DEVICES, Sequences, random_prompt, reference_logits, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan
from tests.models.test_wanted_tokens import step_wanting

LIMIT = 1e-4
CASES = {
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "llama-biased": ("llama", {"attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 11, "head_dim": 16}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


def load(folder, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(
        folder, read_model_spec(folder), device=torch.device(device), dtype=dtype, load_format="auto", seed=0,
        precompute_first_layer=True,
    )  # fmt: skip


def two_prompts() -> list[list[int]]:
    return [random_prompt(length) for length in (9, 34)]


def assert_all_known(model: Decoder, reference, prompts: list[list[int]]) -> None:
    """Both prompts, in chunks, one of which is behind a decode row, and then both decode; fused and not."""
    layer, spec = model.layers[0].attention, model.spec
    assert layer.known is not None
    assert layer.known.weight.shape == (spec.vocab_size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    assert layer.known.weight.nbytes == model.known_bytes == model.first_layer_bytes
    layer.qkv = mock.Mock(side_effect=AssertionError("asked"), normed=mock.Mock(side_effect=AssertionError("asked")))
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    for fuses in (False, True):
        sequences = Sequences(model)
        with mock.patch.object(model, "fuses", return_value=fuses):
            found = [sequences.step([(0, prompts[0][:7]), (2, prompts[1][:20])])]
            found.append(sequences.step([(0, prompts[0][7:8]), (2, prompts[1][20:33])]))
            found.append(sequences.step([(slot, prompt[-1:]) for slot, prompt in zip((0, 2), prompts, strict=True)]))
        for row, logits in enumerate(expected):
            answered = torch.cat([step[row] for step in found])
            assert (answered - logits).abs().max() < LIMIT * logits.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, device, tmp_path):
    family, options = CASES[case]
    reference = save_tiny(tmp_path, family, **options)
    assert_all_known(load(tmp_path, device), reference, two_prompts())


def test_where_it_is_the_last_one_too(tmp_path):
    reference = save_tiny(tmp_path, "qwen3", num_hidden_layers=1, head_dim=24)
    model, prompt = load(tmp_path), random_prompt(21)
    model.layers[0].attention.qkv = mock.Mock(side_effect=AssertionError("asked"))
    sequences = Sequences(model)
    step_wanting(sequences, [(1, prompt[:12])], [])
    found, expected = step_wanting(sequences, [(1, prompt[12:])], [0])[0], reference_logits(reference, prompt)[-1]
    assert (found - expected).abs().max() < LIMIT * expected.abs().max()


def test_of_quantized_layers(tmp_path):
    tiny = Tiny(tmp_path, plan("gptq", SCHEMES["w4 g16 asymmetric"], (), scrambled=True), scrambled=("_proj",))
    assert_all_known(load(tmp_path), tiny.reference, two_prompts())


@pytest.mark.parametrize("degree", [2, 3])
def test_every_rank_knows_its_heads(degree, tmp_path):
    reference, prompts = save_tiny(tmp_path, "qwen2"), two_prompts()

    def work(group: ThreadCommunicator) -> None:
        model = load_rank(tmp_path, group)
        assert model.known_bytes == 0
        model.precompute_first_layer()
        assert_all_known(model, reference, prompts)

    run_ranks(degree, work)


def test_padding_and_tokens_by_slot(tmp_path):
    """As in captured steps: ids below 0 are padding, and the newest tokens of all slots are looked through."""
    save_tiny(tmp_path, "llama")
    attention = load(tmp_path).layers[0].attention
    newest, slots = torch.tensor([5, -1, 80, 0]), torch.tensor([2, 1, 0])
    found = attention.known(newest, slots, padded=True)
    assert torch.equal(found, torch.stack((attention.known.weight[80], torch.zeros_like(found[0]), found[2])))
    assert torch.equal(found[2], attention.known.weight[5])


def test_there_must_be_memory_for_it(tmp_path, monkeypatch):
    save_tiny(tmp_path, "llama")
    needed = load(tmp_path).first_layer_bytes
    monkeypatch.setattr(loading, "_check_memory", lambda *_: None)
    monkeypatch.setattr(loading, "_free_memory", lambda device: needed - 1)
    with pytest.raises(CheckpointError, match="leave out --precompute_first_layer"):
        load(tmp_path)
    monkeypatch.setattr(loading, "_free_memory", lambda device: needed)
    load(tmp_path)
