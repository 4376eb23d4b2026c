"""Sharing the windows over devices, and keeping their states elsewhere, changes nothing but the order of sums."""

import pytest
import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.job import Progress
from bladellm_tools.quantize.pipeline.run import quantize_model
from bladellm_tools.quantize.pipeline.source import open_float_model
from bladellm_tools.quantize.pipeline.streams import Streams
from tests.quantize.jobs import CPU, W8A8, digests, job_of, save_model, tensors_of, windows


def open_streams(folder, tokens, devices, **options):
    with open_float_model(folder) as model:
        return Streams(
            model.spec, tokens, model.embedding(), devices, dtype=torch.float32, **options
        ), model.embedding()


@pytest.mark.parametrize(("samples", "devices", "batch"), [(7, 1, 3), (7, 2, 2), (7, 3, 10), (2, 3, 1), (1, 2, 8)])
def test_every_window_is_worked_on_once(samples, devices, batch, tmp_path, device):
    save_model(tmp_path)
    tokens = windows(samples, 5)
    streams, embedding = open_streams(tmp_path, tokens, [torch.device(device)] * devices, batch=batch)
    assert len(streams.devices) == min(samples, devices)
    torch.testing.assert_close(streams.hidden(), embedding[tokens])
    sizes = []

    def step(share, x, tables):
        assert tables[0].shape[0] == 5
        sizes.append(len(x))
        return x + share + 1

    streams.run(step)
    assert sum(sizes) == samples
    assert max(sizes) <= batch
    shares = (streams.hidden() - embedding[tokens]).mean((1, 2)).round().int().tolist()
    assert shares == sorted(shares)
    assert set(shares) == set(range(1, len(streams.devices) + 1))
    streams.run(lambda share, x, tables: None)
    assert (streams.hidden() - embedding[tokens]).mean((1, 2)).round().int().tolist() == shares


def test_an_error_on_one_device_is_raised(tmp_path):
    save_model(tmp_path)
    streams, _ = open_streams(tmp_path, windows(4, 5), [CPU, CPU], batch=1)

    def step(share, x, tables):
        if share == 1:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        streams.run(step)


@pytest.mark.parametrize(
    "options", [{"devices": (CPU,) * 2}, {"devices": (CPU,) * 4, "batch": 1}, {"cpu_offload": True}]
)
def test_errors_are_the_same_on_several_devices(options, tmp_path):
    save_model(tmp_path / "model")
    job = {"algorithm": "smoothquant", "scheme": Scheme(8), "windows": windows(), "kv_scales": True}
    one = quantize_model(job_of(tmp_path / "model", tmp_path / "one", **job), Progress())
    other = quantize_model(job_of(tmp_path / "model", tmp_path / "other", **{**job, **options}), Progress())
    errors = [report.error for report in one.modules]
    assert [report.error for report in other.modules] == pytest.approx(errors, rel=0.25)
    left, right = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "other")
    for key in left:
        if left[key].is_floating_point():
            torch.testing.assert_close(left[key], right[key], rtol=1e-4, atol=1e-6)
    if set(options) == {"cpu_offload"}:
        assert digests(tmp_path / "one") == digests(tmp_path / "other")


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [True, False])
def test_cuda_gives_what_the_cpu_gives(offload, tmp_path):
    save_model(tmp_path / "model", "qwen3")
    job = {"algorithm": "smoothquant", "scheme": W8A8, "windows": windows(), "kv_scales": True}
    one = quantize_model(job_of(tmp_path / "model", tmp_path / "one", **job), Progress())
    job |= {"devices": (torch.device("cuda"),), "cpu_offload": offload}
    other = quantize_model(job_of(tmp_path / "model", tmp_path / "other", **job), Progress())
    assert [report.error for report in other.modules] == pytest.approx([one.error for one in one.modules], rel=0.25)


@pytest.mark.gpu(count=2)
def test_two_gpus_give_what_one_gives(tmp_path):
    save_model(tmp_path / "model")
    job = {"algorithm": "smoothquant", "scheme": W8A8, "windows": windows()}
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    one = quantize_model(job_of(tmp_path / "model", tmp_path / "one", **job, devices=devices[:1]), Progress())
    two = quantize_model(job_of(tmp_path / "model", tmp_path / "two", **job, devices=devices), Progress())
    assert [report.error for report in two.modules] == pytest.approx([report.error for report in one.modules], rel=0.25)
