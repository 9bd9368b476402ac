"""A report as one self-contained HTML page: verdict and reason, what was run, plots by layer, every tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from haarkv.tq_ops.words import counted
from haarkv.validation.html import SORTING, Bar, Line, distances, document, facts, plot, table
from haarkv.validation.layers.report import LayerRow, Mode, Report, row_cells

_WORDS: Mapping[Mode, str] = {"teacher-forced": "each layer alone", "free-running": "layers in a row"}


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
    word, colour = ("passed", "good") if report.passed else ("failed", "bad")
    body = f"""{_reason(report)}
<h2>What was run</h2>
{facts(_facts(report, about))}
<h2>By layer, the worst of all forwards</h2>
<p class="soft">Each layer alone (teacher-forced): it gets the reference's input and cache, so a bad point is that layer's own
fault. Layers in a row (free-running): each gets what the executor made of the one before, so errors add up.</p>
<div class="plots">{_share_plot(report)}{_match_plot(report)}{_cosine_plot(report)}</div>
<h2>Tensors, each layer alone</h2>
<p class="soft">The worst figure of each op's result over all forwards, as a share of what honest runs of the reference allow:
beyond 100 % it is a fault. Click on a column's head to sort.</p>
{_tensor_table(report)}
<h2>Logits, layers in a row</h2>
{_logit_table(report)}
{_sums(report)}
<details><summary>Every row</summary>{_row_table(report)}</details>
{SORTING}"""
    return document(f"{report.candidate} against {report.reference}", word, colour, body)


def _reason(report: Report) -> str:
    """Why it passed or failed, and what that does not cover."""
    found = report.first_divergence
    if found is None:
        said = "<p>No fault: every bit is equal.</p>" if report.passed else "<p class=bad>Something was not compared.</p>"
        return said + _unexercised(report)
    where = escape(f"layer {found.layer}, {found.stage}" if found.layer is not None else found.stage)
    head = f" (KV head {found.head})" if found.head is not None else ""
    if found.fails:
        said = f'<p>First fault: <strong class="bad">{where}: {found.reason}</strong>{head} in '
    else:
        said = f"<p><strong>No fault.</strong> First difference: {where}: {found.reason}, no fault{head}, in "
    said += f"{found.phase} {found.step}.</p><p class='soft'>{escape(found.detail)}</p>"
    return said + _unexercised(report)


def _unexercised(report: Report) -> str:
    listed = "".join(f"<li>{escape(what)}</li>" for what in report.beyond)
    return f"<p><strong>Not exercised</strong>, so the verdict says nothing of it:</p><ul>{listed}</ul>"


# Characters of a prompt that the page shows.
_SHOWN = 200


def _facts(report: Report, about: About) -> dict[str, str]:
    def listed(found: Mapping[str, str]) -> str:
        return escape(", ".join(f"{name} {value}" for name, value in found.items()))

    prompts = "".join(
        f"<div><code>{escape(text[:_SHOWN])}{'…' * (len(text) > _SHOWN)}</code> ({counted(tokens, 'token')})</div>"
        for text, tokens in zip((" ".join(text.split()) for text in about.prompts), report.prompt_tokens, strict=True)
    )
    steps = counted(report.steps, "decode step")
    return {
        "executor": escape(f"{report.candidate}, compared with {report.reference}"),
        "model": escape(f"{about.model} in {report.dtype}, KV cache {report.kv}; {steps}"),
        "command": f"<code>{escape(about.command)}</code>", "prompts": prompts,
        "versions": listed(about.versions), "machine": listed(about.machine), "date": escape(about.date),
    }  # fmt: skip


# -- Plots -----------------------------------------------------------------------------------------------------------------
def _lines(report: Report, colour: str, name: str, figure: Callable[[LayerRow], float | None]) -> list[Line]:
    """In each mode the largest figure of each layer that has one; NaN if one is."""
    lines = []
    for mode, words in _WORDS.items():
        found: dict[int, list[float]] = {}
        for row in report.rows:
            if row.mode == mode and (value := figure(row)) is not None:
                found.setdefault(row.layer, []).append(value)
        worst = {layer: math.nan if any(map(math.isnan, values)) else max(values) for layer, values in found.items()}
        lines.append(Line(f"{name}, {words}" if name else words, colour, mode == "free-running", worst))
    return lines


def _match_plot(report: Report) -> str:
    lines = [
        Line(line.name, line.colour, line.dashed, {layer: 100 * (1 - worst) for layer, worst in line.values.items()})
        for line in (
            *_lines(report, "a", "K", lambda row: None if row.k_match is None else 1 - row.k_match),
            *_lines(report, "b", "V", lambda row: None if row.v_match is None else 1 - row.v_match),
        )
    ]  # fmt: skip
    least = min((v for line in lines for v in line.values.values() if math.isfinite(v)), default=0.0)
    bottom = next(low for low in (99.9, 99.0, 95.0, 90.0, 50.0, 0.0) if low <= least)
    ticks = [(bottom + (100 - bottom) * i / 5, f"{bottom + (100 - bottom) * i / 5:.5g} %") for i in range(6)]
    note = "How many of the stored levels are the reference's. 100 % is best; a few less are ties, which rounding makes."
    return plot("Levels of K and V that are equal", lines, ticks, None, note)


def _cosine_plot(report: Report) -> str:
    forced, free = _lines(report, "a", "", lambda row: 1 - row.hidden_cos)
    free = Line(free.name, "b", free.dashed, free.values)
    note = "How far the hidden state points away from the reference's. Lower is better."
    return distances("1 − lowest cosine of a token's hidden state", [forced, free], None, "", note)


def _share_plot(report: Report) -> str:
    forced, free = _lines(report, "a", "", lambda row: row.share)
    free = Line(free.name, "b", free.dashed, free.values)
    note = "The worst figure of each layer, as a share of what honest runs allow; above the red line it is a fault."
    return distances("Share of what honest runs allow", [forced, free], 1.0, "a fault from here on", note)


# -- Tables ----------------------------------------------------------------------------------------------------------------
def _tensor_table(report: Report) -> str:
    rows: list[list[str | Bar]] = [
        [s.stage, "–" if s.layer is None else str(s.layer), s.reason or "equal", Bar(s.share), f"{s.phase} {s.step}"]
        for s in report.tensors
    ]
    columns = ["tensor", "layer", "found", "of what is allowed", "forward"]
    return table(columns, rows, 4, [s.fails or not s.share <= 1 for s in report.tensors], sorts=True)


def _sums(report: Report) -> str:
    """Figures of the whole run."""
    if not report.tests:
        return ""
    rows: list[list[str | Bar]] = [
        [f"{t.stage}, {t.figure}", t.drive, str(t.layer), "all" if t.head < 0 else str(t.head), Bar(t.share)]
        for t in report.tests
    ]
    columns = ["figure", "of", "layer", "KV head", "of what is allowed"]
    bad = [not t.share <= 1 for t in report.tests]
    return f"<details><summary>Every figure over all forwards together</summary>{table(columns, rows, 2, bad, True)}</details>"


def _logit_table(report: Report) -> str:
    rows = [
        [f"{r.phase} {r.step}", f"{r.cos:.8f}", f"{r.rel_l2:.2e}", f"{r.max_abs:.2e}", f"{r.same_token} of {r.predictions}"]
        for r in report.logits
    ]
    bad = [not math.isfinite(r.cos) for r in report.logits]
    return table(["forward", "lowest cosine", "rel. L2", "max abs", "same next token"], rows, 1, bad)


def _row_table(report: Report) -> str:
    rows = [row_cells(row) for row in report.rows]
    cells = [list(row.values()) for row in rows]
    return table(list(rows[0]) if rows else [], cells, 2, [not row.passed for row in report.rows], sorts=True)
