"""How decode attention is launched by default: which kernel, by how many sequences and how long they are; no GPU."""

import dataclasses
import itertools

import pytest
import torch
from bladellm_kernels.cascade_decode_attention import CascadeWorkspace
from bladellm_kernels.decode_schedule import DecodeSchedule, DecodeSetting, short_tokens
from bladellm_kernels.decode_work import DecodeWorkspace
from bladellm_kernels.kv_format import KV_FORMATS

from tests.kernels.decode_support import FUSED

pytest.importorskip("triton")


@pytest.mark.parametrize(("hopper", "paged", "head_dim", "specialized"), [
    (True, False, 128, True), (True, True, 128, False), (False, False, 128, False), (True, False, 96, False),
])  # fmt: skip
def test_work_is_planned_for_the_kernel_that_takes_it(hopper, paged, head_dim, specialized, monkeypatch):
    """Triton's kernel has schedules of its own, for pages, other GPUs and heads of odd sizes."""
    from bladellm_kernels import decode_work

    monkeypatch.setattr(decode_work, "is_hopper", lambda device: hopper)
    workspace = DecodeWorkspace(torch.device("cpu"), 64, 32, 8, head_dim, paged=paged)
    assert workspace.schedule(1, 64).warp_specialized is specialized
    assert not workspace.schedule(1, 8, FUSED).warp_specialized
    shared = CascadeWorkspace(torch.device("cpu"), 64, 32, 8, head_dim, paged=paged)
    assert shared.own.schedule(1, 64).warp_specialized is specialized
    assert specialized or workspace.schedule(1, 64) == DecodeSchedule(32, 4, 2, 4, segment_blocks=4)


@pytest.mark.parametrize(("kv_heads", "batch", "long", "together"), [
    (8, 16, True, 2), (8, 17, True, 1), (8, 16, False, 1), (8, 3, True, 2), (8, 2, True, 1), (1, 8, True, 1),
    (3, 8, True, 1), (16, 200, False, 2), (16, 1, False, 2), (8, 63, False, 1), (8, 64, False, 2),
])  # fmt: skip
def test_programs_take_two_heads_of_many_or_of_certain_sequences(kv_heads, batch, long, together, monkeypatch):
    """Of 128 bytes a token and head; and the workspace has room for the states of either schedule's programs."""
    from bladellm_kernels import decode_work

    monkeypatch.setattr(decode_work, "is_hopper", lambda device: True)
    monkeypatch.setattr(decode_work, "multiprocessors", lambda device: 132)
    workspace = DecodeWorkspace(torch.device("cpu"), 200, 4 * kv_heads, kv_heads, 64, 1, KV_FORMATS["int8"])
    assert workspace.schedule(1, batch, DecodeSetting(long=long)).lane_heads == together
    assert workspace.differs_by_length(batch) == (3 <= batch <= 16), "the same on all ranks, whatever heads they have"
    assert len(workspace.lse) >= (workspace.programs(1, batch, DecodeSetting(long=long)) + batch) * 4 * kv_heads
    shape = (torch.device("cpu"), 200, 4 * kv_heads, kv_heads, 128, 1)
    eight_bits, late = DecodeWorkspace(*shape, KV_FORMATS["int8"]), DecodeSetting(fused=True, late=True)
    assert not eight_bits.differs_by_length(batch)
    assert eight_bits.differs_by_length(batch, FUSED)
    assert not eight_bits.differs_by_length(batch, late)
    plain = DecodeWorkspace(*shape)
    assert plain.differs_by_length(batch, FUSED)
    assert plain.differs_by_length(batch, late) == (batch > 4), "few have whole SMs either way"
    for each in (workspace, eight_bits, plain):
        short, long = (each.schedule(1, batch, dataclasses.replace(late, long=long)) for long in (False, True))
        assert short == long or each.differs_by_length(batch, late)


@pytest.mark.parametrize("kv_heads", [8, 16])
@pytest.mark.parametrize("max_batch", [2, 200])
def test_warps_have_rings_of_their_own_for_few_or_long_sequences_of_4_bits(kv_heads, max_batch, monkeypatch):
    """But where programs without work stay on their SMs; there is room for the states of either."""
    from bladellm_kernels import decode_work

    monkeypatch.setattr(decode_work, "is_hopper", lambda device: True)
    monkeypatch.setattr(decode_work, "multiprocessors", lambda device: 132)
    workspace = DecodeWorkspace(torch.device("cpu"), max_batch, 32, kv_heads, 128, 1, KV_FORMATS["int4_affine"])
    late, long = DecodeSetting(fused=True, late=True), DecodeSetting(fused=True, long=True)
    for setting, batch in itertools.product((DecodeSetting(), FUSED, late, long), (1, 2, 63, 64, 200)):
        private = setting.long or (batch < 64 and setting != FUSED)
        assert workspace.schedule(1, batch, setting).private_rings is private
        assert len(workspace.lse) >= (workspace.programs(1, min(batch, max_batch), setting) + max_batch) * 32
    assert [workspace.differs_by_length(batch) for batch in (63, 64)] == [False, True]
    halves = DecodeWorkspace(torch.device("cpu"), 8, 32, kv_heads, 64, 1, KV_FORMATS["int8"])
    assert not halves.schedule(1).private_rings


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "tokens"), [(8, 1, 131072), (40, 1, 65536), (40, 2, 65536), (40, 3, 131072)]
)
def test_steps_of_many_heads_are_long_from_fewer_tokens_on(kv_heads, ranks, tokens):
    assert short_tokens(kv_heads, ranks) == tokens
    own = -(-kv_heads // ranks)
    shape = (torch.device("cpu"), 4, own, own, 128)
    assert DecodeWorkspace(*shape, most_short=short_tokens(kv_heads, ranks)).most_short == tokens
    workspace = DecodeWorkspace(*shape)
    assert workspace.most_short == short_tokens(own)
    most = workspace.most_short
    assert [workspace.is_long(1, count) for count in (most, most + 1)] == [False, True]
    assert [workspace.is_long(200, count) for count in (200 * 2048, 200 * 2048 + 1)] == [False, True], "2,048 each"
