"""Parts of a self-contained HTML page for light and dark screens: its style, plots by layer, tables that sort."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

# Wide enough for the larger letters of a narrow screen.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 300, 96, 30, 20, 60

STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5b6675; --line: #d5dbe3; --back: #ffffff; --panel: #f5f7fa;
  --a: #0b6bcb; --b: #b4540a; --good: #14793e; --bad: #c1121f; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9f0; --soft: #9aa6b5; --line: #37414f; --back: #12161c;
  --panel: #1b212a; --a: #6cb2ff; --b: #f2a154; --good: #5bd08b; --bad: #ff7a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1360px; margin: 2rem auto;
  padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, li { margin: .25rem 0; max-width: 90ch; overflow-wrap: anywhere; }
ul { margin: .25rem 0; padding-left: 1.2rem; } .soft { color: var(--soft); }
.verdict { font-weight: 700; padding: .1rem .6rem; border-radius: .4rem; border: 2px solid; }
.good { color: var(--good); } .bad { color: var(--bad); }
.plots { display: flex; flex-wrap: wrap; gap: 1.25rem; }
figure { margin: 0; flex: 1 1 520px; min-width: 0; box-sizing: border-box;
 background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
  padding: .75rem; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--line); }
.bound { stroke: var(--bad); stroke-dasharray: 5 4; } svg text.bad { fill: var(--bad); }
.a { stroke: var(--a); fill: var(--a); } .b { stroke: var(--b); fill: var(--b); }
polyline { fill: none !important; stroke-width: 2; } polyline.a { stroke-width: 4; } .dashed { stroke-dasharray: 6 4; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .85rem; color: var(--soft); }
.key svg { width: 34px; height: 12px; display: inline-block; vertical-align: middle; margin-right: .35rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } .left { text-align: left; } summary { cursor: pointer; margin: .5rem 0; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--a); }
th button::after { content: " ↕"; } th[aria-sort=ascending] button::after { content: " ↑"; }
th[aria-sort=descending] button::after { content: " ↓"; }
.bar { display: inline-block; width: 5rem; height: .6rem; background: var(--line); border-radius: .2rem; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--good); } .bad .bar i { background: var(--bad); }
@media (max-width: 600px) { svg text { font-size: 20px; } body { padding: 0 .75rem; } }
td.made { white-space: pre-wrap; overflow-wrap: anywhere; } th { vertical-align: top; }
"""

SORTING = """<script>
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.rows[0].cells];
  const figure = (row, column) => {
    const cell = row.cells[column], text = cell.dataset.value ?? cell.textContent;
    const number = text === "–" ? -Infinity : Number.parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const sort = (head, column) => {
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.rows].slice(1).sort((a, b) => {
      const x = figure(a, column), y = figure(b, column);
      const order = typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? -1 : 1;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(head, column));
    head.replaceChildren(button);
  });
}
</script>
"""
"""At the end of a page: a click on a column's head sorts the tables of class `sorts` by it."""


def document(title: str, verdict: str, colour: str, body: str, style: str = "") -> str:
    """A whole page, whose head is its title and the verdict; `body` is HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {escape(verdict)}</title><style>{STYLE}{style}</style></head><body>
<h1>{escape(title)} <span class="verdict {colour}">{escape(verdict)}</span></h1>
{body}
</body></html>
"""


def facts(rows: Mapping[str, str]) -> str:
    """A table of names and what is said of each, as HTML."""
    cells = "".join(f'<tr><th class="left">{name}</th><td class="left made">{said}</td></tr>' for name, said in rows.items())
    return f'<div class="table"><table>{cells}</table></div>'


@dataclass(frozen=True)
class Line:
    """One line of a plot: values by layer, in colour "a" or "b"."""

    name: str
    colour: str
    dashed: bool
    values: dict[int, float]


def plot(
    title: str, lines: Sequence[Line], ticks: Sequence[tuple[float, str]], bound: tuple[float, str] | None, note: str = ""
) -> str:
    """A plot by layer, with its key.

    Args:
        note: how to read it.
        ticks: values and their words, the lowest and the highest first and last.
        bound: a value and its word, drawn across.
    """
    low, high = ticks[0][0], ticks[-1][0]
    layers = sorted({layer for line in lines for layer in line.values})
    span = max(len(layers) - 1, 1)

    def x(layer: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * layers.index(layer) / span

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (value - low) / (high - low))

    parts = []
    for value, label in ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
    for layer in layers[:: -(-len(layers) // 14)]:
        parts.append(f'<text x="{x(layer):.1f}" y="{_HEIGHT - 34}" text-anchor="middle">{layer}</text>')
    parts.append(f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">layer</text>')
    if bound:
        at = y(bound[0])
        parts.append(f'<line class="bound" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="bad" x="{_WIDTH - _RIGHT - 4}" y="{at - 5:.1f}" text-anchor="end">{bound[1]}</text>')
    for line in lines:
        parts += _drawn(line, x, y)
    key = "".join(
        f'<span><svg viewBox="0 0 34 12"><line class="{line.colour}{" dashed" * line.dashed}" x1="0" x2="34" y1="6" y2="6" '
        f'stroke-width="2.5"/></svg>{escape(line.name)}</span>'
        for line in lines
    )
    said = f'<p class="soft">{note}</p>' if note else ""
    return (
        f'<figure><figcaption>{title}</figcaption>{said}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}, by layer">{"".join(parts)}</svg><div class="key">{key}</div></figure>'
    )


# Closer to 0 than float64 can tell.
_FLOOR = 1e-16


def distances(title: str, lines: Sequence[Line], bound: float | None, word: str, note: str = "") -> str:
    """A plot of distances from 0 by layer, by their powers of ten."""

    def exponent(value: float) -> float:
        return math.log10(max(value, _FLOOR)) if math.isfinite(value) else math.nan

    drawn = [replace(line, values={at: exponent(value) for at, value in line.values.items()}) for line in lines]
    across = (exponent(bound), word) if bound is not None else None
    values = [value for line in drawn for value in line.values.values() if math.isfinite(value)]
    values += [across[0]] if across else [0.0] if not values else []  # where nothing is finite, an empty plot
    low, high = math.floor(min(values)), math.ceil(max(values) + 1e-9)
    step = max(1, -(-(high - low) // 6))
    return plot(title, drawn, [(float(e), f"1e{e}") for e in range(low, high + step, step)], across, note)


def _drawn(line: Line, x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
    points = [(layer, value) for layer, value in sorted(line.values.items()) if math.isfinite(value)]
    at = " ".join(f"{x(layer):.1f},{y(value):.1f}" for layer, value in points)
    parts = [f'<polyline class="{line.colour}{" dashed" * line.dashed}" points="{at}"/>']
    parts += [
        f'<circle class="{line.colour}" cx="{x(layer):.1f}" cy="{y(value):.1f}" r="3">'
        f"<title>{escape(line.name)}, layer {layer}: {value:.6g}</title></circle>"
        for layer, value in points
    ]
    parts += [
        f'<text class="bad" x="{x(layer):.1f}" y="{_TOP + 12}" text-anchor="middle">NaN</text>'
        for layer, value in line.values.items()
        if not math.isfinite(value)
    ]
    return parts


@dataclass(frozen=True)
class Bar:
    """A cell that shows a share as a bar and in percent; beyond 1 the bar is full."""

    share: float

    @property
    def drawn(self) -> str:
        share = self.share if math.isfinite(self.share) else 1.0
        words = f"{100 * self.share:.3g} %" if math.isfinite(self.share) else "beyond it"
        return f'<span class="bar"><i style="width:{100 * min(share, 1):.1f}%"></i></span> {words}'


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str | Bar]], left: int, bad: Sequence[bool] = (), sorts: bool = False
) -> str:
    """A table whose first `left` columns hold words.

    Args:
        bad: rows in which something is wrong; none unless given.
        sorts: a click on a column's head sorts it, on a page that ends with `SORTING`.
    """

    def cell(content: str | Bar, tag: str, place: int) -> str:
        left_class = " class=left" * (place < left)
        if isinstance(content, str):
            return f"<{tag}{left_class}>{escape(content)}</{tag}>"
        value = content.share if math.isfinite(content.share) else 1e308
        return f'<{tag} class="left" data-value="{value:.6g}">{content.drawn}</{tag}>'

    def cells(tag: str, row: Sequence[str | Bar]) -> str:
        return "".join(cell(content, tag, place) for place, content in enumerate(row))

    body = "".join(
        f"<tr{' class=bad' * wrong}>{cells('td', row)}</tr>"
        for row, wrong in zip(rows, bad or [False] * len(rows), strict=True)
    )
    head = f"<tr>{cells('th', columns)}</tr>"
    return f'<div class="table"><table{" class=sorts" * sorts}>{head}{body}</table></div>'
