"""From a budget in bytes to a `KvSpec`: how large a granule is, and how many there are."""

import math
import mmap
from pathlib import Path

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.kv.spec import KvGroup, KvSpec

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
LINUX_DEFAULT_MAP_COUNT = 65530


def kv_groups(num_layers: int, layer_token_bytes: int, layers_per_group: int) -> tuple[KvGroup, ...]:
    """Consecutive layers, `layers_per_group` to a group, the last group taking what remains.

    `layer_token_bytes` is one token's K and V in one layer.
    """
    starts = range(0, num_layers, layers_per_group)
    layers = [tuple(range(start, min(start + layers_per_group, num_layers))) for start in starts]
    return tuple(KvGroup(group, layer_token_bytes * len(group)) for group in layers)


def mapping_limit() -> int:
    """Memory mappings the KV cache may use: half of `vm.max_map_count`, the rest is for libraries, stacks, weights."""
    try:
        return int(MAX_MAP_COUNT.read_text()) // 2
    except (OSError, ValueError):
        return LINUX_DEFAULT_MAP_COUNT // 2


def worst_mappings(num_groups: int, granules: int, num_slots: int) -> int:
    """Mappings when no two of `granules` granules are neighbours in memory: one a granule, and in each group the
    unmapped stretches around every slot that has any."""
    return num_groups * (granules + min(granules, num_slots) + 1)


def plan_spec(
    groups: tuple[KvGroup, ...],
    budget_bytes: int,
    num_slots: int,
    max_model_len: int,
    granule_tokens_hint: int,
    page_bytes: int,
) -> KvSpec:
    """The geometry of a KV cache of at most `budget_bytes` for `num_slots` sequences of up to `max_model_len` tokens.

    A granule is a whole number of `page_bytes` in every group: the host's page where granules are memory mappings
    (their number then stays below `mapping_limit`), the device's granularity for device handles, 1 where granules
    are rows of a tensor. It has about `granule_tokens_hint` tokens: fewer where the budget would not give each slot
    one, more where there would be too many mappings. There are never more granules than full slots take, and
    `max_tokens` is never more than all granules hold, so a budget below one sequence shortens the sequences.

    Raises `ConfigError` when not a single granule fits the budget.
    """
    token_bytes = sum(group.token_bytes for group in groups)
    unit = math.lcm(*(page_bytes // math.gcd(page_bytes, group.token_bytes) for group in groups))
    limit = mapping_limit() if page_bytes == mmap.PAGESIZE else None
    granule_tokens = _first_granule(unit, granule_tokens_hint, budget_bytes // (num_slots * token_bytes))
    while True:
        pool = budget_bytes // (granule_tokens * token_bytes)
        length = min(-(-max_model_len // granule_tokens), pool)
        pool = min(pool, num_slots * length)
        fits = limit is None or worst_mappings(len(groups), pool, num_slots) <= limit
        if fits or granule_tokens >= max_model_len:
            break
        granule_tokens += granule_tokens
    if limit is not None and not fits:
        # A granule is a whole sequence by now, so there is at most one a slot: two mappings each, and one more.
        pool = (limit // len(groups) - 1) // 2
    if pool < 1:
        raise ConfigError(
            f"the KV cache of {budget_bytes / 2**30:.4g} GiB is smaller than its smallest piece of "
            f"{unit * token_bytes / 2**30:.4g} GiB ({unit} tokens); raise --kv_cache_gib"
        )
    return KvSpec(groups, granule_tokens, pool, num_slots, length * granule_tokens)


def _first_granule(unit: int, hint: int, tokens_per_slot: int) -> int:
    """The hint as a multiple of the unit, or the largest multiple that gives every slot a granule if that is less."""
    wanted = -(-hint // unit) * unit
    fair = tokens_per_slot // unit * unit
    return max(unit, min(wanted, fair))
