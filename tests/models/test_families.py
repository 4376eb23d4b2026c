"""Every family and option against transformers' own model of the same random weights."""

import itertools

import pytest
import torch

from bladellm_runtime.models.config import read_model_spec
from tests.models.harness import (
    DEVICES,
    SIZES,
    Sequences,
    assert_greedy,
    load_tiny,
    random_prompt,
    reference_logits,
    save_tiny,
)

LIMIT = 1e-4
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 1_000_000.0}
ROPES = {"default": PLAIN, "linear": LINEAR, "dynamic": DYNAMIC, "llama3": LLAMA3, "yarn": YARN}

CASES = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-no-groups-odd-sizes": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10, "hidden_size": 33, "vocab_size": 101},
    ),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 1}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral-window": ("mistral", {"sliding_window": 11, "head_dim": 16}),
    "mistral-window-1": ("mistral", {"sliding_window": 1, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-tied-biased": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
}
GREEDY_SAMPLE = ["llama", "mistral-window", "qwen2-window", "qwen3-window-yarn"]


@pytest.fixture(scope="module", params=list(CASES), ids=str)
def pair(request, tmp_path_factory):
    """transformers' model of a case and the folder it was saved to."""
    folder = tmp_path_factory.mktemp(request.param)
    family, options = CASES[request.param]
    return save_tiny(folder, family, **options), folder


@pytest.mark.parametrize("device", DEVICES)
def test_whole_prefill_of_several_prompts(pair, device):
    reference, folder = pair
    prompts = [random_prompt(length) for length in (1, 7, 23, 41)]
    rows = Sequences(load_tiny(folder, device)).step(list(enumerate(prompts)))
    for logits, prompt in zip(rows, prompts, strict=True):
        assert (logits - reference_logits(reference, prompt)).abs().max() <= LIMIT


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_in_chunks_of_seven(pair, device):
    reference, folder = pair
    prompt = random_prompt(45)
    sequences = Sequences(load_tiny(folder, device))
    parts = [sequences.step([(2, prompt[first : first + 7])])[0] for first in range(0, 45, 7)]
    assert (torch.cat(parts) - reference_logits(reference, prompt)).abs().max() <= LIMIT


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "chunks of one"])
def test_token_by_token(pair, device, decode):
    reference, folder = pair
    prompt = random_prompt(39)
    sequences = Sequences(load_tiny(folder, device))
    parts = [sequences.step([(1, [token])], decode)[0] for token in prompt]
    assert (torch.cat(parts) - reference_logits(reference, prompt)).abs().max() <= LIMIT


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_steps(pair, device):
    """Two sequences decode while others prefill, whole and in chunks, in the same steps."""
    reference, folder = pair
    prompts = [random_prompt(length) for length in (31, 19, 29, 35)]
    sequences = Sequences(load_tiny(folder, device))
    seen: list[list[torch.Tensor]] = [[], [], [], []]

    def step(*rows: tuple[int, int]) -> None:
        fed = []
        for slot, count in rows:
            done = sequences.lengths[slot]
            fed.append((slot, prompts[slot][done : done + count]))
        for (slot, _), logits in zip(rows, sequences.step(fed), strict=True):
            seen[slot].append(logits)

    step((0, 24), (1, 12))
    for _ in range(5):
        step((1, 1), (0, 1), (3, 7))
    step((0, 1), (1, 1), (2, 29))
    step((1, 1), (0, 1))
    for slot, prompt in enumerate(prompts):
        logits = torch.cat(seen[slot])
        assert (logits - reference_logits(reference, prompt)[: len(logits)]).abs().max() <= LIMIT
    assert sequences.lengths == [31, 19, 29, 35]


def greedy(folder, prompt, steps, device="cpu"):
    sequences = Sequences(load_tiny(folder, device))
    tokens = [int(sequences.step([(0, prompt)])[0][-1].argmax())]
    while len(tokens) < steps:
        tokens.append(int(sequences.step([(0, tokens[-1:])])[0][-1].argmax()))
    return tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", GREEDY_SAMPLE)
def test_greedy_tokens(case, device, tmp_path):
    family, options = CASES[case]
    reference = save_tiny(tmp_path, family, **options)
    prompt = random_prompt(13)
    assert_greedy(reference, prompt, greedy(tmp_path, prompt, 64, device))


def test_dynamic_rope_beyond_the_trained_length(tmp_path):
    """A prompt within max_position_embeddings, an answer that leaves it."""
    reference = save_tiny(tmp_path, "llama", rope_parameters=DYNAMIC, max_position_embeddings=32)
    assert read_model_spec(tmp_path).max_position_embeddings == 64
    prompt = random_prompt(21)
    assert_greedy(reference, prompt, greedy(tmp_path, prompt, 43))


@pytest.mark.slow
@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_over_the_grid(family, rope, tmp_path):
    """Tied or not, group sizes, windows shorter than the sequence or none, with every kind of rotation."""
    windows = (None,) if family == "llama" else (None, 17)
    for tied, kv_heads, window in itertools.product((True, False), (1, 2, 3, 6), windows):
        options = {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads, "rope_parameters": dict(ROPES[rope])}
        if family == "qwen3":
            options["head_dim"] = 20
        if family == "mistral":
            options["sliding_window"] = window
        elif family != "llama" and window:
            options |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
        folder = tmp_path / f"{tied}-{kv_heads}-{window}"
        reference = save_tiny(folder, family, **options)
        prompt = random_prompt(27)
        assert_greedy(reference, prompt, greedy(folder, prompt, 64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_stays_near_float32(family, device, tmp_path):
    """Rounding to 8 bits costs some logit, no more than it costs transformers' own bfloat16 model (with slack)."""
    options = {"head_dim": 16} if family == "qwen3" else {}
    reference = save_tiny(tmp_path, family, **options)
    prompt = random_prompt(33)
    exact = reference_logits(reference, prompt)
    ours = Sequences(load_tiny(tmp_path, device, torch.bfloat16)).step([(0, prompt)])[0]
    theirs = reference_logits(reference.to(torch.bfloat16), prompt).float()
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_no_logits_asked_for(tmp_path):
    """A step of prefill chunks that end no prompt wants no logits at all."""
    save_tiny(tmp_path, "llama")
    model = load_tiny(tmp_path)
    assert model.logits(torch.empty(0, SIZES["hidden_size"])).shape == (0, SIZES["vocab_size"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama-dynamic", "qwen3-window-yarn"])
def test_a_step_never_waits_for_the_device(case, tmp_path):
    family, options = CASES[case]
    save_tiny(tmp_path, family, **options)
    model = load_tiny(tmp_path, "cuda", torch.bfloat16)
    sequences = Sequences(model)
    sequences.step([(0, random_prompt(21))])
    batch = sequences.batch([(0, [5]), (1, random_prompt(9)), (2, random_prompt(3))])
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.logits(model.forward(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
