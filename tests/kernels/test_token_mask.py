"""Token masks against their reference, their kernel interpreted and compiled; sampling where few tokens are left."""

import pytest
import torch
from bladellm_kernels.sample_step import SampleRows
from bladellm_kernels.token_mask import mask_tokens_, token_mask_reference

from tests.kernels.conditions import DEVICES, DTYPES
from tests.kernels.hopper import compiled_launches, spilled, waits_before_it_writes
from tests.kernels.interpreted import run_interpreted
from tests.kernels.sample_step_support import interpreted, random_request, sampled, slots_of
from tests.kernels.test_sample_step import RESULTS, seeded

SHAPES = [(1, 1, 1), (3, 31, 2), (5, 33, 5), (6, 1000, 1), (4, 70, 0)]
"""Rows, tokens, masks."""


def problem(rows, vocab, count, dtype, device="cpu"):
    """Logits with a stride, in NaN that must stay, and masks of all densities, longer than they need be."""
    memory = torch.full((rows, vocab + 5), torch.nan).to(dtype)
    memory[:, :vocab] = torch.randn(rows, vocab)
    density = torch.rand(count, 1, 1).pow(3)
    bits = (torch.rand(count, -(-vocab // 32) + 1, 32) < density).long()
    masks = (bits << torch.arange(32)).sum(2)
    masks = torch.where(masks >= 2**31, masks - 2**32, masks).int()
    chosen = torch.randperm(rows)[:count]
    return memory.to(device)[:, :vocab], masks.to(device), chosen.to(device)


def check(apply, dtype, device="cpu"):
    for shape in SHAPES:
        logits, masks, rows = problem(*shape, dtype, device)
        expected = token_mask_reference(logits.cpu(), masks.cpu(), rows.cpu())
        apply(logits, masks, rows)
        assert torch.equal(logits.cpu(), expected), shape
        assert logits._base.cpu()[:, shape[1] :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_forbidden_tokens_are_minus_infinity_and_others_keep_their_bits(device, dtype):
    check(mask_tokens_, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_are_not_finite_can_still_be_told(device):
    logits = torch.tensor([[torch.nan, torch.inf, 1.0, -torch.inf]], device=device).repeat(2, 1)
    masks = torch.tensor([[0], [15]], dtype=torch.int32, device=device)
    mask_tokens_(logits, masks, torch.tensor([1, 0], device=device))
    assert logits[1].isnan().tolist() == [True, True, False, False]
    assert logits[1, 2:].tolist() == [-torch.inf, -torch.inf]
    assert logits[0].isnan().tolist() == [True, False, False, False]
    assert logits[0, 1:].tolist() == [torch.inf, 1.0, -torch.inf]


def test_wrong_arguments_are_refused():
    logits, masks, rows = problem(4, 40, 2, torch.float32)
    for name, wrong in {
        "logits": (logits.double(), masks, rows),
        "logits must be dense": (logits.t(), masks, rows),
        "masks must be int32": (logits, masks.long(), rows),
        "masks must be bits": (logits, masks[:, :1].contiguous(), rows),
        "rows": (logits, masks, rows.int()),
        r"int64 \[2\]": (logits, masks, rows[:1]),
    }.items():
        with pytest.raises(ValueError, match=name):
            mask_tokens_(*wrong)


def interpreted_masks() -> None:
    from bladellm_kernels.token_mask_triton import launch_token_mask

    def launch(logits, masks, rows):
        if len(rows):
            launch_token_mask(logits, masks, rows, block=32)

    for dtype in DTYPES:
        check(launch, dtype)


def few_tokens_left() -> None:
    """The kernels that sample, where filters ask for more tokens than are allowed."""
    rng = seeded()
    for vocab, capacity in ((9, 16), (140, 16)):
        requests = [random_request(rng, vocab) for _ in range(6)]
        slots, logits = slots_of(requests, vocab), torch.randn(6, vocab)
        for row, left in enumerate((1, 1, 2, 3, 7, 0)):
            forbidden = torch.ones(vocab, dtype=torch.bool)
            forbidden[rng.sample(range(vocab), left)] = False
            logits[row, forbidden] += -torch.inf
        rows = SampleRows(torch.randperm(6), torch.randint(0, 120, (6,)))
        expected = sampled(logits, rows, slots)
        assert expected[0][5] == -1
        got = interpreted(logits, rows, slots, capacity, block=128, few=16)
        for what, one, other in zip(RESULTS, expected, got, strict=True):
            assert torch.equal(one, other), (what, vocab)


def interpreted_kernels() -> None:
    interpreted_masks()
    few_tokens_left()


def test_the_kernels_interpreted():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_token_mask", "interpreted_kernels")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_compiles_for_hopper(dtype):
    pytest.importorskip("triton")
    from bladellm_kernels.token_mask_triton import launch_token_mask

    with compiled_launches() as compiled:
        launch_token_mask(*problem(2, 151_936, 2, dtype))
    ptx = compiled["token_mask_kernel"].asm["ptx"]
    assert spilled(ptx) == 0
    assert waits_before_it_writes(ptx)
