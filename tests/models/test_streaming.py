"""Streaming: the tensors are those the safetensors package reads, whatever the pieces, types, shards and faults."""

import random
import threading
import time
from contextlib import nullcontext
from dataclasses import fields, is_dataclass

import pytest
import torch
from safetensors.torch import save_file

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models import stream
from bladellm_runtime.models import streamed as streamed_module
from bladellm_runtime.models.build import WeightBuilder
from bladellm_runtime.models.checkpoint import open_checkpoint
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.models.ranges import read_ranges
from bladellm_runtime.models.stream import TensorStream
from bladellm_runtime.models.streamed import StreamedSource
from bladellm_runtime.models.weights import weight_table
from tests.models.harness import DEVICES, load_tiny, save_tiny
from tests.models.quantized import SCHEMES, Tiny, plan

CPU = torch.device("cpu")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.uint8]


def random_tensors(count: int = 12) -> dict[str, torch.Tensor]:
    shapes = [(random.randint(1, 70), random.randint(1, 50)) for _ in range(count)]
    return {
        f"{'long ' * random.randint(0, 9)}{index}": (torch.rand(shape) * 100).to(random.choice(DTYPES))
        for index, shape in enumerate(shapes)
    }


def load_streamed(folder, dtype=torch.float32) -> Decoder:
    """Loading to a CPU the way it goes to a GPU, in small pieces."""
    spec = read_model_spec(folder)
    table = weight_table(spec)
    with open_checkpoint(folder) as checkpoint, TensorStream(CPU, 3, piece_bytes=1024) as streamed:
        schemes = checkpoint.check(table, spec)
        source = StreamedSource(checkpoint, spec.quantization, streamed, table, schemes)
        return Decoder(spec, WeightBuilder(source, schemes, CPU, dtype).build(table))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("readers", [1, 5])
def test_every_tensor_arrives_whole_and_in_its_type(tmp_path, readers, device):
    tensors = random_tensors()
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    ranges = read_ranges(tmp_path / "a.safetensors")
    assert ranges.keys() == tensors.keys()
    with TensorStream(torch.device(device), readers, piece_bytes=8 * random.randint(1, 400)) as streamed:
        targets = {key: torch.full_like(tensor, 77, device=device) for key, tensor in tensors.items()}
        pieces = [piece for key, target in targets.items() for piece in streamed.fill(target, ranges[key])]
        streamed.wait(pieces)
        for key, tensor in tensors.items():
            assert (ranges[key].shape, ranges[key].dtype) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(targets[key].cpu().view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_are_cast_to_the_type_of_their_place(tmp_path, device):
    stored = torch.randn(300, 41)
    save_file({"a": stored}, tmp_path / "a.safetensors")
    fused = torch.full((500, 41), torch.nan, dtype=torch.bfloat16, device=device)
    with TensorStream(torch.device(device), 4, piece_bytes=4096) as streamed:
        streamed.wait(streamed.fill(fused[100:400], read_ranges(tmp_path / "a.safetensors")["a"]))
        assert torch.equal(fused[100:400].cpu(), stored.bfloat16())
        assert torch.cat((fused[:100], fused[400:])).isnan().all()


def test_no_more_is_read_ahead_than_the_ring_holds(tmp_path, monkeypatch):
    """A device that is slow to copy holds the readers back: buffers are reused, never added."""
    save_file({"a": torch.arange(50_000)}, tmp_path / "a.safetensors")
    made, busy, most = [], [], []
    copy = stream.StagingBuffer.copy_to

    def slow(self, *given):
        busy.append(self)
        most.append(len(busy))
        time.sleep(0.0005)
        copy(self, *given)
        busy.remove(self)

    init = stream.StagingBuffer.__init__
    monkeypatch.setattr(
        stream.StagingBuffer, "__init__", lambda self, *given: (made.append(self), init(self, *given))[1]
    )
    monkeypatch.setattr(stream.StagingBuffer, "copy_to", slow)
    target = torch.zeros(50_000, dtype=torch.int64)
    with TensorStream(CPU, 6, piece_bytes=2048) as streamed:
        streamed.wait(streamed.fill(target, read_ranges(tmp_path / "a.safetensors")["a"]))
    assert torch.equal(target, torch.arange(50_000))
    assert len(made) == stream.BUFFERS
    assert max(most) <= 6


def test_a_file_cut_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"first": torch.ones(100), "second": torch.ones(100)}, path)
    ranges = read_ranges(path)
    path.write_bytes(path.read_bytes()[:-40])
    with TensorStream(CPU, 2, 64) as streamed:
        streamed.wait(streamed.fill(torch.zeros(100), ranges["first"]))
        with pytest.raises(CheckpointError, match=r"a\.safetensors: second cannot be read: the file ends before"):
            streamed.wait(streamed.fill(torch.zeros(100), ranges["second"]))


def test_leaving_early_stops_the_readers_and_closes_the_files(tmp_path, monkeypatch):
    save_file({"a": torch.zeros(100_000)}, tmp_path / "a.safetensors")
    before, pieces = threading.active_count(), []
    read = stream.StagingBuffer.read

    def read_when_the_last_is_dropped(*given) -> int:
        while not pieces or not pieces[-1].cancelled():
            time.sleep(0.001)
        return read(*given)

    monkeypatch.setattr(stream.StagingBuffer, "read", read_when_the_last_is_dropped)
    with TensorStream(CPU, 3, 64) as streamed:
        pieces += streamed.fill(torch.zeros(100_000), read_ranges(tmp_path / "a.safetensors")["a"])
    assert threading.active_count() == before
    assert 1 <= sum(not piece.cancelled() for piece in pieces) <= 3


class Watched:
    """Stands for a CUDA stream and its events: `log` says what was asked of them, in order."""

    def __init__(self, *given) -> None:
        self.log: list[tuple] = []

    def record_event(self):
        return "allocated"

    def wait_event(self, event) -> None:
        self.log.append(("wait", event))

    def wait_stream(self, other) -> None:
        self.log.append(("join", other))

    def record(self) -> None:
        self.log.append(("record",))

    def synchronize(self) -> None:
        self.log.append(("synchronize",))


def test_a_gpu_copies_after_allocation_and_buffers_wait_for_their_copy(tmp_path, monkeypatch):
    numbers = torch.arange(1000)
    save_file({"a": numbers}, tmp_path / "a.safetensors")
    events, current, empty = [], Watched(), torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", Watched)
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Watched()) or events[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(
        torch, "empty", lambda *shape, pin_memory, **more: (pinned.append(pin_memory), empty(*shape, **more))[1]
    )
    pinned, target = [], torch.zeros(1000, dtype=torch.int64)
    with TensorStream(torch.device("cuda", 0), 2, piece_bytes=64) as streamed:
        streamed.wait(streamed.fill(target, read_ranges(tmp_path / "a.safetensors")["a"]))
        stream_used = streamed._stream
        assert current.log == [("join", stream_used)]
    assert torch.equal(target, numbers)
    assert pinned == [True] * stream.BUFFERS
    assert stream_used.log == [("wait", "allocated")] * 125 + [("synchronize",)]
    assert len(events) == stream.BUFFERS
    assert sum(len(event.log) for event in events) == 2 * 125
    for event in events:
        assert event.log == [("synchronize",), ("record",)] * (len(event.log) // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_streamed_model_is_the_mapped_one(tmp_path, dtype):
    save_tiny(tmp_path, "qwen2", max_shard_size="40KB")
    streamed, mapped = load_streamed(tmp_path, dtype), load_tiny(tmp_path, dtype=dtype)
    ours, theirs = tensors_of(streamed), tensors_of(mapped)
    assert len(ours) == len(theirs) > 3 * 7
    assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    assert streamed.layers[0].mlp.down.weight.dtype == dtype


@pytest.mark.parametrize("ahead", [0, 10_000, 10**9])
@pytest.mark.parametrize(("method", "name"), [("gptq", "w4 g16 asymmetric"), ("compressed-tensors", "fp8 static")])
def test_a_streamed_quantized_model_is_the_mapped_one(tmp_path, monkeypatch, method, name, ahead):
    monkeypatch.setattr(streamed_module, "AHEAD_BYTES", ahead)
    Tiny(tmp_path, plan(method, SCHEMES[name]), "llama")
    ours, theirs = tensors_of(load_streamed(tmp_path)), tensors_of(load_tiny(tmp_path))
    assert len(ours) == len(theirs) > 3 * 7
    assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of one type and the same bits."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def tensors_of(thing) -> list[torch.Tensor]:
    """Every tensor below an object, in the order of attributes."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [tensor for value in thing for tensor in tensors_of(value)]
    names = [field.name for field in fields(thing)] if is_dataclass(thing) else getattr(thing, "__dict__", {})
    return [tensor for name in names for tensor in tensors_of(getattr(thing, name))]
