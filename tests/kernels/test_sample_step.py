"""sample_step against transformers in float64, and its CUDA kernels against PyTorch's operators: the same tokens."""

import random
from dataclasses import replace

import pytest
import torch
from bladellm_kernels.gumbel import row_keys, uniform
from bladellm_kernels.sample_step import SampleRows, Stage, change_logits, sample_step

from tests.kernels.conditions import DEVICES
from tests.kernels.interpreted import run_interpreted
from tests.kernels.sample_step_support import (
    Request,
    interpreted,
    poisoned_workspace,
    random_request,
    sampled,
    slots_of,
)
from tests.kernels.sampling_support import ALARM, assert_best, chi_square_p, fresh_seed, warped_by_transformers
from tests.kernels.test_kv_rotary_write import spilled
from tests.support.cases import some_of

RESULTS = ("tokens", "feedback", "last", "seen", "counts")
"""What `sampled` returns."""


def seeded() -> random.Random:
    seed = fresh_seed()
    torch.manual_seed(seed)
    return random.Random(seed)


def workspace_for(logits: torch.Tensor):
    return poisoned_workspace(*logits.shape, 2048, "cuda") if logits.is_cuda else None


def allowed(rows: SampleRows, row: int, vocab: int) -> torch.Tensor:
    """Bits of the row's mask, one by one: bool [V]."""
    index = -1 if rows.mask_rows is None else int(rows.mask_rows[row])
    if index < 0:
        return torch.ones(vocab, dtype=torch.bool)
    words = rows.masks[index].tolist()
    return torch.tensor([words[token // 32] >> token % 32 & 1 == 1 for token in range(vocab)])


def problem(rng: random.Random, vocab: int, count: int, device: str = "cpu", dtype=torch.float32, ties: bool = True):
    """Requests, their slots, logits (now and then with ties), and rows in any order, one of them padding."""
    requests = [random_request(rng, vocab) for _ in range(count)]
    logits = torch.randn(count, vocab) * rng.choice([1, 3, 10])
    if ties and rng.random() < 0.4:
        logits = logits.round()
    order = torch.randperm(count)
    order[rng.randrange(count)] = -1
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32) + 1)).int()
    mask_rows = torch.randint(-1, 3, (count,)).int()
    rows = SampleRows(order, torch.randint(0, 120, (count,)))
    if rng.random() < 0.5:
        rows = replace(rows, mask_rows=mask_rows, masks=masks)
    moved = {name: each if (each := getattr(rows, name)) is None else each.to(device) for name in rows.__slots__}
    return requests, slots_of(requests, vocab, device), logits.to(device, dtype), SampleRows(**moved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [17, 501])
def test_the_token_is_the_best_noisy_one_of_those_transformers_keeps(device, vocab):
    rng = seeded()
    # transformers keeps all tokens equal to the last one kept.
    requests, slots, logits, rows = problem(rng, vocab, 40, device, ties=False)
    before = logits.clone()
    tokens, feedback, last, *_ = sampled(logits, rows, slots, workspace=workspace_for(logits))
    assert torch.equal(logits, before), "the logits were changed"
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            assert (tokens[row], feedback[row]) == (-1, 0)
            continue
        request = requests[slot]
        if 0 < request.top_p < 1e-6 or request.top_p > 0.9999:
            request = replace(request, top_p=1e-6 if request.top_p < 0.5 else 1.0)
        scores = expected_scores(request, logits[row].cpu(), slots, slot, int(rows.positions[row]))
        scores = scores.masked_fill(~allowed(rows, row, vocab), -torch.inf)
        if request.temperature:
            scores = warped_by_transformers(
                scores[None], request.temperature, request.top_k, request.top_p, request.min_p
            )[0]
            keys = row_keys(slots.streams[[slot]], rows.positions[[row]]).cpu()
            scores = scores - torch.log(-torch.log1p(-uniform(keys, torch.arange(vocab))[0].double()))
        assert_best(tokens[[row]].cpu(), scores[None], request)
        assert last[slot] == feedback[row] == tokens[row]
    assert last[-1] == -55


def expected_scores(request: Request, logits, slots, slot: int, position: int) -> torch.Tensor:
    """Penalties, bias and min_tokens, token by token, in float64."""
    scores = logits.double().clone()
    repetition, presence, frequency = request.penalties
    for token in slots.seen[slot].nonzero().flatten().tolist():
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token in (slots.counts[slot] > 0).nonzero().flatten().tolist():
        scores[token] -= presence + frequency * int(slots.counts[slot, token])
    for token, value in request.bias:
        scores[token] += value
    if position < request.min_tokens:
        scores[list(request.held)] = -torch.inf
    return scores


@pytest.mark.parametrize("device", DEVICES)
def test_distribution_over_seeds(device):
    draws, vocab = 3000, 40
    request = Request(0.9, 25, 0.95, 0.01, (1.3, 0.4, 0.2), ((1, 1.5), (2, -0.5)))
    base = fresh_seed() % 2**60
    slots = slots_of([replace(request, seed=base + draw) for draw in range(draws)], vocab, device)
    slots.seen.copy_(slots.seen[:1].clone().expand_as(slots.seen))
    slots.counts.copy_(slots.counts[:1].clone().expand_as(slots.counts))
    rows = SampleRows(torch.arange(draws, device=device), torch.full((draws,), 5, device=device))
    logits = (torch.randn(vocab, device=device) * 2).expand(draws, vocab)
    scores = expected_scores(request, logits[0].cpu(), slots, 0, 5)
    exact = warped_by_transformers(scores[None], 0.9, 25, 0.95, 0.01).softmax(dim=-1)[0]
    tokens = sampled(logits, rows, slots, workspace=workspace_for(logits))[0].cpu()
    assert chi_square_p(torch.bincount(tokens, minlength=vocab), exact * draws) > ALARM


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_marked_and_stay_alone(device, bad):
    rng = seeded()
    _, slots, logits, rows = problem(rng, 301, 20, device)
    rows.slots.copy_(torch.arange(20))
    clean = sampled(logits, rows, slots, workspace=workspace_for(logits))
    broken = logits.clone()
    broken[7, ... if bad < 0 else 33] = bad
    got = sampled(broken, rows, slots, workspace=workspace_for(logits))
    assert (got[0][7], got[1][7], got[2][7]) == (-1, 0, 0)
    others = [row for row in range(20) if row != 7]
    assert all(torch.equal(one[others], other[others]) for one, other in zip(got, clean, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_only_penalised_slots_of_the_step_count(device):
    requests = [Request(0.0, penalties=(1.2, 0.0, 0.0)), Request(0.0), Request(0.0, penalties=(1.0, 0.0, 0.1))]
    slots = slots_of(requests, 9, device)
    slots.seen.zero_()
    slots.counts.zero_()
    slots.counts[0, 4] = 32767
    rows = SampleRows(torch.tensor([0, 1], device=device), torch.tensor([3, 3], device=device))
    logits = torch.zeros(2, 9, device=device)
    logits[:, 4] = 9.0
    *_, seen, counts = sampled(logits, rows, slots, workspace=workspace_for(logits))
    assert seen.nonzero().tolist() == [[0, 4]]
    assert counts.nonzero().tolist() == [[0, 4]]
    assert counts[0, 4] == 32767


def test_wrong_arguments_are_refused():
    slots, ids = slots_of([Request()], 9), torch.zeros(1, dtype=torch.int64)
    rows = SampleRows(ids, ids)
    good = {"logits": torch.zeros(1, 9), "rows": rows, "slots": slots, "tokens": ids.clone(), "feedback": ids.clone()}
    for bad in (
        {"logits": torch.zeros(1, 8)},
        {"logits": torch.zeros(1, 9).double()},
        {"tokens": ids.int()},
        {"rows": SampleRows(ids, ids.repeat(2))},
        {"rows": SampleRows(ids, ids, mask_rows=ids.int())},
        {"rows": SampleRows(ids, ids, ids.int(), torch.zeros(1, 0, dtype=torch.int32))},
    ):
        with pytest.raises(ValueError, match="must be"):
            sample_step(**(good | bad))


INTERPRETED = [(7, 6, 16, 128), (129, 6, 64, 128), (700, 4, 64, 512), (1100, 4, 512, 128)]
"""Vocabulary, rows, candidates of a row, and tokens that a program reads at once."""


def some_kernels_agree() -> None:
    kernels_agree(random.sample(INTERPRETED, 2))


def kernels_agree(cases: list[tuple[int, int, int, int]] = INTERPRETED) -> None:
    """In the interpreter: few candidates allowed, so that rows are refined and searched whole, too."""
    rng = seeded()
    for vocab, count, capacity, block in cases:
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        _, slots, logits, rows = problem(rng, vocab, count, dtype=dtype)
        logits[1, 2] = rng.choice([torch.nan, torch.inf, -torch.inf])
        expected = sampled(logits, rows, slots)
        got = interpreted(logits, rows, slots, capacity, programs=rng.choice([1, 40]), block=block, few=16)
        for what, one, other in zip(RESULTS, expected, got, strict=True):
            assert torch.equal(one, other), (what, vocab, rows, one, other)
        assert torch.equal(change_logits(logits[:0], SampleRows(*[rows.slots[:0]] * 2), slots), logits[:0].float())


def ties_and_stages_agree() -> None:
    """Equal logits are cut by id, whatever path finds the cut; and every stage that covers a row gives its token."""
    rng = seeded()
    requests = [
        Request(1.0, top_k=k, top_p=p, seed=k) for k, p in ((0, 0.25), (0, 0.51), (1, 1.0), (5, 0.5), (50, 1.0))
    ]
    slots, count, vocab = slots_of(requests, 130), len(requests), 130
    rows = SampleRows(torch.arange(count), torch.arange(count))
    for logits in (torch.zeros(count, vocab), torch.randn(count, vocab).round().mul(2)):
        expected = sampled(logits, rows, slots)[0]
        for capacity in (16, 256):
            assert torch.equal(expected, interpreted(logits, rows, slots, capacity, block=128, few=16)[0])
    requests = [Request(0.0), Request(0.7, min_p=0.1), Request(1.0, top_k=3, seed=rng.randrange(99))]
    slots, logits = slots_of(requests, vocab), torch.randn(3, vocab)
    expected = sampled(logits, SampleRows(torch.arange(3), torch.arange(3)), slots)[0]
    for stage in Stage:
        covered = torch.arange(stage + 1)
        assert Stage.of(requests[stage].flags) == stage
        got = interpreted(logits[covered], SampleRows(covered, covered), slots, stage=stage, block=128)[0]
        assert torch.equal(got, expected[covered])


CHECKS = ["some_kernels_agree", "ties_and_stages_agree"]


@pytest.mark.parametrize("check", some_of([*CHECKS, "kernels_agree"], CHECKS))
def test_the_kernels_interpreted(check):
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_sample_step", check)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32_003, 128_256, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_give_the_operators_tokens_on_the_gpu(vocab, dtype, monkeypatch):
    rng = seeded()
    _, slots, logits, rows = problem(rng, vocab, 48, "cuda", dtype)
    got = sampled(logits, rows, slots, workspace=workspace_for(logits))
    again = sampled(logits, rows, slots, workspace=workspace_for(logits))
    alone = sampled(logits[5:6], one_row(rows, 5), slots, workspace=workspace_for(logits[5:6]))
    monkeypatch.setattr("bladellm_kernels.sample_step.has_triton", lambda: False)
    expected = sampled(logits, rows, slots)
    for what, one, same, other in zip(RESULTS, got, again, expected, strict=True):
        assert torch.equal(one, other), what
        assert torch.equal(one, same), what
    assert alone[0] == got[0][5]


def one_row(rows: SampleRows, row: int) -> SampleRows:
    mask_rows = None if rows.mask_rows is None else rows.mask_rows[row : row + 1]
    return SampleRows(rows.slots[row : row + 1], rows.positions[row : row + 1], mask_rows, rows.masks)


@pytest.mark.gpu
def test_one_captured_graph_serves_any_mix_of_rows():
    rng, vocab, count = seeded(), 50_257, 16
    _, slots, logits, rows = problem(rng, vocab, count, "cuda")
    rows = replace(rows, mask_rows=None, masks=None)
    tokens, feedback = (torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2))
    workspace = workspace_for(logits)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    sample_step(logits, rows, slots, tokens, feedback, workspace=workspace)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        sample_step(logits, rows, slots, tokens, feedback, workspace=workspace)
    for _ in range(5):
        _, others, numbers, order = problem(rng, vocab, count, "cuda")
        for name in slots.__slots__:
            getattr(slots, name).copy_(getattr(others, name))
        logits.copy_(numbers)
        rows.slots.copy_(order.slots)
        rows.positions.copy_(order.positions)
        expected = sampled(logits, rows, slots, workspace=workspace_for(logits))
        graph.replay()
        assert torch.equal(tokens, expected[0])
        assert torch.equal(slots.seen, expected[3])
        assert torch.equal(slots.counts, expected[4])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_compile_for_hopper(dtype, monkeypatch):
    """As they are launched: nothing spilled, logits read 16 bytes a thread, PyTorch's roundings."""
    pytest.importorskip("triton")
    for name, ptx in compiled_kernels(dtype, 128_256, monkeypatch).items():
        assert "griddepcontrol.wait" in ptx, name
        assert "ld.global.v4" in ptx or ".v2.b64" in ptx, name
        assert "div.full" not in ptx, f"{name} has an approximate division"
        assert "mul.f32" not in ptx, f"{name} has a product that may be fused"
        assert spilled(ptx) == 0, name


def compiled_kernels(dtype: torch.dtype, vocab: int, monkeypatch) -> dict[str, str]:
    """PTX of every kernel of a step, by name."""
    from bladellm_kernels import sample_triton
    from bladellm_kernels.gumbel_triton import EXACT
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    compiled, run = {}, JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        options |= {"EARLY": True, "launch_pdl": True, **EXACT}
        compiled[self.__name__] = run(self, *arguments, grid=grid, warmup=True, **options).asm["ptx"]

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    slots, ids = slots_of([Request()], vocab), torch.zeros(1, dtype=torch.int64)
    sample_triton.launch(
        torch.zeros(1, vocab, dtype=dtype), SampleRows(ids, ids), slots, poisoned_workspace(1, vocab, 2048),
        (ids, ids), ids, Stage.FILTERED, sample_triton.SampleSchedule(),
    )  # fmt: skip
    assert len(compiled) == 5
    return compiled


@pytest.mark.parametrize("vocab", [1000, 32000, 128256, 151936])
def test_no_number_of_rows_needs_kernels_of_its_own(vocab):
    """Triton compiles for 1 and for multiples of 16 apart."""
    pytest.importorskip("triton")
    from bladellm_kernels.sample_triton import SampleSchedule

    for rows in range(1, 4097):
        parts, chunk = SampleSchedule().parts(rows, vocab)
        assert (parts - 1) * chunk < vocab <= parts * chunk
        assert parts % 16
        assert (parts == 1) == (vocab <= 1024)
