"""A report as one self-contained HTML page: verdict, how it was made, plots by layer, stages with their bounds, every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import torch

from haarkv.validation.html import STYLE, Line, plot, table
from haarkv.validation.layers.judge import bounds_of
from haarkv.validation.layers.report import LayerRow, Mode, Report

FORCED: Mode = "teacher-forced"
FREE: Mode = "free-running"
# Closer to 1 than float64 can tell.
_FLOOR = 1e-16


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


def page(report: Report, about: About) -> str:
    """One self-contained HTML page, for light and dark screens. The same arguments give the same page."""
    title = f"{report.candidate} against {report.reference}"
    word, colour = ("passed", "good") if report.passed else ("failed", "bad")
    prompts = ", ".join(map(str, report.prompt_tokens))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {word}</title><style>{STYLE}</style></head><body>
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
        Line(f"{side}, {mode}", colour, mode == FREE, lowest(mode, figure))
        for mode in (FORCED, FREE)
        for side, colour, figure in (("K", "a", lambda row: row.k_match), ("V", "b", lambda row: row.v_match))
    ]
    least = min((v for line in lines for v in line.values.values() if math.isfinite(v)), default=0.0)
    bottom = next(low for low in (99.9, 99.0, 95.0, 90.0, 50.0, 0.0) if low <= least)
    ticks = [(bottom + (100 - bottom) * i / 5, f"{bottom + (100 - bottom) * i / 5:.5g} %") for i in range(6)]
    return plot("Levels of K and V that are equal", lines, ticks, None)


def _cosine_plot(report: Report) -> str:
    def exponent(row: LayerRow) -> float:
        return math.log10(max(1 - row.hidden_cos, _FLOOR)) if math.isfinite(row.hidden_cos) else math.nan

    lines = [
        Line(mode, colour, mode == FREE, _by_layer(report, mode, exponent)) for mode, colour in ((FORCED, "a"), (FREE, "b"))
    ]
    bound = math.log10(1 - bounds_of(getattr(torch, report.dtype)).cosine)
    values = [v for line in lines for v in line.values.values() if math.isfinite(v)] + [bound]
    low, high = math.floor(min(values)), math.ceil(max(values) + 1e-9)
    step = max(1, -(-(high - low) // 6))
    ticks = [(float(e), f"1e{e}") for e in range(low, high + step, step)]
    return plot("1 − lowest cosine of a token's hidden state", lines, ticks, (bound, "bound, teacher-forced"))


# -- Tables ----------------------------------------------------------------------------------------------------------------
def _stage_table(report: Report) -> str:
    rows = [
        [s.stage, f"{s.phase} {s.step}", "–" if s.layer is None else str(s.layer), f"{s.error:.2e}", f"{s.bound:.2e}"]
        for s in report.stages
    ]
    return table(["stage", "forward", "layer", "error", "bound"], rows, 2, [not s.error <= s.bound for s in report.stages])


def _logit_table(report: Report) -> str:
    rows = [
        [f"{r.phase} {r.step}", f"{r.cos:.8f}", f"{r.rel_l2:.2e}", f"{r.max_abs:.2e}", f"{r.same_token} of {r.sequences}"]
        for r in report.logits
    ]
    bad = [not math.isfinite(r.cos) for r in report.logits]
    return table(["forward", "lowest cosine", "rel. L2", "max abs", "same next token"], rows, 1, bad)


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
    return table(columns, rows, 2, [not r.passed for r in report.rows])
