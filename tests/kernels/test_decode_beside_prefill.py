"""Decode attention that runs beside prefill attention launched before it: in Python, compiled, and on a GPU."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_schedule import DecodeSchedule, default_schedule
from bladellm_kernels.decode_shape import decode_shape
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.listed_prefill_attention import (
    fill_list,
    list_shape,
    list_views,
    listed_prefill_attention,
    one_pass_alone,
)
from bladellm_kernels.one_pass_list import LEAST_BESIDE, one_pass_cost, programs_beside
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_decode_attention import (
    ragged_decode_attention,
    ragged_decode_attention_reference,
    runs_beside,
)
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention_reference

from tests.kernels.conditions import assert_close
from tests.kernels.decode_support import decode_case
from tests.kernels.hopper import compiled_launches
from tests.kernels.test_ring_decode import aligned, random_work

pytest.importorskip("triton")

HEADS = Heads(32, 8, 128)
PROGRAMS = 132


@pytest.mark.turns
def test_what_it_reads_is_complete_and_what_it_ends_with_is_a_wait(monkeypatch):
    """Every program waits, for the kernels before it to have ended when it does; rows without tokens stay."""
    from bladellm_kernels import ring_decode as module

    lens = [1, 0, 63, 64, 65, 200, 0, 16]
    case = decode_case("no_quant", torch.float16, (4, 2, 32), lens, granule_tokens=128)
    waits: list[int] = []

    class InPython:
        def __getitem__(self, grid):
            from tests.kernels.gluon_support import run_program

            def launch(*arguments, num_warps, **constants) -> None:
                constants["EARLY"] = True
                for program in random.sample(range(grid[0]), grid[0]):
                    run_program(
                        module_kernel, program, True, *arguments, programs=grid[0],
                        on_wait=lambda program=program: waits.append(program), **constants,
                    )  # fmt: skip

            return launch

    module_kernel = module.ring_decode_kernel
    monkeypatch.setattr(module, "ring_decode_kernel", InPython())
    work = random_work(case, DecodeSchedule(64, 3, 4, 1), None, 5)
    out = torch.full_like(case.q, torch.nan)
    call = DecodeCall(*case.memory, case.scale, work, out, beside=True)
    assert module.launch(call, decode_shape(case.q, case.kv, work))
    empty = case.kv_lens == 0
    assert out[empty].isnan().all()
    expected = ragged_decode_attention_reference(*case.memory, case.scale)
    assert_close(out[~empty], expected[~empty], torch.float16)
    assert sorted(set(waits)) == list(range(2 * 5)), "whoever ends says that the kernels before it have ended"


def test_it_waits_at_its_end_alone(monkeypatch):
    from bladellm_kernels import ring_decode as module

    case = decode_case("no_quant", torch.bfloat16, (32, 8, 128), [500, 70], granule_tokens=256)
    case = dataclasses.replace(case, kv=dataclasses.replace(case.kv, payload=aligned(case.kv.payload)))
    monkeypatch.setattr(module, "early_launch", lambda device: {"EARLY": True, "launch_pdl": True})
    counts = []
    for beside in (False, True):
        work = random_work(case, default_schedule(128, batch=2, kv_heads=8), None, 2)
        shape = dataclasses.replace(decode_shape(case.q, case.kv, work), plain=False)
        call = DecodeCall(*case.memory, case.scale, work, torch.empty_like(case.q), beside)
        with compiled_launches() as compiled:
            module.launch(call, shape)
        counts.append(compiled["ring_decode_kernel"].asm["ptx"].count("griddepcontrol.wait"))
    assert counts == [4, 1], "before: for the plan, queries, the newest tokens, and at the end"


def test_on_a_cpu_outputs_of_sequences_without_tokens_are_left_alone():
    case = decode_case("no_quant", torch.float32, (4, 2, 16), [40, 0, 7, 0])
    assert runs_beside(case.q, case.kv, None)
    for beside in (False, True):
        out = torch.full_like(case.q, 7.0)
        ragged_decode_attention(*case.memory, case.longest, case.scale, out=out, beside=beside)
        assert (out[[1, 3]] == (7.0 if beside else 0.0)).all()
        expected = ragged_decode_attention_reference(*case.memory, case.scale)
        assert_close(out[[0, 2]], expected[[0, 2]], torch.float32)


def test_programs_are_those_of_the_least_sum():
    """Of the time of the chunks, and of what decode attention then has left to do."""
    for _ in range(50):
        spans = [Span(0, random.randint(1, 2048), random.choice([0, 0, 777]), 0, 0)]
        tokens = random.choice([1, 100, 20_000, 150_000, 1_000_000])
        found = programs_beside(spans, HEADS, PROGRAMS, tokens)
        chunks, decode = one_pass_cost(HEADS, spans, PROGRAMS), tokens * 4096 / 3e6

        def total(programs: int, chunks: float = chunks, decode: float = decode) -> float:
            return chunks * PROGRAMS / programs + decode * programs / PROGRAMS

        least = min(range(LEAST_BESIDE, PROGRAMS + 1), key=total)
        assert abs(found - least) <= 1
    assert programs_beside(spans, HEADS, 40, 10**6) == 40, "never more than there are"


def test_lists_beside_decodes_have_fewer_programs_and_all_chunks():
    shape = list_shape(1152, 4, HEADS, torch.bfloat16, PROGRAMS)
    span = Span(34, 1000, 0, 0, 0)
    used = []
    for tokens in (0, 40_000):
        target = np.empty(shape.numbers, np.int64)
        assert fill_list([span], None, shape, target, tokens)
        entries = list_views(torch.from_numpy(target), shape).programs
        assert entries is not None
        entries = entries[entries[:, 1] > 0]
        assert entries[:, 4].tolist() == list(range(len(entries)))
        assert (entries[:, 5] == len(entries)).all()
        used.append(len(entries))
    assert used[0] == PROGRAMS
    assert LEAST_BESIDE <= used[1] < PROGRAMS


@pytest.mark.gpu(hopper=True)
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (16, 8, 64)], ids=str)
def test_steps_of_both_give_the_same_bits_as_in_turn(heads):
    """Layers of a captured step, each writing its queries and newest keys and values before, its outputs copied behind;
    lengths, chunks and inputs change between replays."""
    layers, rows, tokens = 6, 96, 1024
    step = _Step(heads, layers, rows, tokens)
    graphs = {}
    for beside in (False, True):
        step.run(beside)
        torch.cuda.synchronize()
        graphs[beside] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[beside]):
            step.run(beside)
    for _ in range(12):
        step.change()
        found = []
        for beside in (False, True, True, True):
            step.prepare(beside)
            graphs[beside].replay()
            found.append(step.found.clone())
        own = step.own()
        assert not found[0][:, own].isnan().any()
        assert all(torch.equal(found[0][:, own], other[:, own]) for other in found[1:])
    step.check()


class _Step:
    """Sequences of which some decode and others have a chunk; memory of every layer, and what each layer wrote."""

    def __init__(self, heads: tuple[int, int, int], layers: int, rows: int, tokens: int) -> None:
        self.heads, self.layers, self.rows, self.tokens = Heads(*heads), layers, rows, tokens
        self.scale, device = heads[2] ** -0.5, torch.device("cuda")
        self.limit = 3072
        shape = ((rows + 2) * self.limit, layers, heads[1], 2, heads[2])
        memory = torch.randn(shape, device=device).bfloat16()
        self.kv = [KvLayer(memory[:, layer].transpose(1, 2), NO_QUANT, 128) for layer in range(layers)]
        self.queries = torch.zeros(layers, tokens, heads[0], heads[2], device=device).bfloat16()
        self.new = torch.zeros(layers, tokens, 2, heads[1], heads[2], device=device).bfloat16()
        self.q = torch.zeros_like(self.queries[0])
        self.kv_rows = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.bases = torch.arange(rows, device=device) * self.limit
        self.slots = torch.zeros_like(self.lens)
        self.shape = list_shape(tokens, 4, self.heads, torch.bfloat16, PROGRAMS)
        self.numbers = torch.zeros(self.shape.numbers, dtype=torch.int64, device=device)
        self.lists = list_views(self.numbers, self.shape)._replace(tiles=None)
        self.workspace = DecodeWorkspace(device, rows, *heads, 1)
        self.out = torch.zeros_like(self.q)
        self.found = torch.zeros_like(self.queries)
        self.change()
        self.prepare(False)

    def change(self) -> None:
        """Other decode rows, chunks and inputs."""
        self.decodes = random.randint(1, self.rows - 1)
        lens = [random.choice([1, 63, random.randint(1, 400), random.randint(1, 3000)]) for _ in range(self.decodes)]
        self.spans = self.chunks()
        while not one_pass_alone(self.list(0), self.shape):
            self.spans = self.chunks()
        self.lens.zero_()
        self.lens[: self.decodes] = torch.tensor(lens)
        places = [slot * self.limit + length - 1 for slot, length in enumerate(lens)]
        for span in self.spans:
            places += [span.base_row + span.start + each for each in range(span.query_len)]
        # Tokens of padding write where nobody reads.
        spare = (self.rows + 2) * self.limit - 1
        self.kv_rows.copy_(torch.tensor(places + [spare] * (self.tokens - len(places))))
        self.queries.normal_()
        self.new.normal_()

    def chunks(self) -> list[Span]:
        """Two behind the decode rows."""
        left, first = self.tokens - self.decodes - random.randint(0, 100), self.decodes
        spans = []
        for slot in (self.rows, self.rows + 1):
            length = random.randint(1, max(1, left - 1))
            spans.append(Span(first, length, random.choice([0, 300]), slot * self.limit, slot))
            first, left = first + length, left - length
        return spans

    def list(self, decode_tokens: int) -> np.ndarray:
        target = np.empty(self.shape.numbers, np.int64)
        assert fill_list(self.spans, None, self.shape, target, decode_tokens)
        return target

    def prepare(self, beside: bool) -> None:
        """The lists for the next replay, and NaN wherever it has to write."""
        self.numbers.copy_(torch.from_numpy(self.list(int(self.lens.sum()) if beside else 0)))
        self.found.fill_(torch.nan)
        self.out.fill_(torch.nan)
        for kv in self.kv:
            kv.payload[self.kv_rows] = torch.nan

    def run(self, beside: bool) -> None:
        work = self.workspace.plan(self.lens)
        assert runs_beside(self.q, self.kv[0], work)
        for layer, kv in enumerate(self.kv):
            self.q.copy_(self.queries[layer])
            kv.payload.index_copy_(0, self.kv_rows, self.new[layer])
            if beside:
                listed_prefill_attention(self.q, kv, self.lists, self.scale, None, self.out)
            self._decode(kv, work, beside)
            if not beside:
                listed_prefill_attention(self.q, kv, self.lists, self.scale, None, self.out)
            self.found[layer].copy_(self.out)

    def _decode(self, kv, work, beside: bool) -> None:
        memory = self.q[: self.rows], kv, self.bases, self.slots, self.lens
        ragged_decode_attention(*memory, self.limit, self.scale, work=work, out=self.out[: self.rows], beside=beside)

    def own(self) -> torch.Tensor:
        """Tokens that are no padding."""
        return torch.arange(self.spans[-1].first + self.spans[-1].query_len, device=self.q.device)

    def check(self) -> None:
        """What a layer found against softmax in float32."""
        layer = random.randrange(self.layers)
        q, kv, own = self.queries[layer], self.kv[layer], self.own()
        expected = ragged_prefill_attention_reference(q, kv, self.spans, self.scale, None).to(q.device)
        memory = q[: self.decodes], kv, self.bases[: self.decodes], self.slots[: self.decodes]
        lens = self.lens[: self.decodes]
        expected[: self.decodes] = ragged_decode_attention_reference(*memory, lens, self.scale)
        assert_close(self.found[layer][own], expected[own], torch.bfloat16)
