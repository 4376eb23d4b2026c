"""What kernels read of a step's adapters: every token that has one in one tile of its own adapter, padding in none."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from bladellm_kernels.lora_tokens import TILE_TOKENS, TokenAdapters

from bladellm_runtime.engine.decode_inputs import DecodeInputs
from bladellm_runtime.engine.inputs import SlotTokens, build_inputs, flatten
from bladellm_runtime.engine.mixed_graphs import MixedGraphs
from bladellm_runtime.engine.mixed_inputs import MixedInputs
from bladellm_runtime.engine.step_adapters import SlotAdapters
from bladellm_runtime.kv.prompt_tree import pack
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan
from tests.models.harness import Sequences, load_tiny, random_prompt, save_tiny
from tests.support.step_plans import step_plan

SLOTS, LORAS, SIZE = 6, 5, 200


@pytest.fixture
def sequences(tmp_path: Path) -> Sequences:
    save_tiny(tmp_path, "llama", num_hidden_layers=1)
    return Sequences(load_tiny(tmp_path), slots=SLOTS)


def random_step(adapters: SlotAdapters) -> tuple[StepPlan, list[SlotTokens | None], list[int]]:
    """Decode rows and chunks of some slots, and the adapter of each of their tokens."""
    tokens: list[SlotTokens | None] = []
    own = [random.randrange(-1, LORAS) for _ in range(SLOTS)]
    for slot, adapter in enumerate(own):
        load = SlotLoad(slot, 0, pack(random_prompt(SIZE)), SIZE, SamplingParams(), 0, adapter)
        adapters.load(load)
        tokens.append(SlotTokens.of(load))
    slots = random.sample(range(SLOTS), random.randint(1, SLOTS))
    decodes = random.randrange(len(slots))
    lengths = [1] * decodes + [random.choice((1, 7, 32, 33)) for _ in slots[decodes:]]
    plan = step_plan(0, slots=slots, starts=[5] * len(slots), query_lens=lengths, num_decode=decodes)
    plan.samples = [True] * len(slots)
    return plan, tokens, [own[slot] for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]


def check(found: TokenAdapters, wanted: list[int], size: int) -> None:
    assert found.slots.tolist() == wanted + [-1] * (size - len(wanted))
    assert found.tiles is not None
    order, seen = found.tiles.order.tolist(), []
    assert len(order) == size
    for slot, first, count in found.tiles.tiles.tolist():
        assert 0 <= count <= TILE_TOKENS
        places = order[first : first + count]
        assert all(wanted[place] == slot for place in places)
        seen += places
    assert sorted(seen) == [place for place, adapter in enumerate(wanted) if adapter >= 0]


def test_eager_and_captured_steps_read_every_tokens_adapter(sequences):
    graphs = MixedGraphs([8], sequences.model, sequences.arena, torch.zeros(SLOTS + 1, dtype=torch.int64), None, None)
    last_token = torch.zeros(SLOTS + 1, dtype=torch.int64)
    inputs = MixedInputs([SIZE], sequences.arena, graphs._heads, [None], torch.float32, max_loras=LORAS)
    used = 0
    for _ in range(100):
        adapters = SlotAdapters(SLOTS)
        plan, tokens, wanted = random_step(adapters)
        rows = adapters.of(plan)
        assert (rows is None) == (max(wanted) < 0)
        flat = flatten(plan, tokens, sequences.arena, rows)
        inputs._static.fill_(2**40)
        if not inputs.send(flat, SIZE):
            continue
        assert inputs.adapted == (rows is not None)
        eager = build_inputs(flat, last_token, sequences.arena).batch.adapters
        if rows is None:
            assert eager is None
            continue
        assert eager is not None
        used += 1
        check(eager, wanted, len(wanted))
        captured = inputs.batch(SIZE, last_token, adapted=True).adapters
        assert captured is not None
        assert captured.ready
        check(captured, wanted, SIZE)
    assert used > 10


def test_decode_rows_are_in_no_tiles(sequences):
    adapters = SlotAdapters(SLOTS)
    for slot, adapter in ((1, 3), (4, 0)):
        adapters.load(SlotLoad(slot, 0, pack(random_prompt(9)), 9, SamplingParams(), 0, adapter))
    plan = step_plan(0, slots=[1, 2, 4], starts=[5] * 3, query_lens=[1] * 3, num_decode=3)
    plan.samples = [True] * 3
    rows = adapters.of(plan)
    assert np.array_equal(rows, [3, -1, 0])
    last_token = torch.zeros(SLOTS + 1, dtype=torch.int64)
    found = build_inputs(flatten(plan, [None] * SLOTS, sequences.arena, rows), last_token, sequences.arena)
    assert found.batch.adapters.slots.tolist() == [3, -1, 0]
    assert found.batch.adapters.tiles is None


def test_padding_of_captured_decode_steps_has_no_adapter(sequences):
    inputs = DecodeInputs(8, sequences.arena)
    plan = step_plan(0, slots=[1, 2, 4], starts=[5] * 3, query_lens=[1] * 3, num_decode=3)
    last_token = torch.zeros(SLOTS + 1, dtype=torch.int64)
    for rows in (np.array([3, -1, 0]), np.array([-1, 4, 4])):
        inputs._static.fill_(2**40)
        inputs.send(plan, 8, rows)
        assert inputs.adapted
        batch = inputs.batch(8, last_token, adapted=True)
        assert batch.adapters.slots.tolist() == [*rows, *[-1] * 5]
        assert batch.decode_slots.tolist()[:3] == plan.slots.tolist()
    inputs.send(plan, 8)
    assert not inputs.adapted
    assert inputs.batch(8, last_token).adapters is None
