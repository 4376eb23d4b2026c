"""The search of SmoothQuant+ on a model folder against the whole model's loss in transformers."""

import copy

import pytest
import torch

from bladellm_runtime.errors import ConfigError
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.layer import GROUPS
from bladellm_tools.quantize.pipeline.alpha_search import find_alpha
from tests.quantize.jobs import W4, digests, job_of, save_model


@torch.no_grad()
def plain_loss(reference, tokens):
    """Mean KL divergence of the model with all linear layers rounded to nearest."""
    rounded = copy.deepcopy(reference)
    for layer in rounded.model.layers:
        for group in GROUPS:
            for member in group.members:
                weight = layer.get_submodule(member).weight
                weight.copy_(Grid(W4, torch.float32).quantize(weight).dequantize())
    exact, ours = reference(tokens).logits.log_softmax(-1), rounded(tokens).logits.log_softmax(-1)
    return float((exact.exp() * (exact - ours)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_loss_is_the_whole_models(family, tmp_path):
    """Of the candidate without smoothing, on the first tokens of the first windows; the best is the least of all."""
    reference = save_model(tmp_path / "model", family)
    before = digests(tmp_path)
    job = job_of(tmp_path / "model", tmp_path / "out", "smoothquant+", batch=2)
    search = find_alpha(job, samples=5, tokens=13)
    assert search.losses[None] == pytest.approx(plain_loss(reference, job.windows[:5, :13]), rel=1e-3)
    assert len(search.losses) == 22
    assert search.losses[search.best] == min(search.losses.values())
    assert len(set(search.losses.values())) > 15
    assert digests(tmp_path) == before


def test_the_default_takes_what_windows_there_are(tmp_path):
    save_model(tmp_path / "model")
    job = job_of(tmp_path / "model", tmp_path / "out", "smoothquant+", batch=8)
    assert find_alpha(job).losses == find_alpha(job, samples=6, tokens=21).losses


def test_without_windows(tmp_path):
    save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="calibration data"):
        find_alpha(job_of(tmp_path / "model", tmp_path / "out", "smoothquant+", windows=None))
