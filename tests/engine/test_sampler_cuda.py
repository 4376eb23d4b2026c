"""The sampler on CUDA: it never waits for the device, and draws the tokens the CPU draws.

The first test needs no GPU: meta tensors take the path of CUDA and have no data, so whatever reads some raises.
"""

import random

import numpy as np
import pytest
import torch

from bladellm_runtime.engine import sampler, sampling_state
from bladellm_runtime.engine.upload import pack, packed_bytes, unpack
from bladellm_runtime.request import SamplingParams
from tests.engine.sampler_support import Engine, Request, made_up_logits, random_params
from tests.kernels.sampling_support import fresh_seed

VOCAB = 2003
META = torch.device("meta")
CUDA = torch.device("cuda", 0)

FEATURES = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "narrow top-k": {"top_k": 5},
    "wide top-k": {"top_k": 1500},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "bias and min_tokens": {"logit_bias": {4: 1.0}, "min_tokens": 9},
    "logprobs": {"logprobs": 7},
}


@pytest.mark.parametrize("feature", [*FEATURES, "all together"])
def test_no_step_reads_the_device(feature, monkeypatch):
    """Only the copy of host arrays is replaced: there is no pinned memory without a driver."""

    def fake_upload(arrays, device):
        return [torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device) for array in arrays], None

    monkeypatch.setattr(sampler, "upload", fake_upload)
    monkeypatch.setattr(sampling_state, "upload", fake_upload)
    chosen = FEATURES.values() if feature == "all together" else [FEATURES[feature]] * 3
    engine = Engine(16, VOCAB, eos=(2,), device=META)
    rows = [(slot, Request([1, 2, 3], SamplingParams(seed=slot, **each))) for slot, each in enumerate(chosen)]
    for slot, request in rows:
        engine.load(slot, request)
    plan = engine.plan(rows)
    for load in plan.loads:
        engine.state.load(load)
    inputs = engine.sampler.prepare(plan)
    outputs = engine.sampler.sample(torch.empty(len(rows), VOCAB, device=META), inputs)
    assert outputs.tokens.shape == outputs.feedback.shape == (len(rows),)
    assert outputs.tokens.is_meta


@pytest.mark.parametrize("read", [lambda flags: bool(flags.any()), torch.nonzero, lambda flags: flags[flags]])
def test_that_test_would_notice_a_read(read):
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        read(torch.ones(3, dtype=torch.bool, device=META))


def test_arrays_packed_for_one_copy_come_out_as_they_went_in():
    rng = np.random.default_rng(fresh_seed() % 2**32)
    arrays = [
        rng.integers(-(2**62), 2**62, 5),
        rng.standard_normal((3, 6)).astype(np.float32),
        np.empty(0, dtype=np.int64),
        rng.integers(-9, 9, (7, 1)).astype(np.int16)[::2],
        rng.integers(-(2**31), 2**31, (5, 2)).astype(np.int32),
        np.array([2**62 + 1]),
    ]
    buffer = torch.full((packed_bytes(arrays) + 8,), 255, dtype=torch.uint8)
    pack(arrays, buffer)
    for view, array in zip(unpack(buffer, arrays), arrays, strict=True):
        assert view.data_ptr() % view.element_size() == 0
        assert torch.equal(view, torch.from_numpy(array.copy()))
        assert view.dtype == torch.from_numpy(array.copy()).dtype
    assert buffer[-8:].tolist() == [255] * 8


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws_and_never_synchronises():
    rng = random.Random(fresh_seed())
    requests = [Request([rng.randrange(VOCAB)], random_params(rng, VOCAB)) for _ in range(64)]
    logits = [torch.stack([made_up_logits(request, VOCAB) for request in requests]) for _ in range(10)]
    drawn = []
    for device in (torch.device("cpu"), CUDA):
        engine = Engine(64, VOCAB, eos=(0,), device=device)
        plans, outputs = [], []
        for step in range(10):
            rows = [(slot, Request([*each.prompt, *[0] * step], each.params)) for slot, each in enumerate(requests)]
            for slot, request in enumerate(requests if step == 0 else []):
                engine.load(slot, request)
            plans.append(engine.plan(rows))
        inputs = [values.to(device) for values in logits]
        torch.cuda.set_sync_debug_mode("error" if device == CUDA else "default")
        try:
            for plan, values in zip(plans, inputs, strict=True):
                for load in plan.loads:
                    engine.state.load(load)
                outputs.append(engine.sampler.sample(values, engine.sampler.prepare(plan)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        drawn.append(torch.stack([output.tokens.cpu() for output in outputs]))
    # Logarithms may differ in the last bit, so a near-tie may fall the other way, and change what follows in its slot.
    assert (drawn[0] != drawn[1]).any(dim=0).sum() <= 1
