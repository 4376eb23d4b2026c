"""Statistics over batches and devices against the same in float64 over all inputs at once."""

import pytest
import torch

from bladellm_tools.quantize.pipeline.collect import SAMPLE_TOKENS, Collector, samples_of, statistics_of


def expected(x):
    x = x.double()
    return x.t() @ x / len(x), x.abs().amax(0), x.abs().mean(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_over_uneven_batches_and_collectors(dtype, device):
    x = (torch.randn(301, 23) * torch.rand(23) * 4).to(dtype)
    collectors = [Collector({"qkv"}) for _ in range(3)]
    for number, batch in enumerate(x.split([7, 100, 1, 90, 103])):
        collectors[number % 3]("qkv", batch.to(device))
    statistics = statistics_of(collectors)["qkv"]
    gram, absmax, absmean = expected(x)
    assert statistics.tokens == 301
    assert {one.dtype for one in (statistics.gram, statistics.absmax, statistics.absmean)} == {torch.float32}
    torch.testing.assert_close(statistics.gram.cpu().double(), gram, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics.absmax.cpu().double(), absmax, rtol=0, atol=0)
    torch.testing.assert_close(statistics.absmean.cpu().double(), absmean, rtol=1e-5, atol=1e-6)


def test_groups_not_asked_for_are_passed_over():
    collector = Collector({"down"})
    collector("qkv", torch.randn(3, 5))
    collector("down", torch.randn(4, 6))
    assert {name: one.tokens for name, one in statistics_of([collector]).items()} == {"down": 4}


def test_samples_are_the_first_inputs_and_no_view_of_them():
    x = torch.randn(SAMPLE_TOKENS + 5, 3)
    collectors = [Collector({"qkv"}, sampled=True), Collector({"qkv"})]
    kept = x.clone()
    collectors[0]("qkv", x)
    collectors[0]("qkv", x + 1)
    collectors[1]("qkv", x + 2)
    x.zero_()
    assert torch.equal(samples_of(collectors)["qkv"], kept[:SAMPLE_TOKENS])
    assert samples_of([collectors[1]]) == {}
