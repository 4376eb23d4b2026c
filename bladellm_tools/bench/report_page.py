"""The style of the HTML report, and the pieces it is put together from. Nothing in it loads anything."""

from collections.abc import Sequence
from html import escape

from bladellm_tools.bench.plot_style import DARK, LIGHT, Chart, Theme

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser itself is told to load nothing."""


def variables(theme: Theme) -> str:
    """A theme's CSS variables."""
    return " ".join(f"{name}: {colour};" for name, colour in theme.variables.items())


COLOURS = f"""
:root {{ color-scheme: light dark; {variables(LIGHT)} --card: #f4f6f8; --warn: #fff1db; }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} --card: #1d2127; --warn: #3a2c12; }} }}
@media print {{ :root {{ {variables(LIGHT)} --card: #f4f6f8; --warn: #fff1db; }} }}
"""
STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.8rem, 3vw, 2.5rem); max-width: 1500px; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; margin: 0 0 0.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 0.8rem; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 0.5rem; }
p, ul { max-width: 75ch; }
.quiet { color: var(--limit); font-size: 0.9rem; }
.warnings { background: var(--warn); border-left: 4px solid var(--series1); padding: 0.6rem 1rem; border-radius: 4px; }
.warnings ul { margin: 0.3rem 0; padding-left: 1.2rem; max-width: none; overflow-wrap: anywhere; }
.headlines li { margin: 0.2rem 0; }
.charts { display: grid; gap: 1.2rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
.charts.main { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); max-width: 1300px; }
figure { margin: 0; padding: 0.6rem; background: var(--paper); border: 1px solid var(--quiet); border-radius: 8px;
  break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--limit); font-size: 0.85rem; margin-top: 0.4rem; }
.wide { overflow-x: auto; border: 1px solid var(--quiet); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.6rem; text-align: right; border-bottom: 1px solid var(--quiet); white-space: nowrap;
  vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { background: var(--card); font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
td.text { text-align: left; white-space: normal; min-width: 12rem; overflow-wrap: anywhere; }
td small { display: block; color: var(--limit); }
table.facts td:first-child { white-space: nowrap; width: 1%; }
details { margin: 0.8rem 0; }
summary { cursor: pointer; font-weight: 600; }
dt { font-weight: 600; margin-top: 0.6rem; }
dd { margin: 0 0 0 1rem; max-width: 75ch; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  .charts, .charts.main { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; border: 0; }
  table { font-size: 7.5pt; }
  th, td { padding: 0.15rem 0.3rem; white-space: normal; }
}
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole document."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<style>{COLOURS}{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def figures(charts: Sequence[Chart], kind: str = "") -> str:
    """Charts side by side as far as there is room."""
    cards = [f"<figure>{chart.svg}<figcaption>{escape(chart.caption)}</figcaption></figure>" for chart in charts]
    return f'<div class="charts {kind}">{"".join(cards)}</div>' if cards else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are HTML already; it scrolls by itself where the page is narrow."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(as_cell(cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def as_cell(html: str) -> str:
    """A cell; long text may wrap."""
    return f'<td class="text">{html}</td>' if len(html) > 40 and "<small>" not in html else f"<td>{html}</td>"


def facts(rows: dict[str, str]) -> str:
    """Names and values."""
    body = "".join(f'<tr><td>{escape(k)}</td><td class="text">{escape(v)}</td></tr>' for k, v in rows.items())
    return f'<div class="wide"><table class="facts"><tbody>{body}</tbody></table></div>'


def bullets(lines: Sequence[str], kind: str = "") -> str:
    """A list of sentences."""
    return f'<ul class="{kind}">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""
