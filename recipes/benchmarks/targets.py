"""What `make bench-gpu` measures of each shape, and the figures that it shows beside the measured ones.

Of one NVIDIA H200. Floor: the sum over operators of the larger of bytes over 4.28 TB/s and FLOPs over 797 TFLOP/s (622
in prefill attention). Peer: vLLM 0.26.0 with its defaults, measured once on such a GPU. Least and aim are this
project's goals; GPUs and hosts of a kind differ, so where the peer was measured in the same hour on the same machine,
the least is the same share of what it reached there.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """Figures beside a measured one; None where there is none."""

    floor: float | None = None
    peer: float | None = None
    least: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class Cases:
    """What is measured of a shape: batches of decode steps, prompt lengths, (requests, in, out), contexts by KV
    format."""

    decode: tuple[int, ...] = ()
    decode_input: int = 512
    prefill: tuple[int, ...] = ()
    offline: tuple[int, int, int] | None = None
    contexts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    start: bool = False
    online: bool = False


BATCHES = (1, 8, 32, 64, 128, 256)
CASES = {
    "llama31-8b": Cases(BATCHES, 512, (1024, 8192, 32768), (1024, 512, 256), start=True, online=True),
    "llama31-8b-w4": Cases((1, 8, 32, 64, 256), 128),
    "llama2-13b": Cases(contexts={"no_quant": (1024, 8192, 32768, 70000), "int8": (70000, 260000), "int4": (280000,)}),
    "qwen25-7b": Cases(BATCHES, 512, (1024, 8192, 32768), (1024, 512, 256)),
    "tiny": Cases((1, 3), 9, (40,), (6, 8, 4), {"no_quant": (50, 90), "int8": (50,)}, start=True, online=True),
}

DECODE = {
    1: Target(3.52, 4.86, 4.15, 3.85), 8: Target(3.65, 5.13, 4.35, 4.0), 32: Target(4.07, 5.69, 4.9, 4.5),
    64: Target(4.63, 6.74, 5.6, 5.2), 128: Target(5.77, 8.66, 7.2, 6.7), 256: Target(9.36, 13.8, 11.5, 10.6),
}  # fmt: skip
"""Milliseconds of a decode step of llama31-8b by batch, 512 tokens in."""
PREFILL = {
    1024: Target(18.3, 32.3, 26.0, 22.0), 8192: Target(172.0, 207.0, 195.0, 185.0),
    32768: Target(1030.0, 1180.0, 1150.0, 1080.0),
}  # fmt: skip
"""Milliseconds of a prefill of llama31-8b by tokens, on an idle engine."""
DECODE_W4 = {
    1: Target(1.11, 4.85, 1.8, 1.5), 8: Target(1.16, 4.98, 2.0, 1.6), 32: Target(1.35, 5.36, 2.6, 2.1),
    64: Target(1.74, 6.0, 3.6, 2.9), 256: Target(6.3, 10.6, 9.8, 8.5),
}  # fmt: skip
"""Of llama31-8b-w4, 128 tokens in."""
CONTEXTS = {
    ("no_quant", 1024): Target(6.2, 8.04, 6.9), ("no_quant", 8192): Target(7.6, 9.51, 8.3),
    ("no_quant", 32768): Target(12.3, 14.1, 13.2), ("no_quant", 70000): Target(19.4, 20.0, 20.2),
    ("int8", 70000): Target(least=13.8), ("int4", 280000): Target(20.3, least=25.0),
}  # fmt: skip
"""Milliseconds a token of llama2-13b, batch 1, by KV format and context."""
QPS = {8: (39.0, 62.0, 5.2, 29.0), 16: (56.0, 90.0, 6.0, 37.0), 24: (96.0, 145.0, 8.6, 82.0)}
"""The peer's TTFT p50 and p90 and TBT p50 and p99 in milliseconds, 1,024 in, 128 out."""
TTFT_SHARE = {8: 0.75, 16: 0.65, 24: 0.65}
CARRIED_QPS = 17.5
"""What the peer carries at TTFT p90 <= 100 ms and TBT p99 <= 50 ms, by the lines between these levels."""
MEASURED_QPS = (8, 16, 20, 24, 26, 28, 30)
"""Levels at which all of these are found."""
TARGET_TTFT_MS = 95
"""Of the server that is measured once more, with a target for the first token: somewhat less than the limit."""
STREAMS = {32: 24.0, 128: 45.8, 256: 47.9}
"""The peer's requests a second in a closed loop, 512 in, 128 out."""


OURS = {"ours": "", "ours_target_ttft": f", --target_ttft_ms {TARGET_TTFT_MS}"}
"""This project's servers under load, and what tells the case of one from that of the other."""


def carried(name: str) -> str:
    """The case of the load that one of our servers carries within its limits."""
    return f"QPS at TTFT p90 100 ms, TBT p99 50 ms{OURS[name]}"


def online_targets() -> dict[str, Target]:
    """Goals under load: shares of the peer's figures."""
    found = {}
    for qps, (first, first_p90, between, between_p99) in QPS.items():
        found |= {
            f"{qps} QPS, TTFT p50": Target(peer=first, least=TTFT_SHARE[qps] * first),
            f"{qps} QPS, TTFT p90": Target(peer=first_p90),
            f"{qps} QPS, TBT p50": Target(peer=between, least=0.9 * between),
            f"{qps} QPS, TBT p99": Target(peer=between_p99, least=0.5 * between_p99),
        }
    found |= {carried(name): Target(peer=CARRIED_QPS, least=1.3 * CARRIED_QPS, aim=1.6 * CARRIED_QPS) for name in OURS}
    return found | {f"{count} streams": Target(peer=rate, least=1.2 * rate) for count, rate in STREAMS.items()}


FLOAT12 = "fp12_e4m7"
"""The KV format in 12 bits that loses nothing of a bfloat16 model but what float32 sums round to."""
STEPS = {f"decode step, batch {batch}": target for batch, target in DECODE.items()} | {
    "offline": Target(peer=10077, least=12000, aim=13500)
}

TARGETS: dict[str, dict[str, Target]] = {
    "llama31-8b": STEPS
    | {f"{case}, {FLOAT12}": target for case, target in STEPS.items()}
    | {f"prefill of {tokens}": target for tokens, target in PREFILL.items()}
    | {
        "host work, batch 256": Target(least=300, aim=150),
        "engine ready, warm": Target(peer=57, least=20, aim=12),
        "server ready, warm": Target(peer=94, least=20, aim=12),
    }
    | online_targets(),
    "llama31-8b-w4": {f"decode step, batch {batch}": target for batch, target in DECODE_W4.items()},
    "llama2-13b": {f"context of {tokens}, {kind}": target for (kind, tokens), target in CONTEXTS.items()},
}
"""By shape and the name of a case."""


@dataclass(frozen=True)
class Row:
    """A measured figure. peer: what was measured of a peer in the same run."""

    shape: str
    case: str
    unit: str
    value: float | None
    peer: float | None = None

    @property
    def target(self) -> Target:
        return TARGETS.get(self.shape, {}).get(self.case, Target())

    @property
    def least(self) -> float | None:
        """What is wanted at least: beside a peer of this run as large a share of its figure as of the kept one."""
        least, kept = self.target.least, self.target.peer
        return least if least is None or kept is None or self.peer is None else least / kept * self.peer

    @property
    def met(self) -> str:
        """Whether the measured figure reaches the least that is wanted; empty where one of them is missing."""
        if self.value is None or self.least is None:
            return ""
        more_is_better = self.unit.endswith("/s")
        return "yes" if (self.value >= self.least if more_is_better else self.value <= self.least) else "no"


COLUMNS = ("shape", "case", "unit", "floor", "vLLM, kept", "peer, this run", "at least", "aim", "measured", "met")


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- | --- | --- |" + " ---: |" * (len(COLUMNS) - 3)]
    for row in rows:
        target = row.target
        figures = (target.floor, target.peer, row.peer, row.least, target.aim, row.value)
        cells = [row.shape, row.case, row.unit, *map(number, figures), row.met]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three decimals of small figures, none of large ones; nothing for None."""
    if value is None:
        return ""
    return f"{value:.3f}".rstrip("0").rstrip(".") if value < 100 else f"{value:,.0f}"
