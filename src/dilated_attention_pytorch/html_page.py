"""Self-contained HTML pages of tables and charts, light or dark as the reader's system is."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MISSING = "\u2013"
"""Cell of a value that is not there."""
COLORS = ("#3b82f6", "#f97316", "#10b981", "#e11d48", "#a855f7", "#ca8a04", "#06b6d4", "#84cc16")
"""Line colours, in the order of use."""
LAYOUT: Mapping[str, Any] = {
    "height": 320,
    "margin": {"l": 56, "r": 12, "t": 8, "b": 40},
    "hovermode": "x unified",
    "showlegend": True,
    "legend": {"orientation": "h", "y": -0.25},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hoverlabel": {"namelength": -1},
}
"""Plotly layout shared by all charts, without their axes."""


class Html(str):
    """A cell that is HTML and no text."""

    __slots__ = ()


def page(title: str, parts: Iterable[str]) -> str:
    """A page of HTML fragments below a heading, with plotly's script in it."""
    from plotly.offline import get_plotlyjs

    title = html.escape(title)
    begin = f"{_HEAD.replace('TITLE', title)}<script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>"
    return "".join((begin, *parts, f"<script>{_PAINT}</script></body></html>\n"))


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of named rows. The heads of its columns are HTML, names and cells are text but for :class:`Html`."""
    columns = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{_cell(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f"<div class=table><table><thead><tr><td></td>{columns}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(value: str) -> str:
    return value if isinstance(value, Html) else html.escape(value)


def drawn(figure: Figure, name: str, title: str) -> str:
    """A chart below a heading, with the element id ``chart-NAME``."""
    config = {"responsive": True, "displayModeBar": False}
    chart: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"chart-{name}", config=config)
    return f"<section><h3>{html.escape(title)}</h3>{chart}</section>"


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --page: #fff; --text: #1f2937; --faint: #6b7280; --line: #d1d5db; --head: #f3f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --page: #111827; --text: #e5e7eb; --faint: #9ca3af; --line: #374151; --head: #1f2937; }
}
/* A chart is drawn as wide as its section is then: no section or scroll bar that comes later may change that. */
html { overflow-y: scroll }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; font: 16px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--page); }
h1 { font-size: 1.5rem; margin: 0 0 .5rem } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0 } p, small { color: var(--faint) }
main { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr)) }
section { min-width: 0 }
.table { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  min-width: 5.5rem }
tbody th { text-align: left; font-weight: 400; color: var(--faint); position: sticky; left: 0; background: var(--page) }
thead { background: var(--head) } tbody tr:last-child > * { border-bottom: 0 } td { overflow-wrap: break-word }
i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em }
</style>
"""

_PAINT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name);
  const axis = {gridcolor: color("--line"), linecolor: color("--line"), zerolinecolor: color("--line")};
  for (const chart of document.querySelectorAll(".plotly-graph-div")) {
    const values = {"font.color": color("--text"), "hoverlabel.bgcolor": color("--page"), "hoverlabel.bordercolor":
      color("--line"), "hoverlabel.font.color": color("--text")};
    for (const which of ["xaxis", "yaxis"])
      for (const [name, value] of Object.entries(axis)) values[`${which}.${name}`] = value;
    Plotly.relayout(chart, values);
  }
}
dark.addEventListener("change", paint);
paint();
"""
"""Recolours the charts when the reader switches between light and dark mode."""
