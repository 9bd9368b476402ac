"""A report as one self-contained HTML page: verdict, how it was made, plots by layer, stages with their bounds, every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import torch

from haarkv.validation.layers.judge import bounds_of
from haarkv.validation.layers.report import LayerRow, Mode, Report

FORCED: Mode = "teacher-forced"
FREE: Mode = "free-running"
# Closer to 1 than float64 can tell.
_FLOOR = 1e-16
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 280, 66, 14, 14, 40

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5b6675; --line: #d5dbe3; --back: #ffffff; --panel: #f5f7fa;
  --a: #0b6bcb; --b: #b4540a; --good: #14793e; --bad: #c1121f; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9f0; --soft: #9aa6b5; --line: #37414f; --back: #12161c;
  --panel: #1b212a; --a: #6cb2ff; --b: #f2a154; --good: #5bd08b; --bad: #ff7a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1360px; margin: 2rem auto;
  padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; max-width: 90ch; } .soft { color: var(--soft); }
.verdict { font-weight: 700; padding: .1rem .6rem; border-radius: .4rem; border: 2px solid; }
.good { color: var(--good); } .bad { color: var(--bad); }
.plots { display: flex; flex-wrap: wrap; gap: 1.25rem; }
figure { margin: 0; flex: 1 1 520px; background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
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
td.made { white-space: pre-wrap; overflow-wrap: anywhere; } th { vertical-align: top; }
"""


@dataclass(frozen=True)
class About:
    """How a report was made.

    Attributes:
        command: as it was typed.
        versions, machine: by name.
        date: of the run, with its time zone.
    """

    model: str
    command: str
    prompts: Sequence[str]
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    date: str


@dataclass(frozen=True)
class _Line:
    """One line of a plot: values by layer, in colour "a" or "b"."""

    name: str
    colour: str
    dashed: bool
    values: dict[int, float]


def page(report: Report, about: About) -> str:
    """One self-contained HTML page, for light and dark screens. The same arguments give the same page."""
    title = f"{report.candidate} against {report.reference}"
    word, colour = ("passed", "good") if report.passed else ("failed", "bad")
    prompts = ", ".join(map(str, report.prompt_tokens))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {word}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)} <span class="verdict {colour}">{word}</span></h1>
<p class="soft">{escape(about.model)} in {escape(report.dtype)}, KV cache {escape(report.kv)}; prompts of {prompts} tokens,
{report.steps} decode step{"s" * (report.steps != 1)}.</p>
{_first_divergence(report)}
<h2>How it was made</h2>
{_about_table(about, report)}
<h2>By layer, the worst of all forwards</h2>
<div class="plots">{_match_plot(report)}{_cosine_plot(report)}</div>
<p class="soft">Teacher-forced: each layer gets the reference's input and cache, so a bad point is that layer's own fault.
Free-running: each layer gets what the executor made of the layer before, so errors add up.</p>
<h2>Stages, teacher-forced: the largest error beside its bound</h2>
{_stage_table(report)}
<h2>Logits, free-running</h2>
{_logit_table(report)}
<details><summary>Every row</summary>{_row_table(report)}</details>
</body></html>
"""


def _first_divergence(report: Report) -> str:
    found = report.first_divergence
    if found is None:
        return "<p>Every bit is equal.</p>"
    where = f"layer {found.layer}, {found.stage}" if found.layer is not None else found.stage
    colour = "bad" if found.reason == "fault" else ""
    return (
        f'<p>First divergence: <strong class="{colour}">{escape(where)}: {found.reason}</strong> '
        f"in {found.phase} {found.step}.</p><p class='soft'>{escape(found.detail)}</p>"
    )


# Characters of a prompt that the page shows.
_SHOWN = 200


def _about_table(about: About, report: Report) -> str:
    def listed(facts: Mapping[str, str]) -> str:
        return escape(", ".join(f"{name} {value}" for name, value in facts.items()))

    prompts = "".join(
        f"<div><code>{escape(text[:_SHOWN])}{'…' * (len(text) > _SHOWN)}</code> ({tokens} tokens)</div>"
        for text, tokens in zip(about.prompts, report.prompt_tokens, strict=True)
    )
    rows = (
        ("model", escape(about.model)), ("command", f"<code>{escape(about.command)}</code>"), ("prompts", prompts),
        ("versions", listed(about.versions)), ("machine", listed(about.machine)), ("date", escape(about.date)),
    )  # fmt: skip
    cells = "".join(f'<tr><th class="left">{name}</th><td class="left made">{value}</td></tr>' for name, value in rows)
    return f'<div class="table"><table>{cells}</table></div>'


# -- Plots -----------------------------------------------------------------------------------------------------------------
def _by_layer(report: Report, mode: Mode, figure: Callable[[LayerRow], float]) -> dict[int, float]:
    """The largest figure of each layer; NaN if one is."""
    found: dict[int, list[float]] = {}
    for row in report.rows:
        if row.mode == mode:
            found.setdefault(row.layer, []).append(figure(row))
    return {layer: math.nan if any(map(math.isnan, values)) else max(values) for layer, values in found.items()}


def _match_plot(report: Report) -> str:
    def lowest(mode: Mode, figure: Callable[[LayerRow], float]) -> dict[int, float]:
        return {layer: -100 * worst for layer, worst in _by_layer(report, mode, lambda row: -figure(row)).items()}

    lines = [
        _Line(f"{side}, {mode}", colour, mode == FREE, lowest(mode, figure))
        for mode in (FORCED, FREE)
        for side, colour, figure in (("K", "a", lambda row: row.k_match), ("V", "b", lambda row: row.v_match))
    ]
    least = min((v for line in lines for v in line.values.values() if math.isfinite(v)), default=0.0)
    bottom = next(low for low in (99.9, 99.0, 95.0, 90.0, 50.0, 0.0) if low <= least)
    ticks = [(bottom + (100 - bottom) * i / 5, f"{bottom + (100 - bottom) * i / 5:.5g} %") for i in range(6)]
    return _plot("Levels of K and V that are equal", lines, ticks, None)


def _cosine_plot(report: Report) -> str:
    def exponent(row: LayerRow) -> float:
        return math.log10(max(1 - row.hidden_cos, _FLOOR)) if math.isfinite(row.hidden_cos) else math.nan

    lines = [
        _Line(mode, colour, mode == FREE, _by_layer(report, mode, exponent)) for mode, colour in ((FORCED, "a"), (FREE, "b"))
    ]
    bound = math.log10(1 - bounds_of(getattr(torch, report.dtype)).cosine)
    values = [v for line in lines for v in line.values.values() if math.isfinite(v)] + [bound]
    low, high = math.floor(min(values)), math.ceil(max(values) + 1e-9)
    step = max(1, -(-(high - low) // 6))
    ticks = [(float(e), f"1e{e}") for e in range(low, high + step, step)]
    return _plot("1 − lowest cosine of a token's hidden state", lines, ticks, (bound, "bound, teacher-forced"))


def _plot(title: str, lines: Sequence[_Line], ticks: Sequence[tuple[float, str]], bound: tuple[float, str] | None) -> str:
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
        parts.append(f'<text x="{x(layer):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{layer}</text>')
    parts.append(f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 3}" text-anchor="middle">layer</text>')
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
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}, by layer">{"".join(parts)}</svg><div class="key">{key}</div></figure>'
    )


def _drawn(line: _Line, x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
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


# -- Tables ----------------------------------------------------------------------------------------------------------------
def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, bad: Sequence[bool]) -> str:
    """A table whose first `left` columns hold words."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=left' * (i < left)}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr{' class=bad' * wrong}>{cells('td', row)}</tr>" for row, wrong in zip(rows, bad, strict=True))
    return f'<div class="table"><table><tr>{cells("th", columns)}</tr>{body}</table></div>'


def _stage_table(report: Report) -> str:
    rows = [
        [s.stage, f"{s.phase} {s.step}", "–" if s.layer is None else str(s.layer), f"{s.error:.2e}", f"{s.bound:.2e}"]
        for s in report.stages
    ]
    return _table(["stage", "forward", "layer", "error", "bound"], rows, 2, [not s.error <= s.bound for s in report.stages])


def _logit_table(report: Report) -> str:
    rows = [
        [f"{r.phase} {r.step}", f"{r.cos:.8f}", f"{r.rel_l2:.2e}", f"{r.max_abs:.2e}", f"{r.same_token} of {r.sequences}"]
        for r in report.logits
    ]
    bad = [not math.isfinite(r.cos) for r in report.logits]
    return _table(["forward", "lowest cosine", "rel. L2", "max abs", "same next token"], rows, 1, bad)


def _row_table(report: Report) -> str:
    columns = [
        "forward", "mode", "layer", "K %", "V %", "unexplained", "scale", "cosine", "rel. L2", "max abs", "of the update",
    ]  # fmt: skip
    rows = [
        [
            f"{r.phase} {r.step}", r.mode, str(r.layer),
            f"{100 * r.k_match:.3f}", f"{100 * r.v_match:.3f}", str(r.unexplained), f"{r.scale_err:.1e}",
            f"{r.hidden_cos:.9f}", f"{r.rel_l2:.2e}", f"{r.max_abs:.2e}", f"{r.update_err:.2e}",
        ]
        for r in report.rows
    ]  # fmt: skip
    return _table(columns, rows, 2, [not r.passed for r in report.rows])
