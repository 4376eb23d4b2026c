"""The last layer for the tokens alone whose hidden states are wanted, against transformers on whole sequences."""

import pytest
import torch

from bladellm_runtime.layers.batch import WantedTokens
from bladellm_runtime.layers.linear import Linear
from tests.models.harness import DEVICES, Sequences, load_tiny, random_prompt, reference_logits, save_tiny

LIMIT = 1e-4
CASES = {
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "mistral-window": ("mistral", {"sliding_window": 11, "head_dim": 16}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


@pytest.fixture(scope="module", params=list(CASES), ids=str)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    family, options = CASES[request.param]
    return folder, save_tiny(folder, family, **options)


def step_wanting(sequences: Sequences, rows: list[tuple[int, list[int]]], wanted: list[int]) -> torch.Tensor:
    """A step that wants the newest token of those rows; its logits [R, vocab], on the CPU."""
    batch = sequences.batch(rows)
    ends = torch.tensor([len(tokens) for _, tokens in rows]).cumsum(0) - 1
    slots = [rows[row][0] for row in wanted]
    numbers = (
        [int(ends[row]) for row in wanted],
        [sequences.arena.base_row(slot) for slot in slots],
        slots,
        [sequences.lengths[slot] for slot in slots],
    )
    device = batch.input_ids.device
    tokens, base_rows, slot_numbers, kv_lens = (torch.tensor(n, dtype=torch.int64, device=device) for n in numbers)
    batch.logit_tokens = tokens
    batch.wanted = WantedTokens(tokens, base_rows, slot_numbers, kv_lens, max(numbers[3], default=0))
    return sequences.model.logits(sequences.model.forward(batch)).cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_wanted_tokens_of_mixed_steps(pair, device):
    """A decode row, a chunk behind others, a chunk nobody wants and a whole prompt; then all of them decode, which
    reads K and V of tokens that were not wanted."""
    folder, reference = pair
    prompts = [random_prompt(length) for length in (9, 34, 27, 13)]
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    sequences = Sequences(load_tiny(folder, device))
    step_wanting(sequences, [(0, prompts[0][:8]), (1, prompts[1][:20])], [])
    rows = [(0, prompts[0][8:]), (1, prompts[1][20:33]), (2, prompts[2][:26]), (3, prompts[3][:12])]
    found = step_wanting(sequences, rows, [0, 1, 3])
    wanted = torch.stack([expected[0][8], expected[1][32], expected[3][11]])
    assert (found - wanted).abs().max() < LIMIT * wanted.abs().max()
    found = torch.cat(sequences.step([(slot, prompts[slot][-1:]) for slot in (1, 2, 3)]))
    wanted = torch.stack([expected[slot][-1] for slot in (1, 2, 3)])
    assert (found - wanted).abs().max() < LIMIT * wanted.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_no_token_is_wanted(pair, device):
    """The chunk in front of a prompt's last one gives no hidden states, and its K and V are those of the prompt."""
    folder, reference = pair
    prompt = random_prompt(41)
    sequences = Sequences(load_tiny(folder, device))
    assert step_wanting(sequences, [(2, prompt[:30])], []).shape == (0, sequences.model.spec.vocab_size)
    found = step_wanting(sequences, [(2, prompt[30:])], [0])[0]
    wanted = reference_logits(reference, prompt)[-1]
    assert (found - wanted).abs().max() < LIMIT * wanted.abs().max()


def test_the_last_layer_computes_wanted_tokens_alone(pair):
    folder, _ = pair
    sequences = Sequences(load_tiny(folder, "cpu"))
    rows: list[int] = []

    class Counted(Linear):
        def __call__(self, x, out=None):
            rows.append(len(x))
            return super().__call__(x, out)

    for layer in sequences.model.layers:
        layer.mlp.down = Counted(layer.mlp.down.weight)
    step_wanting(sequences, [(1, random_prompt(12)), (3, random_prompt(7))], [1])
    assert rows == [19] * (len(sequences.model.layers) - 1) + [1]
