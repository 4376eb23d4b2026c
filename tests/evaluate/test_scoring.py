"""Scores against transformers and torch's own KL divergence, on trained and on random models."""

import random

import pytest
import torch

from bladellm_runtime.errors import UserError
from bladellm_tools.evaluate import scoring
from bladellm_tools.evaluate.forward import WindowForward
from bladellm_tools.evaluate.scoring import score
from tests.evaluate.texts import perturbed, reference_kl, reference_logs, reference_losses
from tests.models.harness import CONFIGS, VOCAB, load_tiny, save_tiny


@pytest.fixture(scope="module")
def demo_pair(demo_model, tmp_path_factory):
    return demo_model, perturbed(demo_model, tmp_path_factory.mktemp("perturbed"), 0.1)


def test_losses_kl_and_agreement_equal_those_of_transformers(demo_pair, device) -> None:
    windows = torch.randint(4, 8192, (3, 45))
    logs, rough_logs = (reference_logs(folder, windows) for folder in demo_pair)
    exact, rough = (load_tiny(folder, device) for folder in demo_pair)

    scores = score(rough, windows, exact, batch=2)

    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 5e-3, "atol": 1e-3}
    torch.testing.assert_close(scores.losses.tolist(), reference_losses(rough_logs, windows), **tolerance)
    torch.testing.assert_close(scores.pair.losses.tolist(), reference_losses(logs, windows), **tolerance)
    torch.testing.assert_close(scores.pair.kl.double(), reference_kl(rough_logs, logs), **tolerance)
    agreement = (logs.argmax(-1) == rough_logs.argmax(-1)).double().mean(1)
    torch.testing.assert_close(scores.pair.agreement, agreement, rtol=0, atol=0.03)
    assert scores.pair.kl.mean() > 0.01
    assert 0.1 < float(agreement.mean()) < 0.99, "the models must differ for the test to mean anything"


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_family_scores_as_in_transformers(family, tmp_path, device) -> None:
    """Windows do not see each other, sliding windows of attention work, and rows of logits may be of any number."""
    sliding = {"sliding_window": 13} if family == "mistral" else {}
    save_tiny(tmp_path, family, **sliding)
    model = load_tiny(tmp_path, device)
    windows = torch.randint(0, VOCAB, (random.randint(3, 6), random.randint(17, 60)))
    expected = reference_losses(reference_logs(tmp_path, windows), windows)
    for batch in (1, 2, len(windows), 9):
        found = score(model, windows, batch=batch)
        assert found.pair is None
        torch.testing.assert_close(found.losses.tolist(), expected, rtol=1e-4, atol=1e-4)


def test_the_size_of_the_blocks_of_logits_changes_nothing(demo_pair, device, monkeypatch) -> None:
    models = [load_tiny(folder, device) for folder in demo_pair]
    windows = torch.randint(4, 8192, (3, 21))
    whole = score(models[1], windows, models[0], batch=3)
    sizes = []
    compare = scoring.compare_tokens

    def watched(logs, *rest):
        sizes.append(logs.numel())
        return compare(logs, *rest)

    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", 7 * 8192 + 5)
    monkeypatch.setattr(scoring, "compare_tokens", watched)
    blocks = score(models[1], windows, models[0], batch=3)
    assert sum(sizes) == 3 * 20 * 8192
    assert max(sizes) == 7 * 8192
    for name in ("losses", "kl", "agreement"):
        torch.testing.assert_close(getattr(blocks.pair, name), getattr(whole.pair, name), rtol=1e-4, atol=1e-5)


def test_a_model_beside_itself_differs_in_nothing(demo_model, device) -> None:
    model = load_tiny(demo_model, device)
    scores = score(model, torch.randint(4, 8192, (2, 33)), model)
    assert torch.equal(scores.losses, scores.pair.losses)
    assert torch.count_nonzero(scores.pair.kl) == 0
    assert torch.equal(scores.pair.agreement, torch.ones(2, dtype=torch.float64))


def test_the_kl_divergence_is_that_from_the_baseline(demo_pair, device) -> None:
    """It is not symmetric: swapping the models gives another figure."""
    exact, rough = (load_tiny(folder, device) for folder in demo_pair)
    windows = torch.randint(4, 8192, (2, 40))
    forth, back = score(rough, windows, exact), score(exact, windows, rough)
    assert not torch.allclose(forth.pair.kl, back.pair.kl, rtol=1e-3)


def test_progress_counts_every_window_once(tmp_path, device) -> None:
    save_tiny(tmp_path, "llama")
    counts: list[int] = []
    score(load_tiny(tmp_path, device), torch.randint(0, VOCAB, (7, 9)), batch=3, on_windows=counts.append)
    assert counts == [3, 3, 1]


def test_logits_that_are_not_finite_name_model_and_window(tmp_path, device) -> None:
    save_tiny(tmp_path, "llama")
    good, broken = load_tiny(tmp_path, device), load_tiny(tmp_path, device)
    broken.embedding.weight[5] = torch.nan
    windows = torch.randint(6, VOCAB, (5, 11))
    windows[3, 4] = 5
    with pytest.raises(UserError, match="--model are not finite in window 3"):
        score(broken, windows, good, batch=2)
    with pytest.raises(UserError, match="--baseline are not finite in window 3"):
        score(good, windows, broken, batch=4)


def test_hidden_states_leave_out_the_last_token_of_each_window(tmp_path, device) -> None:
    save_tiny(tmp_path, "qwen3")
    model = load_tiny(tmp_path, device)
    windows = torch.randint(0, VOCAB, (3, 12))
    with WindowForward(model, 12, 3) as forward:
        hidden = forward.hidden(windows).view(3, 11, -1)
        windows[:, -1] = (windows[:, -1] + 1) % VOCAB
        torch.testing.assert_close(forward.hidden(windows).view(3, 11, -1), hidden)
        windows[1, 4] = (windows[1, 4] + 1) % VOCAB
        moved = (forward.hidden(windows).view(3, 11, -1) - hidden).abs().sum(-1) > 1e-6
    assert moved.tolist() == [[False] * 11, [False] * 4 + [True] * 7, [False] * 11]
