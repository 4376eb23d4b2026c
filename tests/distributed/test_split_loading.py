"""Ranks of split folders: they read their own files, and give what the unsplit model gives."""

import shutil

import pytest
import torch

from bladellm_runtime.distributed.manifest import rank_folder
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.split.splitting import split_model
from tests.distributed.ranks import LIMIT, load_rank, prompts, run_prompts, sampled
from tests.distributed.threads import ThreadCommunicator, run_ranks
from tests.models.harness import load_tiny, reference_logits, save_tiny
from tests.models.quantized import SCHEMES, STORED, Tiny, plan

FLOAT = {
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_attention_heads": 10}),
}


def split_logits(folder, degree: int, asked: list[list[int]], tmp_path) -> torch.Tensor:
    """Of ranks that see the folder without those of the others."""
    split_model(folder, tmp_path / "split", (degree, 1))

    def work(group: ThreadCommunicator) -> list[torch.Tensor]:
        own = tmp_path / f"only-{group.rank}"
        others = [rank_folder(0, rank) for rank in range(degree) if rank != group.rank]
        shutil.copytree(tmp_path / "split", own, ignore=lambda _, names: set(others) & set(names))
        return run_prompts(load_rank(own, group), asked)

    first, *others = run_ranks(degree, work)
    assert all(torch.equal(torch.cat(first), torch.cat(other)) for other in others)
    return torch.cat(first)


EVERY = [(case, degree) for case in FLOAT for degree in (2, 3, 6)]


@pytest.mark.parametrize(("case", "degree"), sampled(EVERY, {("llama-biased", 3), ("llama-tied", 6), ("qwen3", 3)}))
def test_plain_models(case, degree, tmp_path):
    asked = prompts()
    reference = save_tiny(tmp_path / "model", FLOAT[case][0], **FLOAT[case][1])
    found = split_logits(tmp_path / "model", degree, asked, tmp_path)
    assert (found - torch.cat([reference_logits(reference, prompt) for prompt in asked])).abs().max() <= LIMIT


QUANTIZED = [(method, name, degree) for method, name in STORED for degree in (2, 3, 6)]
SAMPLE = {("compressed-tensors", "w4 g16 asymmetric", 3), ("compressed-tensors", "fp8 static", 2), ("awq", "w4 g16", 6)}


@pytest.mark.parametrize(("method", "name", "degree"), sampled(QUANTIZED, SAMPLE))
def test_quantized_models(method, name, degree, tmp_path):
    options = {"intermediate_size": 80 if degree == 2 else 64}
    tiny = Tiny(tmp_path / "model", plan(method, SCHEMES[name], ()), "qwen2", **options)
    assert_as_unsplit(tiny, degree, tmp_path)


@pytest.mark.parametrize(
    ("symmetric", "degree"), sampled([(s, d) for s in (True, False) for d in (2, 3)], {(False, 3)})
)
def test_scrambled_groups(symmetric, degree, tmp_path):
    config = plan("gptq", Scheme(4, group_size=16, symmetric=symmetric), scrambled=True)
    options = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
    assert_as_unsplit(Tiny(tmp_path / "model", config, scrambled=("_proj",), **options), degree, tmp_path)


def test_plain_ranks_without_inner_channels_or_words(tmp_path):
    """Four channels and 97 words for six ranks."""
    asked = prompts()
    reference = save_tiny(tmp_path / "model", "llama", mlp_bias=True, intermediate_size=4)
    found = split_logits(tmp_path / "model", 6, asked, tmp_path)
    assert (found - torch.cat([reference_logits(reference, prompt) for prompt in asked])).abs().max() <= LIMIT


@pytest.mark.parametrize(("method", "name"), sampled(STORED, {("gptq", "w4 g16 asymmetric")}))
def test_quantized_ranks_without_inner_channels_or_words(method, name, tmp_path):
    """Two groups of 16 channels, and 104 words."""
    tiny = Tiny(tmp_path / "model", plan(method, SCHEMES[name], ()), "llama", intermediate_size=32)
    assert_as_unsplit(tiny, 6, tmp_path)


def assert_as_unsplit(tiny: Tiny, degree: int, tmp_path) -> None:
    asked = prompts()
    found = split_logits(tiny.folder, degree, asked, tmp_path)
    whole = torch.cat(run_ranks(degree, lambda group: run_prompts(load_rank(tiny.folder, group), asked))[0])
    assert (found - whole).abs().max() <= LIMIT
    if all(weight.scheme.activations == "none" for weight in tiny.weights.values()):
        exact = torch.cat([reference_logits(tiny.reference, prompt) for prompt in asked])
        assert (found - exact).abs().max() <= LIMIT


def test_other_degrees_are_refused(tmp_path):
    save_tiny(tmp_path / "model", "llama")
    split_model(tmp_path / "model", tmp_path / "split", (2, 1))
    with pytest.raises(ConfigError, match=r"is split for --tensor_parallel_size 2 --pipeline_parallel_size 1, not 3"):
        run_ranks(3, lambda group: load_rank(tmp_path / "split", group))
    with pytest.raises(ConfigError, match=r"is split for --tensor_parallel_size 2"):
        load_tiny(tmp_path / "split")
