"""Pieces of the page: its style, a plot of times by context with both axes in powers, and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 320, 58, 14, 14, 42
_STEPS = (1, 2, 5)

STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5b6675; --line: #d5dbe3; --back: #fff; --panel: #f5f7fa;
  --ours: #0b6bcb; --peer: #b4540a; --copy: #14793e; --predicted: #7a3fb8; --bad: #c1121f; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9f0; --soft: #9aa6b5; --line: #37414f; --back: #12161c;
  --panel: #1b212a; --ours: #6cb2ff; --peer: #f2a154; --copy: #5bd08b; --predicted: #c79bff; --bad: #ff7a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1280px;
  margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; max-width: 95ch; } .soft, th { color: var(--soft); }
.bad { color: var(--bad); }
.plots { display: flex; flex-wrap: wrap; gap: 1.25rem; }
figure { margin: 0; flex: 1 1 340px; max-width: 620px; background: var(--panel); border: 1px solid var(--line);
  border-radius: .5rem; padding: .75rem; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 2.5; }
.ours { --c: var(--ours); } .peer { --c: var(--peer); } .copy { --c: var(--copy); } .predicted { --c: var(--predicted); }
polyline, .mark { stroke: var(--c); } .dot { fill: var(--c); } .mark { fill: none; stroke-width: 2.5; }
.copy polyline { stroke-dasharray: 6 4; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .85rem; } .key b { color: var(--c); }
.table { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.left, th.left { text-align: left; white-space: normal; } th { font-weight: 600; } tr.ours td { font-weight: 600; }
"""


@dataclass(frozen=True)
class Series:
    """Times by context.

    Attributes:
        kind: `ours`, `peer`, `copy` or `predicted`, which chooses colour and form; predictions are marks without a line.
        points: context -> microseconds.
    """

    name: str
    kind: str
    points: Mapping[int, float]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers 1, 2, 5, 10 … that enclose a range of positive numbers."""
    numbers = [step * 10.0**power for power in range(-6, 10) for step in _STEPS]
    begin = max(index for index, number in enumerate(numbers) if number <= low)
    end = min(index for index, number in enumerate(numbers) if number >= high)
    return numbers[begin : end + 1]


def plot(title: str, series: Sequence[Series]) -> str:
    """A figure with its key; both axes are logarithmic. Empty series are left out, and of nothing there is no figure."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    contexts = sorted({context for one in series for context in one.points})
    every = [us for one in series for us in one.points.values()]
    marks = ticks(min(every), max(every))

    def x(context: float) -> float:
        span = math.log(contexts[-1] / contexts[0]) or 1.0
        return _LEFT + 20 + (_WIDTH - _LEFT - _RIGHT - 40) * math.log(context / contexts[0]) / span

    def y(us: float) -> float:
        span = math.log(marks[-1] / marks[0]) or 1.0
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - math.log(us / marks[0]) / span)

    parts = []
    for mark in marks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for context in contexts:
        parts.append(f'<text x="{x(context):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{context:,}</text>')
    parts.append(f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 5}" text-anchor="middle">context, tokens</text>')
    parts.append(f'<text x="12" y="{_HEIGHT / 2}" transform="rotate(-90 12 {_HEIGHT / 2})" text-anchor="middle">µs</text>')
    for one in series:
        points = sorted(one.points.items())
        group = []
        if one.kind != "predicted":
            at = " ".join(f"{x(context):.1f},{y(us):.1f}" for context, us in points)
            group.append(f'<polyline points="{at}"/>')
        for context, us in points:
            form = 'class="mark" r="6"' if one.kind == "predicted" else 'class="dot" r="3.5"'
            label = f"<title>{escape(one.name)}, {context:,} tokens: {us:,.1f} µs</title>"
            group.append(f'<circle {form} cx="{x(context):.1f}" cy="{y(us):.1f}">{label}</circle>')
        parts.append(f'<g class="{one.kind}">{"".join(group)}</g>')
    signs = {"predicted": "○", "copy": "╌"}
    key = "".join(f'<span class="{one.kind}"><b>{signs.get(one.kind, "●")}</b> {escape(one.name)}</span>' for one in series)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg><div class="key">{key}</div></figure>'
    )


def table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], left: int = 1) -> str:
    """A table.

    Args:
        rows: each a class for its style, or "", and its cells.
        left: so many columns hold words.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=left' * (index < left)}>{escape(cell)}</{tag}>" for index, cell in enumerate(row))

    body = "".join(f'<tr class="{kind}">{cells("td", row)}</tr>' for kind, row in rows)
    return f'<div class="table"><table><tr>{cells("th", columns)}</tr>{body}</table></div>'
