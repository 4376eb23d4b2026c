"""The store moves adapters in the background: what slots hold is what was asked for, failures free what they took."""

import random
import time
from collections import deque
from concurrent.futures import Future

import pytest
import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.layers.linear import Linear
from bladellm_runtime.lora.broken_folders import state_of
from bladellm_runtime.lora.loader import AdapterLoader, Outcome
from bladellm_runtime.lora.peft_folder import AdapterReader, empty_adapter
from bladellm_runtime.lora.policy import AdapterPolicy
from bladellm_runtime.lora.store import AdapterStore
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.lora import LoraMemory
from bladellm_runtime.models.lora_layout import LoraShape
from bladellm_runtime.models.lora_stacking import stacked_rows
from bladellm_runtime.models.weights import weight_table
from tests.lora.folders import CONFIG, save_adapter
from tests.models.harness import DEVICES, save_tiny

SLOTS, COPIES = 3, 4
WAIT_S = 30.0


class Numbered(AdapterReader):
    """Fills an adapter with the number that its folder's name is; a folder named `broken` cannot be read."""

    def __init__(self):
        self.reads = 0

    def read(self, folder, target):
        self.reads += 1
        if folder.name == "broken":
            raise CheckpointError(f"{folder} is broken")
        if folder.name == "surprising":
            raise RuntimeError("out of ideas")
        if folder.name == "unreadable":
            raise CheckpointError(f"{folder} cannot be read") from OSError("too many open files")
        target.numbers.fill_(int(folder.name))
        target.scales.fill_(int(folder.name))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_tiny(folder, "llama", num_hidden_layers=1)
    return weight_table(read_model_spec(folder))


def slots_for(table, device, stacked):
    """Empty slots; stacked: A of all layers lies behind weights, which keep what they are."""
    shape = LoraShape(SLOTS, 2, torch.float32)
    if not stacked:
        return LoraMemory(table, shape, device)
    rows = stacked_rows(table, shape, {}, torch.float32)
    memory = LoraMemory(table, shape, device, rows)
    whole = {name: torch.ones(sum(memory.layout.places[name].rows) + count, memory.layout.places[name].inputs)
             for name, count in rows.items()}  # fmt: skip
    whole = {name: weight.to(device) for name, weight in whole.items()}
    memory.wrap({name: Linear(weight[: -rows[name]], None, weight) for name, weight in whole.items()})
    assert len(memory.matrices) == 1 + len(whole)
    assert not any(matrices.any() for matrices in memory.matrices)
    assert all((weight[: -rows[name]] == 1).all() for name, weight in whole.items())
    return memory


@pytest.fixture(params=[(device, stacked) for device in DEVICES for stacked in (False, True)])
def store(table, request):
    memory = slots_for(table, torch.device(request.param[0]), request.param[1])
    store = AdapterStore(AdapterPolicy(SLOTS, COPIES), AdapterLoader(memory, Numbered()))
    store.memory = memory
    yield store
    store.close()


def wait_for(store, adapter):
    """The outcome of an adapter's move, with all before it."""
    end = time.monotonic() + WAIT_S
    found = []
    while time.monotonic() < end:
        found += store.poll()
        if any(outcome.adapter == adapter for outcome in found):
            return found
        time.sleep(1e-3)
    raise AssertionError(f"{adapter} was never loaded")


def holds(store, slot, adapter):
    held = [*store.memory.matrices, store.memory.scales]
    return all(bool((matrices[slot] == int(adapter)).all()) for matrices in held)


def test_200_adapters_come_and_go_and_every_request_is_served(store, monkeypatch):
    """Requests wait in line for slots, hold them for a while, and always find their adapter there."""
    made = []

    def counted(*given):
        made.append(given)
        return empty_adapter(*given)

    monkeypatch.setattr("bladellm_runtime.lora.loader.empty_adapter", counted)
    waiting = deque(str(random.randrange(60)) for _ in range(200))
    running, served = [], 0
    end = time.monotonic() + WAIT_S
    while (waiting or running) and time.monotonic() < end:
        while waiting and store.acquire(waiting[0]):
            running.append([waiting.popleft(), random.randrange(1, 4)])
        assert all(outcome.error is None for outcome in store.poll())
        for request in list(running):
            slot = store.ready_slot(request[0])
            if slot is not None:
                assert holds(store, slot, request[0])
                request[1] -= 1
                if request[1] == 0:
                    running.remove(request)
                    store.release(request[0])
                    served += 1
    assert served == 200
    assert store.policy.in_use == {}
    assert len(made) == COPIES, "memory of dropped copies is used again"


def test_an_adapter_that_cannot_be_read_leaves_slot_and_memory(store):
    for name in ("broken", "surprising", "unreadable"):
        assert store.acquire(name)
        assert store.acquire(name)
        (outcome,) = wait_for(store, name)
        assert name in str(outcome.error)
        assert (outcome.broken is not None) == (name == "broken"), "the others may be there at the next attempt"
        assert store.ready_slot(name) is None
        store.release(name)
        store.release(name)
    for name in ("1", "2", "3"):
        assert store.acquire(name)
    assert not store.acquire("4")
    wait_for(store, "3")
    store.release("2")
    assert store.acquire("4")
    wait_for(store, "4")
    assert holds(store, store.ready_slot("4"), "4")
    assert holds(store, store.ready_slot("1"), "1")


def test_unloaded_adapters_are_read_again_and_those_in_use_stay(store):
    reader = store._loader._reader
    assert store.acquire("5")
    assert not store.unload("5")
    wait_for(store, "5")
    assert not store.unload("5")
    store.release("5")
    assert store.acquire("5")
    store.release("5")
    assert reader.reads == 1, "nobody took it away"
    assert store.unload("5")
    assert store.ready_slot("5") is None
    assert store.acquire("5")
    wait_for(store, "5")
    assert reader.reads == 2


def test_folders_reach_their_slots(table, tmp_path):
    model = save_tiny(tmp_path / "base", "llama", num_hidden_layers=1)
    spec = read_model_spec(tmp_path / "base")
    memory = LoraMemory(weight_table(spec), LoraShape(1, 4, torch.float32), torch.device("cpu"))
    store = AdapterStore(AdapterPolicy(1, 1), AdapterLoader(memory, AdapterReader(spec, memory.layout)))
    adapter = str(save_adapter(tmp_path / "adapter", model))
    assert store.acquire(adapter)
    assert wait_for(store, adapter)[0] == Outcome(adapter, None, None)
    assert memory.numbers[0].abs().sum() > 0
    assert (memory.scales[0] == 1.5).all()
    store.release(adapter)
    (tmp_path / "adapter" / CONFIG).unlink()
    assert store.unload(adapter)
    assert store.acquire(adapter)
    (outcome,) = wait_for(store, adapter)
    assert "missing" in str(outcome.error)
    assert outcome.broken == state_of(tmp_path / "adapter")
    store.close()


def test_a_slot_is_not_written_to_while_a_step_runs_that_may_read_it(table):
    """Where another thread runs the steps: KV of requests that have ended may be remembered."""
    memory = LoraMemory(table, LoraShape(1, 2, torch.float32), torch.device("cpu"))
    steps = []

    def launched():
        steps.append(Future())
        return steps[-1]

    store = AdapterStore(AdapterPolicy(1, 2), AdapterLoader(memory, Numbered(), launched))
    store.memory = memory
    assert store.acquire("1")
    time.sleep(0.05)
    assert store.poll() == []
    assert not memory.numbers.any()
    steps.pop().set_result(None)
    wait_for(store, "1")
    assert holds(store, 0, "1")
    store.close()


def test_an_adapter_that_was_read_again_has_another_version(store):
    versions = []
    for name in ("1", "2", "1", "3", "4", "5", "6", "1"):
        assert store.acquire(name)
        wait_for(store, name) if store.ready_slot(name) is None else store.poll()
        versions.append(store.version(name))
        store.release(name)
    assert versions[0] == versions[2], "it was there all the time"
    assert len({*versions}) == len(versions) - 1, "it was read again after four others"
