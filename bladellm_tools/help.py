"""A command's help page: flags in groups, whole names at any width; panels on a terminal, plain text in a pipe."""

import shutil
import sys
import textwrap
from typing import Any

from typer.core import TyperCommand

from bladellm_tools.console import is_terminal

NAME_COLUMN = 30
MIN_WIDTH, MAX_WIDTH = 50, 110
Entry = tuple[str, str, str]
"""Spellings, value, explanation."""


class HelpfulCommand(TyperCommand):
    """A typer command with this module's help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page; nothing goes through typer's own formatter."""
        groups: dict[str, list[Entry]] = {}
        for param in self.get_params(ctx):
            title = getattr(param, "rich_help_panel", None) or "Help"
            names = sorted(param.opts, key=lambda name: not name.startswith("--"))  # click's order of help's varies
            entry = (", ".join(names), param.metavar or "", getattr(param, "help", None) or "")
            groups.setdefault(title, []).append(entry)
        width = page_width()
        head = f"Usage: {ctx.command_path} [FLAGS]\n\n{textwrap.fill(self.help or '', width - 1)}\n"
        if is_terminal(sys.stdout):
            print_panels(head, groups, width)
        else:
            print(head)
            for title, entries in groups.items():
                print(f"{title}:\n{layout(entries, width - 2, '  ')}\n")


def page_width() -> int:
    """Columns of a help page: the terminal's, within reason."""
    return min(max(shutil.get_terminal_size().columns, MIN_WIDTH), MAX_WIDTH)


def layout(entries: list[Entry], width: int, indent: str = "", column: int = NAME_COLUMN) -> str:
    """Flags to the left, wrapped explanations from `column` on; a long flag has a line of its own."""
    lines = []
    for names, value, text in entries:
        left = f"{names} {value}".strip()
        wrapped = textwrap.wrap(text, width - column) or [""]
        if len(left) > column - 2:
            lines += textwrap.wrap(left, width, subsequent_indent=" " * 4, break_on_hyphens=False)
        else:
            wrapped[0] = f"{left:<{column}}{wrapped[0]}"
        first = 1 if len(left) <= column - 2 else 0
        lines += wrapped[:first] + [" " * column + line for line in wrapped[first:]]
    return "\n".join(indent + line.rstrip() for line in lines)


def print_panels(head: str, groups: dict[str, list[Entry]], width: int) -> None:
    """The same page with a frame round each group and the flags in colour (rich honours NO_COLOR)."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(width=width, highlight=False)
    console.print(Text(head))
    for title, entries in groups.items():
        body = Text(layout(entries, width - 4))
        body.highlight_regex(r"(?m)^-\S+", "bold cyan")
        console.print(Panel(body, title=title, title_align="left", border_style="dim"))
