"""From a budget in bytes to a `KvSpec`: how large a granule is, and how many there are."""

import math
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.spec import KvGroup, KvSpec

FEWEST_BLOCKS = 4
"""A pool of fewer would be spent on a sequence or two, so blocks are then smaller."""
MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
LINUX_DEFAULT_MAP_COUNT = 65530


def kv_groups(num_layers: int, layer_token_bytes: int, layers_per_group: int) -> tuple[KvGroup, ...]:
    """Consecutive layers, `layers_per_group` to a group, the last group taking what remains.

    `layer_token_bytes` is one token's K and V in one layer.
    """
    starts = range(0, num_layers, layers_per_group)
    layers = [tuple(range(start, min(start + layers_per_group, num_layers))) for start in starts]
    return tuple(KvGroup(group, layer_token_bytes * len(group)) for group in layers)


def granule_unit(groups: tuple[KvGroup, ...], page_bytes: int) -> int:
    """Tokens that take whole pages in every group."""
    return math.lcm(*(page_bytes // math.gcd(page_bytes, group.token_bytes) for group in groups))


def mapping_limit() -> int:
    """Memory mappings the KV cache may use: half of `vm.max_map_count`, the rest is for libraries, stacks, weights."""
    try:
        return int(MAX_MAP_COUNT.read_text()) // 2
    except (OSError, ValueError):
        return LINUX_DEFAULT_MAP_COUNT // 2


def worst_mappings(num_groups: int, granules: int, num_slots: int) -> int:
    """Mappings when each of `granules` granules is shown once and no two next to each other: one a granule, in each
    group the unmapped stretches around every slot that has any, and the one of the whole memory file."""
    return num_groups * (granules + min(granules, num_slots) + 1) + 1


def plan_spec(
    groups: tuple[KvGroup, ...],
    budget_bytes: int,
    num_slots: int,
    max_model_len: int,
    granule_tokens_hint: int,
    page_bytes: int,
    *,
    unit: int = 1,
    block_bytes: int = 0,
    scale_token_bytes: int = 0,
    host_bytes: int = 0,
) -> KvSpec:
    """The geometry of a KV cache of at most `budget_bytes` for `num_slots` sequences of up to `max_model_len` tokens.

    A granule is a whole number of `page_bytes` in every group: the host's page where granules are memory mappings
    (their number then stays below `mapping_limit`), the device's granularity for device handles, 1 where granules
    are rows of a tensor. It has about `granule_tokens_hint` tokens: fewer where the budget would not give each slot
    one, more where there would be too many mappings. There are never more granules than full slots take (rounded up
    to blocks where all of that allows it), and `max_tokens` is never more than all granules hold, so a budget below one
    sequence shortens the sequences.

    `unit`: granules have a multiple of so many tokens.

    A block has about `block_bytes` of one group, less where that would leave few blocks or be longer than a sequence;
    the pool is whole blocks. Half of them are split at first, for a block takes some milliseconds to convert.
    `scale_token_bytes`: scales of one token over all layers. `host_bytes`: swap space.

    A sequence wastes half a granule on average. An 8B model (32 layers in groups of 4, 8 KV heads of 128, bfloat16)
    with pages of 2 MiB has granules of 128 tokens, 16 MiB over its 8 groups, so 8 MiB a sequence: 2 GiB of 120 at 256
    sequences, or 1.7 %. Its blocks are 16 granules, 2048 tokens, 32 MiB a group.

    Raises `ConfigError` when not a single granule fits the budget.
    """
    token_bytes = sum(group.token_bytes for group in groups) + scale_token_bytes
    unit = math.lcm(unit, granule_unit(groups, page_bytes))
    limit = mapping_limit() if page_bytes == mmap.PAGESIZE else None
    mappable = partial(_are_mappable, limit, len(groups), num_slots)
    granule_tokens = _first_granule(unit, granule_tokens_hint, budget_bytes // (num_slots * token_bytes))
    while True:
        most = budget_bytes // (granule_tokens * token_bytes)
        length = min(-(-max_model_len // granule_tokens), most)
        pool = min(most, num_slots * length)
        if mappable(pool) or granule_tokens >= max_model_len:
            break
        granule_tokens += granule_tokens
    if limit is not None and not mappable(pool):
        # A granule is a whole sequence by now, so there is at most one a slot: two mappings each, and one more.
        pool = ((limit - 1) // len(groups) - 1) // 2
    if pool < 1:
        raise ConfigError(
            f"the KV cache of {budget_bytes / 2**30:.4g} GiB is smaller than its smallest piece of "
            f"{unit * token_bytes / 2**30:.4g} GiB ({unit} tokens); raise --kv_cache_gib"
        )
    block = _block_granules(block_bytes // (granule_tokens * max(group.token_bytes for group in groups)), pool, length)
    pool = _whole_blocks(block, pool, lambda granules: granules <= most and mappable(granules))
    host = host_bytes // (granule_tokens * token_bytes)
    max_tokens = min(length, pool) * granule_tokens
    split = pool // block // 2 if block > 1 else 0
    return KvSpec(groups, granule_tokens, pool, num_slots, max_tokens, block, split, scale_token_bytes, host)


def _are_mappable(limit: int | None, num_groups: int, num_slots: int, granules: int) -> bool:
    return limit is None or worst_mappings(num_groups, granules, num_slots) <= limit


def _first_granule(unit: int, hint: int, tokens_per_slot: int) -> int:
    """The hint as a multiple of the unit, or the largest multiple that gives every slot a granule if that is less."""
    wanted = -(-hint // unit) * unit
    fair = tokens_per_slot // unit * unit
    return max(unit, min(wanted, fair))


def _block_granules(wanted: int, pool: int, length: int) -> int:
    """Granules of a block: at most `wanted`, halved until a few blocks fit the pool and one fits a sequence."""
    block = max(1, wanted)
    while block > 1 and (pool < FEWEST_BLOCKS * block or block > length):
        block //= 2
    return block


def _whole_blocks(block: int, pool: int, may_be: Callable[[int], bool]) -> int:
    """The pool as whole blocks: rounded up where that many granules may be, else down."""
    rounded = -(-pool // block) * block
    return rounded if may_be(rounded) else pool // block * block
