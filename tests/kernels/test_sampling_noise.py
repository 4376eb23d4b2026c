"""The random numbers: bit-exact to their definition, uniform, and independent in every direction of the key."""

import random

import pytest
import torch
from bladellm_kernels.gumbel import (
    M1,
    M2,
    TOKEN_STEP,
    UNIFORM_MAX,
    gumbel_argmax,
    reference_uniform,
    row_keys,
    stream_key,
    uniform,
)

from tests.kernels.sampling_support import (
    ALARM,
    chi_square_p,
    fresh_generator,
    fresh_seed,
    keys_for,
    pair_p,
    stream_tensor,
    uniform_ks_p,
)

EDGES = [-(2**63), -(2**32), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1]


def test_uniform_equals_its_definition_in_plain_integers():
    rng = random.Random(fresh_seed())
    for seed in [*EDGES, *(rng.randrange(-(2**63), 2**63) for _ in range(20))]:
        choice, position = rng.randrange(128), rng.randrange(2**20)
        tokens = [0, 1, 2**18 + 1, *(rng.randrange(2**18) for _ in range(20))]
        got = uniform(keys_for([seed], position, choice), torch.tensor(tokens))
        assert got[0].tolist() == [reference_uniform(seed, choice, position, token) for token in tokens]


def test_definition_is_frozen():
    """Seeds of users must give the same text in later versions: these values may never change."""
    got = [reference_uniform(*key) for key in [(0, 0, 0, 0), (42, 0, 17, 8191), (-1, 3, 131072, 151935)]]
    assert got == [0.25308844447135925, 0.9480546712875366, 0.6647180914878845]


def test_uniform_does_not_depend_on_shape_or_order():
    generator = fresh_generator()
    keys = keys_for(range(7), position=5)
    tokens = torch.randperm(1003, generator=generator)
    whole = uniform(keys, torch.arange(1003))
    assert torch.equal(uniform(keys, tokens), whole[:, tokens])
    assert torch.equal(uniform(keys[3:4], tokens.to(torch.int32)[None, 10:50]), whole[3:4, tokens[10:50]])


def token_hashing_to(word: int, keys: torch.Tensor) -> int:
    """The token whose bits are `word` under a key: the definition run backwards."""
    key_0, key_1 = keys[0].tolist()
    word ^= word >> 16
    word = word * pow(M2, -1, 2**32) % 2**32
    word ^= word >> 15 ^ word >> 30
    word = (word - key_1) * pow(M1, -1, 2**32) % 2**32
    word ^= word >> 16
    token = (word - key_0) * pow(TOKEN_STEP, -1, 2**32) % 2**32
    return token - 2**32 if token >= 2**31 else token


@pytest.mark.parametrize(
    ("word", "expected"),
    [(0, 2.0**-32), (1, 3 * 2.0**-32), (2**30, 0.5), (2**31 - 1, UNIFORM_MAX), (2**31 - 64, UNIFORM_MAX)],
)
def test_uniform_stays_inside_the_open_interval(word, expected):
    keys = keys_for([fresh_seed()])
    for top_bit in (0, 2**31):
        token = torch.tensor([token_hashing_to(word | top_bit, keys)])
        assert uniform(keys, token).item() == expected
        assert gumbel_argmax(torch.zeros(1, 1), keys, token[None]).item() == token.item()


def test_stream_keys_differ_for_all_seeds_and_choices_tried():
    base = fresh_seed() % 2**60
    seeds = [*EDGES, *range(base, base + 300), *(base ^ 1 << bit for bit in range(60))]
    keys = {(seed, choice): stream_key(seed, choice) for seed in set(seeds) for choice in range(16)}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("direction", ["tokens", "positions", "seeds", "choices", "high seeds"])
def test_uniform_along_each_direction(direction):
    base, n = fresh_seed() % 2**30, 40_000
    fixed = torch.tensor([base % 8192])
    if direction == "tokens":
        sample = uniform(keys_for([base], 3), torch.arange(n))
    elif direction == "positions":
        sample = uniform(row_keys(stream_tensor([base]).expand(n, 2), torch.arange(n)), fixed)
    elif direction == "seeds":
        sample = uniform(keys_for(range(base, base + n)), fixed)
    elif direction == "high seeds":
        sample = uniform(keys_for([seed << 32 for seed in range(n)]), fixed)
    else:
        streams = torch.tensor([stream_key(base, choice) for choice in range(n)], dtype=torch.int32)
        sample = uniform(row_keys(streams, torch.zeros(n)), fixed)
    assert uniform_ks_p(sample) > ALARM
    flat = sample.flatten()
    for lag in (1, 2, 3, 16):
        assert pair_p(flat[:-lag], flat[lag:]) > ALARM, f"neighbours at distance {lag} depend on each other"


@pytest.mark.parametrize(
    "other", ["next position", "next seed", "next choice", "sign of the seed", "position for seed"]
)
def test_rows_with_related_keys_are_independent(other):
    base, rows, tokens = fresh_seed() % 2**40 + 1, 64, torch.arange(4001)
    related = {
        "next position": [(base, 0, 10 + row) for row in range(rows)],
        "next seed": [(base + row, 0, 10) for row in range(rows)],
        "next choice": [(base, row, 10) for row in range(rows)],
        "sign of the seed": [((-1) ** row * (base + row // 2), 0, 10) for row in range(rows)],
        "position for seed": [(base + row, 0, 10 + rows - row) for row in range(rows)],
    }[other]
    keys = torch.cat([keys_for([seed], position, choice) for seed, choice, position in related])
    sample = uniform(keys, tokens)
    assert pair_p(sample[:-1], sample[1:]) > ALARM
    # No row is a shifted copy of another either.
    assert pair_p(sample[:-1, 1:], sample[1:, :-1]) > ALARM
    assert len(sample[:, :16].flatten().unique()) > rows * 16 - 8


def test_every_bit_of_the_key_flips_every_leading_bit_half_the_time():
    rng = random.Random(fresh_seed())
    trials, leading = 400, 8
    for field, bits in (("seed", 63), ("choice", 7), ("position", 20), ("token", 18)):
        for bit in range(0, bits, 3):
            flips = torch.zeros(leading)
            for _ in range(trials):
                key = {
                    "seed": rng.getrandbits(63),
                    "choice": rng.getrandbits(7),
                    "position": rng.getrandbits(20),
                    "token": rng.getrandbits(18),
                }
                changed = key | {field: key[field] ^ 1 << bit}
                words = [int(reference_uniform(**each) * 2**leading) for each in (key, changed)]
                flips += torch.tensor([(words[0] ^ words[1]) >> position & 1 for position in range(leading)])
            # Six standard deviations.
            assert (flips / trials - 0.5).abs().max() < 6 * 0.5 / trials**0.5, f"{field} bit {bit}"


def test_draw_follows_softmax():
    generator = fresh_generator()
    logits = torch.randn(37, generator=generator) * 2
    draws = 20_000
    tokens = gumbel_argmax(logits.expand(draws, 37), keys_for(range(draws), position=9))
    assert chi_square_p(torch.bincount(tokens, minlength=37), logits.double().softmax(0) * draws) > ALARM


def test_draw_over_many_equal_logits_favours_no_region():
    """The winner is an extreme of many uniforms: too coarse a grid there would favour low ids among equal scores."""
    vocab, draws, regions = 65_536, 1_024, 32
    base = fresh_seed() % 2**40
    logits = torch.zeros(64, vocab)
    tokens = torch.cat(
        [gumbel_argmax(logits, keys_for(range(first, first + 64))) for first in range(base, base + draws, 64)]
    )
    counts = torch.bincount(tokens // (vocab // regions), minlength=regions)
    assert chi_square_p(counts, torch.full((regions,), draws / regions)) > ALARM
    parity = torch.bincount(tokens % 8, minlength=8)
    assert chi_square_p(parity, torch.full((8,), draws / 8)) > ALARM


def test_draw_from_candidates_equals_draw_from_the_whole_row():
    generator = fresh_generator()
    logits = torch.randn(50, 999, generator=generator)
    excluded = torch.rand(50, 999, generator=generator) < 0.9
    excluded[:, 0] = False
    logits = logits.masked_fill(excluded, -torch.inf)
    keys = keys_for(range(50))
    order = torch.rand(50, 999, generator=generator).argsort(dim=-1)
    got = gumbel_argmax(logits.gather(1, order), keys, order)
    assert torch.equal(got, gumbel_argmax(logits, keys))


def test_equal_scores_give_the_lowest_id():
    keys = keys_for([fresh_seed()])
    logits = torch.tensor([[torch.inf, torch.inf, torch.inf, 1.0]])
    assert gumbel_argmax(logits, keys, torch.tensor([[30, 20, 40, 10]])).item() == 20
    assert gumbel_argmax(logits, keys).item() == 0


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\[R, N\] and \[R, 2\]"):
        gumbel_argmax(torch.zeros(3, 5), keys_for([1, 2]))
