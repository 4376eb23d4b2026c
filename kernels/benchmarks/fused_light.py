"""What `fused_layer.py --light` tries for attention beside fused layers: its tiles, and how long programs stay."""

from collections.abc import Iterator, Mapping

from bladellm_kernels.decode_schedule import DecodeSchedule

TILES = ((64, 3, 4), (64, 4, 4), (32, 4, 2))
"""Positions, stages and warps: with one program an SM they leave half of its shared memory."""

STAYS = {"idle3": (3000, 0), "0": (0, 0), "3": (0, 3000), "4.5": (0, 4500), "6": (0, 6000)}
"""Nanoseconds that programs without work stay, and all programs."""


def light_name(tile: tuple[int, int, int], stay: str) -> str:
    return "-".join(map(str, tile)) + f"+{stay}"


def light_schedules() -> dict[str, DecodeSchedule]:
    """By name, all tiles with all stays."""
    return {
        light_name(tile, stay): DecodeSchedule(*tile, 1, idle_ns=idle_ns, stay_ns=stay_ns)
        for tile in TILES
        for stay, (idle_ns, stay_ns) in STAYS.items()
    }


def light_table(times: Mapping[str, float]) -> Iterator[str]:
    """Milliseconds of a step with each of them that was timed, a row for each tile."""
    yield "| tile | " + " | ".join(f"+{stay} µs" for stay in STAYS) + " |"
    yield "| --- |" + " ---: |" * len(STAYS)
    for tile in TILES:
        if all(light_name(tile, stay) not in times for stay in STAYS):
            continue
        found = [times.get(light_name(tile, stay)) for stay in STAYS]
        figures = " | ".join("" if ms is None else f"{ms:.3f}" for ms in found)
        yield f"| {'-'.join(map(str, tile))} | {figures} |"
