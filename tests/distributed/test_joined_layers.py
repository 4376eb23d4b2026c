"""Where the layers of ranks are joined: a sum, the residual addition and the norm behind it are one call."""

import random
from unittest import mock

import pytest
import torch

from tests.distributed.ranks import LIMIT, load_rank
from tests.distributed.threads import ThreadCommunicator, run_ranks
from tests.models.harness import Sequences, load_tiny, random_prompt, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan
from tests.models.test_wanted_tokens import step_wanting
from tests.support.cases import some_pairs

LAYERS = 3


def calls(add: str, rows: int, last: int) -> list[tuple[str, int]]:
    """Of a step of so many tokens, of which `last` have logits."""
    sums = [(add, rows)] * (2 * LAYERS - 1)
    return [("all_reduce", rows), *sums, (add, last), ("all_gather_last", last)]


def logits(model, prompts: list[list[int]], fused: bool) -> list[torch.Tensor]:
    """Of prompts but their last tokens, then of those, decoded."""
    sequences = Sequences(model, slots=len(prompts))
    with mock.patch.object(model, "fuses", return_value=fused):
        start = sequences.step([(slot, prompt[:-1]) for slot, prompt in enumerate(prompts)])
        return [*start, *sequences.step([(slot, prompt[-1:]) for slot, prompt in enumerate(prompts)])]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("kind", "degree"), some_pairs(["float", "biased", "w4"], [2, 3]))
def test_a_step_is_one_call_a_row_parallel_layer(kind, degree, fused, tmp_path):
    if kind == "w4":
        Tiny(tmp_path, plan("gptq", SCHEMES["w4 g16"], (), scrambled=True), scrambled=("_proj",))
    else:
        save_tiny(tmp_path, "llama", attention_bias=kind == "biased", mlp_bias=kind == "biased")
    prompts = [random_prompt(random.randint(3, 12)) for _ in range(random.randint(1, 4))]
    tokens = sum(len(prompt) - 1 for prompt in prompts)
    expected = torch.cat(logits(load_tiny(tmp_path), prompts, False))

    def work(group: ThreadCommunicator) -> tuple[torch.Tensor, list[tuple[str, int]]]:
        return torch.cat(logits(load_rank(tmp_path, group), prompts, fused)), group.joined

    decode = calls("add_delayed_norm" if fused else "add_norm", len(prompts), len(prompts))
    for found, joined in run_ranks(degree, work):
        assert joined == calls("add_norm", tokens, tokens) + decode
        assert (found - expected).abs().max() <= LIMIT


def test_of_a_stream_that_ends_only_wanted_rows_are_joined(tmp_path):
    """Some tokens' logits of a step, of all its tokens' streams and of the wanted ones alone; and none."""
    save_tiny(tmp_path, "qwen2")
    prompts = [random_prompt(random.randint(5, 15)) for _ in range(3)]
    rows = list(enumerate(prompts))
    tokens, ends = sum(map(len, prompts)), torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1

    def some(model) -> list[torch.Tensor]:
        found = []
        for wanted in (ends[[0, 2]], ends[:0]):
            batch = Sequences(model).batch(rows)
            batch.logit_tokens = wanted
            found.append(model.logits(model.forward(batch)))
        return [*found, step_wanting(Sequences(model), rows, [0, 2])]

    expected = some(load_tiny(tmp_path))
    streams = [("all_reduce", tokens), *[("add_norm", tokens)] * (2 * LAYERS - 2)]
    last = [("add_norm", 2), ("add_norm", 2), ("all_gather_last", 2)]
    for found, joined in run_ranks(2, lambda group: (some(load_rank(tmp_path, group)), group.joined)):
        assert joined == calls("add_norm", tokens, 2) + calls("add_norm", tokens, 0) + streams + last
        for mine, one in zip(found, expected, strict=True):
            assert mine.shape == one.shape
            assert torch.allclose(mine, one, rtol=0, atol=LIMIT)


def test_ranks_fuse_together_or_not_at_all(tmp_path):
    """Layers of ranks may differ in size, and so in what there are kernels for."""
    save_tiny(tmp_path, "llama")

    def work(group: ThreadCommunicator) -> list[bool]:
        model = load_rank(tmp_path, group)
        for layer in model.layers:
            layer.fuses = lambda rows: rows <= (4 if group.rank else 8)
        return [model.fuses(rows) for rows in (3, 6, 9)]

    assert run_ranks(2, work) == [[True, False, False]] * 2
