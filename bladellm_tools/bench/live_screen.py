"""Draws the live view on the terminal of standard error, from lines of JSON on standard input. A process of its own."""

import json
import sys
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LEAST_SHARE = 1e-3


def main() -> None:
    """Draw until the input ends."""
    console = Console(stderr=True, highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for line in sys.stdin:
            message = json.loads(line)
            if "line" in message:
                console.print(Text(message["line"]), soft_wrap=True)
            else:
                live.update(picture(message), refresh=True)


def picture(state: dict[str, Any]) -> Group:
    """The level, how far it is, and its rolling figures."""
    head = Text.assemble(
        (state["endpoint"], "bold"), "  ", (state["level"], "bold cyan"), "  ", (state["run"], "dim"),
        f"  {state['seconds']:,.0f} s",
    )  # fmt: skip
    progress = ProgressBar(total=max(state["planned"], state["ended"], 1), completed=state["ended"], width=50)
    return Group(head, progress, figures(state))


def figures(state: dict[str, Any]) -> Table:
    """Two columns of counts and latencies."""
    table = Table.grid(padding=(0, 2))
    failed = Text(f"{state['failed']} failed", style="bold red" if state["failed"] else "dim")
    in_flight = state["sent"] - state["ended"]
    table.add_row("requests", f"{state['ended']} of {state['planned']} ended", f"{in_flight} in flight", failed)
    table.add_row("TTFT", *latency(state["ttft"]), Text("last 200", style="dim"))
    table.add_row("TBT", *latency(state["tbt"]), Text("last 200, mean of a request", style="dim"))
    if "client" in state:
        share = max(state["client"], LEAST_SHARE)
        text = f"{share:.0%} of a core, headroom {1 / share:.0f}×"
        table.add_row("client", Text(text, style="" if share < 0.5 else "bold yellow"))
    return table


def latency(values: list[float]) -> tuple[str, str]:
    """p50 and p99."""
    if not values:
        return ("p50 -", "p99 -")
    return (f"p50 {values[0] * 1e3:,.1f} ms", f"p99 {values[1] * 1e3:,.1f} ms")


if __name__ == "__main__":
    main()
