"""Decode steps of tensor-parallel ranks: fused layers and captured steps."""

from unittest import mock

import pytest
import torch

from bladellm_runtime.engine.captured_sampling import GreedySampling
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.engine.step_graphs import StepGraphs
from bladellm_runtime.layers.linear import Linear
from bladellm_runtime.layers.parallel import RowParallelLinear
from bladellm_runtime.models.decoder import Decoder
from tests.distributed.ranks import LIMIT, load_rank, run_prompts
from tests.distributed.threads import ThreadCommunicator, run_ranks
from tests.engine.captured import Again
from tests.models.harness import VOCAB, Sequences, random_prompt, reference_logits, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan
from tests.support.cases import some_pairs
from tests.support.step_plans import step_plan

MODELS = {
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_attention_heads": 4}),
}


@pytest.mark.parametrize(("case", "degree"), some_pairs(MODELS, [2, 3]))
def test_fused_decode_steps_give_the_same_logits(case, degree, tmp_path):
    reference = save_tiny(tmp_path, MODELS[case][0], **MODELS[case][1])
    assert_fused(tmp_path, degree, reference)


def test_fused_decode_steps_of_quantized_layers(tmp_path):
    tiny = Tiny(tmp_path, plan("gptq", SCHEMES["w4 g16 asymmetric"], (), scrambled=True), scrambled=("_proj",))
    assert_fused(tmp_path, 3, tiny.reference)


def assert_fused(folder, degree: int, reference) -> None:
    prompts = [random_prompt(length) for length in (11, 5, 8)]

    def work(group: ThreadCommunicator) -> tuple[list[torch.Tensor], int]:
        model = load_rank(folder, group)
        with (
            mock.patch.object(model, "fuses", return_value=True),
            mock.patch.object(model.head, "normed", wraps=model.head.normed) as steps,
        ):
            return run_prompts(model, prompts), steps.call_count

    for found, steps in run_ranks(degree, work):
        assert steps == 3
        for logits, prompt in zip(found, prompts, strict=True):
            assert (logits - reference_logits(reference, prompt)).abs().max() <= LIMIT


def test_a_rank_fuses_where_its_column_parallel_layers_do(tmp_path):
    """Whatever the others have kernels for: the sum comes between them and the norm."""
    save_tiny(tmp_path, "llama")
    asked = set()

    def schedule(rows: int, weight: torch.Tensor, gated: bool = False) -> object:
        asked.add((tuple(weight.shape), gated))
        return None if rows > 4 else object()

    with mock.patch("bladellm_runtime.layers.linear.norms_schedule", schedule):
        found = run_ranks(2, lambda group: [load_rank(tmp_path, group).fuses(rows) for rows in (4, 5)])
        assert found == [[True, False]] * 2
    assert asked == {((40, 48), False), ((58, 48), True)}
    half = RowParallelLinear(Linear(torch.zeros(8, 8, dtype=torch.float16)), mock.Mock())
    assert half.fuses(2)
    assert not Linear(torch.zeros(8, 8, dtype=torch.float16)).fuses(2)
    # Which attention's programs had better have left is up to the layer, whatever sums it up over the ranks.
    assert half.fills_sms
    assert not RowParallelLinear(mock.Mock(fills_sms=False), mock.Mock()).fills_sms


def test_captured_steps(tmp_path):
    """Padded to their size, with the tokens of the step before on the device."""
    reference = save_tiny(tmp_path, "qwen2")
    prompts = {2: random_prompt(11), 0: random_prompt(4)}
    for logits in run_ranks(3, lambda group: captured_logits(load_rank(tmp_path, group), prompts)):
        for row, prompt in zip(logits, prompts.values(), strict=False):
            assert (row - reference_logits(reference, prompt)[-1]).abs().max() <= LIMIT


def captured_logits(model: Decoder, prompts: dict[int, list[int]]) -> torch.Tensor:
    """Logits [5, vocab] of a captured step of size 5: the prompts' last tokens, and padding."""
    sequences = Sequences(model, slots=3)
    sequences.step([(slot, tokens[:-1]) for slot, tokens in prompts.items()])
    last_token = torch.zeros(4, dtype=torch.int64)
    sampling = GreedySampling(SamplingState(3, VOCAB, [], torch.device("cpu")), last_token, 5)
    starts = [len(tokens) - 1 for tokens in prompts.values()]
    step = step_plan(0, slots=list(prompts), starts=starts, query_lens=[1, 1], num_decode=2)
    with torch.inference_mode():
        graphs = StepGraphs([5], model, sequences.arena, sampling, last_token, None, None)
        graphs.capture_all(Again())
        last_token[list(prompts)] = torch.tensor([tokens[-1] for tokens in prompts.values()])
        graphs.inputs.send(step, 5)
        graphs.forward(step, 5)
    return sampling.logits.clone()
