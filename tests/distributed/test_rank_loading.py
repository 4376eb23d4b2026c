"""What a rank holds: of every parameter the right part, streamed or not, and no more than that."""

import itertools
from contextlib import ExitStack

import pytest
import torch

from bladellm_runtime.distributed.manifest import is_split
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.models.build import WeightBuilder
from bladellm_runtime.models.checkpoint import open_checkpoint
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.cut import make_cut
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.parallel import rank_spec, rank_table, share_table
from bladellm_runtime.models.split_folder import open_rank
from bladellm_runtime.models.stream import TensorStream
from bladellm_runtime.models.streamed import StreamedSource
from bladellm_runtime.models.weights import weight_table
from bladellm_tools.split.splitting import split_model
from tests.distributed.ranks import CPU, load_rank, plan_of, run_prompts, sampled
from tests.distributed.threads import ThreadCommunicator, run_ranks
from tests.models.harness import load_tiny, random_prompt, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan

BIASED = {
    "attention_bias": True,
    "mlp_bias": True,
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
    "hidden_size": 56,
}


def load_streamed(folder, communicator: ThreadCommunicator) -> Decoder:
    """Loading to a CPU the way it goes to a GPU, in small pieces; of a split folder too."""
    spec, plan, rank = read_model_spec(folder), plan_of(folder, communicator.size), communicator.rank
    table = rank_table(spec, plan, rank)
    with ExitStack() as stack:
        stream = stack.enter_context(TensorStream(CPU, 2, piece_bytes=512))
        if is_split(folder):
            shares = stack.enter_context(open_rank(folder, 0, rank))
            table, schemes = share_table(table), shares.check(weight_table(spec), spec)
            source = StreamedSource(shares.stored, spec.quantization, stream, table, schemes, shares)
        else:
            checkpoint = stack.enter_context(open_checkpoint(folder))
            schemes = checkpoint.check(weight_table(spec), spec)
            source = StreamedSource(checkpoint, spec.quantization, stream, table, schemes)
        weights = WeightBuilder(source, schemes, CPU, torch.float32).build(table)
    return Decoder(rank_spec(spec, plan, rank), weights, communicator)


W4 = "w4 g16 asymmetric"
STREAMED = list(itertools.product([None, W4], [2, 3, 6], [False, True]))


@pytest.mark.parametrize(
    ("name", "degree", "split"), sampled(STREAMED, {(None, 3, False), (None, 6, True), (W4, 3, True)})
)
def test_streamed_tensors_are_the_same(name, degree, split, tmp_path):
    """Six ranks: some without inner channels and words."""
    folder = tmp_path / "model"
    if name is None:
        save_tiny(folder, "llama", **BIASED, intermediate_size=5)
    else:
        config = plan("gptq", SCHEMES[name], (), scrambled=True)
        Tiny(folder, config, scrambled=("_proj",), intermediate_size=16 if degree == 6 else 64)
    if split:
        split_model(folder, tmp_path / "split", (degree, 1))
        folder = tmp_path / "split"
    prompts = [random_prompt(9), random_prompt(15)]
    mapped = run_ranks(degree, lambda group: run_prompts(load_rank(folder, group), prompts))
    streamed = run_ranks(degree, lambda group: run_prompts(load_streamed(folder, group), prompts))
    for one, other in zip(itertools.chain(*mapped), itertools.chain(*streamed), strict=True):
        assert torch.equal(one, other)


def test_ranks_hold_the_model_between_them(tmp_path):
    """Seven heads on three ranks: every number of the model once, and padding that is 0; biases of sums once."""
    save_tiny(tmp_path, "llama", **BIASED)
    whole = load_tiny(tmp_path)
    ranks = run_ranks(3, lambda group: load_rank(tmp_path, group))
    assert {model.spec.heads for model in ranks} == {3}
    for name in ("attention.output", "mlp.down"):
        attention, layer = name.split(".")
        parts = [getattr(getattr(model.layers[1], attention), layer).layer for model in ranks]
        wanted = getattr(getattr(whole.layers[1], attention), layer)
        assert torch.equal(parts[0].bias, wanted.bias)
        assert parts[1].bias is None
        assert parts[2].bias is None
        assert sum(part.weight.double().sum() for part in parts) == pytest.approx(float(wanted.weight.double().sum()))
        assert sum(int((part.weight != 0).sum()) for part in parts) == int((wanted.weight != 0).sum())
    for layer in ("qkv", "gate_up"):
        parts = [getattr(m.layers[2].attention if layer == "qkv" else m.layers[2].mlp, layer) for m in ranks]
        wanted = getattr(whole.layers[2].attention if layer == "qkv" else whole.layers[2].mlp, layer)
        for kind in ("weight", "bias"):
            rows = torch.cat([getattr(part, kind) for part in parts])
            kept = rows[rows != 0] if kind == "bias" else rows[rows.any(1)]
            assert torch.equal(kept.flatten().sort().values, getattr(wanted, kind).flatten().sort().values)
    rows = torch.cat([model.embedding.weight for model in ranks])
    assert torch.equal(rows[: len(whole.embedding.weight)], whole.embedding.weight)
    assert not rows[len(whole.embedding.weight) :].any()
    assert max(model.weight_bytes for model in ranks) < 0.6 * whole.weight_bytes


def test_there_are_as_many_ranks_as_query_heads_at_most(tmp_path):
    save_tiny(tmp_path, "llama")
    assert len(plan_of(tmp_path, 6).ranks) == 6
    with pytest.raises(ConfigError, match=r"--tensor_parallel_size 7 .* 6 query heads"):
        plan_of(tmp_path, 7)


def test_cuts():
    cut = make_cut(range(4, 7), range(7, 9), 2, 0, 1, range(5, 5), range(1, 3))
    assert [(run.start, run.count) for run in cut.runs] == [(4, 5), (None, 3), (1, 2)]
    assert cut.index(CPU).tolist() == [4, 5, 6, 7, 8, -1, -1, -1, 1, 2]
    source, target = torch.randn(3, 9), torch.full((3, 10), torch.nan, dtype=torch.float64)
    cut.copy(source, target, 1)
    assert torch.equal(target, torch.cat((source[:, 4:9], torch.zeros(3, 3), source[:, 1:3]), 1).double())
