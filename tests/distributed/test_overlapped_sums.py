"""Sums over ranks in parts, each under way while another part is computed: the same results, one order of calls."""

import random
from unittest import mock

import pytest
import torch

from bladellm_runtime.distributed.communicator import OVERLAP_ROWS, GroupCommunicator, make_communicator
from bladellm_runtime.layers.parts import PARTS, TILE_ROWS, row_parts
from tests.distributed.processes import run_processes
from tests.distributed.ranks import LIMIT, load_rank, run_prompts
from tests.distributed.threads import ThreadCommunicator, run_ranks
from tests.models.harness import Sequences, load_tiny, random_prompt, reference_logits, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan
from tests.models.test_wanted_tokens import step_wanting
from tests.support.cases import some_pairs

LAYERS = 3
HIDDEN = 70


def test_parts_are_all_rows_and_whole_tiles():
    for rows in [*range(1, 40), *random.sample(range(40, 20_000), 200), OVERLAP_ROWS]:
        parts = row_parts(rows)
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
        assert len(parts) == min(PARTS, rows)
        if rows >= PARTS * TILE_ROWS:
            assert all(part.start % TILE_ROWS == 0 for part in parts)
            assert max(part.stop - part.start for part in parts) < rows / PARTS + PARTS * TILE_ROWS
    assert [part.stop - part.start for part in row_parts(OVERLAP_ROWS)] == [OVERLAP_ROWS // PARTS] * PARTS


def test_by_default_parts_are_sums_that_copy_engines_take():
    group = GroupCommunicator.__new__(GroupCommunicator)
    group.overlap_sums(None)
    rows = [OVERLAP_ROWS - 1, OVERLAP_ROWS, 5000, 8192, 8193]
    for fast, copied, taken in ((512, 8192, rows[1:4]), (5000, 8192, rows[3:4]), (512, 0, [])):
        group._sums = mock.Mock(fast_rows=fast, copied_rows=copied)
        assert [each for each in rows if group.overlaps(each)] == taken


def parted(model, group: ThreadCommunicator, prompts: list[list[int]], least: int) -> tuple[list, list]:
    """Logits and the calls that made them, with sums in parts from so many rows on."""
    group.overlap_rows = least
    group.joined.clear()
    return run_prompts(model, prompts), list(group.joined)


@pytest.mark.parametrize(("kind", "degree"), some_pairs(["float", "biased", "w4", "qwen3"], [2, 3]))
def test_logits_are_those_of_whole_sums(kind, degree, tmp_path):
    if kind == "w4":
        reference = Tiny(tmp_path, plan("gptq", SCHEMES["w4 g16"], (), scrambled=True), scrambled=("_proj",)).reference
    elif kind == "qwen3":
        reference = save_tiny(tmp_path, "qwen3", head_dim=16, num_attention_heads=4)
    else:
        reference = save_tiny(tmp_path, "llama", attention_bias=kind == "biased", mlp_bias=kind == "biased")
    prompts = [random_prompt(random.randint(4, 12)) for _ in range(random.randint(1, 3))]
    tokens = sum(len(prompt) - 3 for prompt in prompts)

    def work(group: ThreadCommunicator) -> tuple:
        model = load_rank(tmp_path, group)
        return *parted(model, group, prompts, 1), *parted(model, group, prompts, tokens + 1)

    (first, calls, whole, whole_calls), *others = run_ranks(degree, work)
    sizes = [part.stop - part.start for part in row_parts(tokens)]
    # Both parts are started before one is used: the last product has the first part's sum beside it.
    one_sum = [("start_sum", size) for size in sizes] + [("add_norm of sum", size) for size in sizes]
    prefill = [("all_reduce", tokens), *one_sum * (2 * LAYERS - 1), ("add_norm", tokens), ("all_gather_last", tokens)]
    assert calls[: len(prefill)] == prefill
    assert not any("sum" in name for name, _ in whole_calls if name != "all_reduce")
    for other in others:
        assert other[1] == calls
        assert all(torch.equal(mine, one) for mine, one in zip(first, other[0], strict=True))
    for mine, one, prompt in zip(first, whole, prompts, strict=True):
        assert (mine - one).abs().max() <= LIMIT
        assert (mine - reference_logits(reference, prompt)).abs().max() <= LIMIT


def test_a_stream_that_ends_in_parts(tmp_path):
    """Where nobody says which tokens are wanted, and behind a stage whose stream another one reads."""
    reference = save_tiny(tmp_path, "llama")
    prompt = random_prompt(11)

    def work(group: ThreadCommunicator) -> torch.Tensor:
        model = load_rank(tmp_path, group)
        group.overlap_rows = 2
        batch = Sequences(model).batch([(0, prompt)])
        batch.logit_tokens = None
        hidden = model.forward(batch)
        assert group.joined[-1] == ("add_norm of sum", 6)
        return model.logits(hidden)

    for found in run_ranks(2, work):
        assert (found - reference_logits(reference, prompt)).abs().max() <= LIMIT


@pytest.mark.parametrize("wanted", [[0, 2], []])
def test_the_last_layer_of_wanted_tokens(wanted, tmp_path):
    """Its QKV are of parts, and then its stream of the wanted tokens alone: too few for parts, or none."""
    save_tiny(tmp_path, "qwen2")
    rows = [(slot, random_prompt(random.randint(5, 9))) for slot in range(3)]
    expected = step_wanting(Sequences(load_tiny(tmp_path)), rows, wanted)

    def work(group: ThreadCommunicator) -> tuple[torch.Tensor, list[tuple[str, int]]]:
        model = load_rank(tmp_path, group)
        group.overlap_rows = 9
        return step_wanting(Sequences(model), rows, wanted), group.joined

    for found, joined in run_ranks(2, work):
        assert [name for name, _ in joined].count("start_sum") == PARTS * (2 * LAYERS - 2)
        assert joined[-1] == ("all_gather_last", len(wanted))
        assert torch.allclose(found, expected, rtol=0, atol=LIMIT)


def sums_in_parts(rank: int, ranks: int) -> dict:
    """Over gloo: of the parts of random rows, and of the whole."""
    group = make_communicator([range(ranks)])
    assert group is not None
    torch.manual_seed(5)
    residual, weight = torch.randn(37, HIDDEN), torch.randn(HIDDEN)
    y = torch.randn(ranks, 37, HIDDEN)[rank]
    found: dict = {"overlaps": []}
    for least in (None, 0, 38, 37, 1):
        group.overlap_sums(least)
        found["overlaps"].append(group.overlaps(37))
    normed, total = torch.empty_like(residual), residual.clone()
    mine = y.clone()
    parts = [(rows, group.start_sum(mine[rows], rows.start)) for rows in row_parts(37)]
    for rows, pending in parts:
        pending.add_norm(total[rows], weight, 1e-5, normed[rows])
    found["parts"] = [normed, total]
    found["whole"] = list(group.add_norm(y.clone(), residual.clone(), weight, 1e-5))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_added_up_like_the_whole(ranks, tmp_path):
    """To the bit by two ranks; by three gloo, as NCCL may, goes by where a number lies in what is added up."""
    results = run_processes(ranks, tmp_path, sums_in_parts, ranks)
    for found in results:
        for part, whole, first in zip(found["parts"], found["whole"], results[0]["parts"], strict=True):
            assert torch.equal(part, first)
            assert torch.equal(part, whole) if ranks == 2 else torch.allclose(part, whole, rtol=1e-5, atol=1e-5)
        assert found["overlaps"] == [False, False, False, True, True]
