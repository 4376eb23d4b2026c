"""Decode steps whose linear layers fuse with the operators around them, forced where they would not."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from bladellm_runtime.engine.captured_sampling import GreedySampling
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.engine.step_graphs import StepGraphs
from bladellm_runtime.layers.linear import Linear, StackedLinear
from bladellm_runtime.models.decoder import Decoder
from tests.engine.captured import Again
from tests.models.harness import (
    DEVICES,
    VOCAB,
    Sequences,
    assert_greedy,
    load_tiny,
    random_prompt,
    reference_logits,
    save_tiny,
)
from tests.models.quantized import SCHEMES, Tiny, plan
from tests.models.test_families import CASES, LIMIT
from tests.support.cases import drawn_of
from tests.support.step_plans import step_plan

GREEDY_SAMPLE = ["llama", "llama-tied-biased", "mistral-window", "qwen2-tied-yarn", "qwen3", "qwen3-window-yarn"]
NAN_TOKEN, ZERO_TOKEN = VOCAB - 1, VOCAB - 2


@contextmanager
def fused(model: Decoder, rows: int) -> Iterator[mock.Mock]:
    """Decode steps of up to `rows` rows fuse; `call_count` is how many did."""
    with (
        mock.patch.object(model, "fuses", lambda count: count <= rows),
        mock.patch.object(model.head, "normed", wraps=model.head.normed) as steps,
    ):
        yield steps


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, device, tmp_path):
    """Three sequences of random lengths; of the last steps' rows, more than fuse, the first one's are compared too."""
    family, options = CASES[case]
    reference = save_tiny(tmp_path, family, **options)
    model = load_tiny(tmp_path, device)
    prompts = [random_prompt(length) for length in (29, 21, 34)]
    sequences, seen = Sequences(model), [[], [], []]
    with fused(model, 2) as steps:
        for counts in ([7, 3, 9], *[[1, 1]] * 12, *[[1, 1, 1]] * 6):
            rows = [(slot, _next(sequences, prompts, slot, count)) for slot, count in enumerate(counts)]
            for (slot, _), logits in zip(rows, sequences.step(rows), strict=True):
                seen[slot].append(logits)
    assert steps.call_count == 12
    for prompt, parts in zip(prompts, seen, strict=True):
        logits = torch.cat(parts)
        assert (logits - reference_logits(reference, prompt)[: len(logits)]).abs().max() <= LIMIT


def _next(sequences: Sequences, prompts: list[list[int]], slot: int, count: int) -> list[int]:
    done = sequences.lengths[slot]
    return prompts[slot][done : done + count]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", drawn_of(GREEDY_SAMPLE, 3))
def test_greedy_tokens(case, device, tmp_path):
    family, options = CASES[case]
    reference = save_tiny(tmp_path, family, **options)
    model, prompt = load_tiny(tmp_path, device), random_prompt(13)
    sequences = Sequences(model)
    tokens = [int(sequences.step([(0, prompt)])[0][-1].argmax())]
    with fused(model, 1) as steps:
        while len(tokens) < 64:
            tokens.append(int(sequences.step([(0, tokens[-1:])])[0][-1].argmax()))
    assert steps.call_count == 63
    assert_greedy(reference, prompt, tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_float32_as_without(case, device, tmp_path):
    """In the mean over the logits of 3 sequences of 32 tokens, with slack for chance."""
    reference = save_tiny(tmp_path, CASES[case][0], **CASES[case][1])
    model = load_tiny(tmp_path, device, torch.bfloat16)
    prompts = [random_prompt(33) for _ in range(3)]
    exact = torch.cat([reference_logits(reference, prompt)[1:] for prompt in prompts])
    errors = []
    for rows in (0, 3):
        sequences = Sequences(model)
        sequences.step([(slot, prompt[:1]) for slot, prompt in enumerate(prompts)])
        with fused(model, rows) as steps:
            found = [sequences.step([(s, [p[at]]) for s, p in enumerate(prompts)]) for at in range(1, 33)]
        assert steps.call_count == (32 if rows else 0)
        logits = torch.cat([torch.cat(parts) for parts in zip(*found, strict=True)])
        errors.append(float((logits - exact).abs().mean()))
    assert 0 < errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("name", ["w4 g16", "w8a8 dynamic"])
def test_layers_without_kernels_of_their_own_compute_the_same(name, tmp_path):
    """Quantized layers among plain ones: by operators apart, wherever a step is fused all the same."""
    ignore = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.2.self_attn.o_proj"]
    Tiny(tmp_path, plan("compressed-tensors", SCHEMES[name], ignore), "qwen2")
    model, prompt = load_tiny(tmp_path), random_prompt(24)
    assert isinstance(model.layers[1].mlp.gate_up, StackedLinear)
    found = []
    for rows in (0, 1):
        sequences = Sequences(model)
        sequences.step([(1, prompt[:5])])
        with fused(model, rows):
            found.append(torch.cat([sequences.step([(1, [token])])[0] for token in prompt[5:]]))
    difference = (found[1] - found[0]).abs()
    if SCHEMES[name].activations:
        # The norm's factor comes later: a code may round the other way, which every later row sees in the KV cache.
        assert difference.mean() <= 0.05 * found[0].std()
    else:
        assert difference.max() <= LIMIT
    assert not torch.equal(found[1], found[0])


@pytest.mark.parametrize("case", ["llama-tied-biased", "qwen2-window", "qwen3"])
def test_padding_of_a_captured_step_changes_no_other_row(case, tmp_path):
    """NaN in it leaves the rows' logits as they are, bit by bit; zeros give finite numbers."""
    save_tiny(tmp_path, CASES[case][0], **CASES[case][1])
    model = load_tiny(tmp_path)
    model.head = Linear(model.head.weight.clone())  # where it is the embedding
    model.embedding.weight[NAN_TOKEN], model.embedding.weight[ZERO_TOKEN] = torch.nan, 0.0
    prompts = {2: random_prompt_below(NAN_TOKEN, 11), 0: random_prompt_below(NAN_TOKEN, 4)}
    found = {token: padded_logits(model, prompts, token) for token in (5, NAN_TOKEN, ZERO_TOKEN)}
    assert found[NAN_TOKEN][2:].isnan().all()
    assert found[ZERO_TOKEN].isfinite().all()
    for logits in found.values():
        assert torch.equal(logits[:2], found[5][:2])


def random_prompt_below(vocab: int, length: int) -> list[int]:
    return torch.randint(0, vocab, (length,)).tolist()


def padded_logits(model: Decoder, prompts: dict[int, list[int]], padding: int) -> torch.Tensor:
    """Logits [5, vocab] of a captured, fused step of size 5: the prompts' last tokens, and rows of token `padding`."""
    sequences = Sequences(model, slots=3)
    sequences.step([(slot, tokens[:-1]) for slot, tokens in prompts.items()])
    last_token = torch.zeros(4, dtype=torch.int64)
    sampling = GreedySampling(SamplingState(3, VOCAB, [], torch.device("cpu")), last_token, 5)
    starts = [len(tokens) - 1 for tokens in prompts.values()]
    step = step_plan(0, slots=list(prompts), starts=starts, query_lens=[1, 1], num_decode=2)
    with fused(model, 5) as steps, torch.inference_mode():
        graphs = StepGraphs([5], model, sequences.arena, sampling, last_token, None, None)
        graphs.capture_all(Again())
        last_token[3] = padding
        last_token[list(prompts)] = torch.tensor([tokens[-1] for tokens in prompts.values()])
        graphs.inputs.send(step, 5)
        graphs.forward(step, 5)
    assert steps.call_count == 2
    return sampling.logits.clone()


def test_a_model_fuses_where_all_its_layers_do(tmp_path):
    """The weights on a device without such kernels have none; those that have may differ in how many rows they take."""
    save_tiny(tmp_path, "llama", mlp_bias=True)
    assert not load_tiny(tmp_path).fuses(1)
    asked = set()

    def schedule(rows: int, weight: torch.Tensor, gated: bool = False) -> object:
        asked.add((tuple(weight.shape), gated))
        return None if rows > weight.shape[1] - 40 else object()

    with mock.patch("bladellm_runtime.layers.linear.norms_schedule", schedule):
        model = load_tiny(tmp_path)
        assert [model.fuses(rows) for rows in (1, 8, 9)] == [True, True, False]
        assert not load_tiny(tmp_path, dtype=torch.float16).fuses(1)
        assert asked == {
            ((80, 48), False),
            ((48, 48), False),
            ((116, 48), False),
            ((48, 58), False),
        }
        asked.clear()
        model.layers[2].mlp.gate_up.bias = None
        assert model.fuses(2)
        assert ((116, 48), True) in asked


def test_one_quantized_layer_is_enough_to_fuse_nothing(tmp_path):
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*gate_proj", "re:.*up_proj", "re:.*[12].mlp.down_proj"]
    Tiny(tmp_path, plan("compressed-tensors", SCHEMES["w4 g16"], ignore), "llama")
    with mock.patch("bladellm_runtime.layers.linear.norms_schedule"):
        model = load_tiny(tmp_path)
        assert [layer.fuses(1) for layer in model.layers] == [False, True, True]
        assert not model.fuses(1)


@pytest.mark.parametrize(("layer", "fills"), [("o_proj", False), ("down_proj", True)])
def test_a_quantized_layer_behind_attention_needs_no_empty_multiprocessors(layer, fills, tmp_path):
    ignore = ["lm_head", f"re:^(?!.*{layer}).*$"]
    Tiny(tmp_path, plan("compressed-tensors", SCHEMES["w4 g16"], ignore), "llama")
    assert load_tiny(tmp_path).fills_sms == fills
