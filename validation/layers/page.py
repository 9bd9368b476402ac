"""A report as one self-contained HTML page: verdict and reason, what was run, a plot by layer, every tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from haarkv.tq_ops.errors import count_noun
from haarkv.validation.layers.report import Mode, Report


@dataclass(frozen=True)
class About:
    """How a report was made; `command` as it was typed, versions and machine by name, `date` with its time zone."""

    model: str
    command: str
    prompts: Sequence[str]
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    date: str


_STYLE = """
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
figure { margin: 0; max-width: 760px; box-sizing: border-box; background: var(--panel); border: 1px solid var(--line);
  border-radius: .5rem; padding: .75rem; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--line); }
.bound { stroke: var(--bad); stroke-dasharray: 5 4; } svg text.bad { fill: var(--bad); }
.a { stroke: var(--a); fill: var(--a); } .b { stroke: var(--b); fill: var(--b); }
polyline { fill: none !important; stroke-width: 2; } polyline.a { stroke-width: 4; }
.key { font-size: .85rem; } .key .a { color: var(--a); } .key .b { color: var(--b); }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: top; } .left { text-align: left; }
td.said { white-space: pre-wrap; overflow-wrap: anywhere; }
.bar { display: inline-block; width: 5rem; height: .6rem; background: var(--line); border-radius: .2rem; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--good); } .bad .bar i { background: var(--bad); }
@media (max-width: 600px) { svg text { font-size: 20px; } body { padding: 0 .75rem; } }
"""


def page(report: Report, about: About) -> str:
    """One self-contained HTML page, for light and dark screens. The same arguments give the same page."""
    word, colour = ("passed", "good") if report.passed else ("failed", "bad")
    title = escape(f"{report.candidate} against {report.reference}")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: {word}</title><style>{_STYLE}</style></head><body>
<h1>{title} <span class="verdict {colour}">{word}</span></h1>
{_reason(report)}
<h2>What was run</h2>
{_facts(report, about)}
<h2>By layer, the worst of all forwards</h2>
<p class="soft">Each layer alone (teacher-forced): it gets the reference's input and cache, so a bad point is that layer's own
fault. Layers in a row (free-running): each gets what the executor made of the one before, so errors add up.</p>
{_plot(report)}
<h2>Tensors, each layer alone</h2>
<p class="soft">The worst figure of each op's result over all forwards, as a share of what honest runs of the reference allow:
beyond 100 % it is a fault. The nearest to it stand first.</p>
{_tensor_table(report)}
<h2>Logits, layers in a row</h2>
{_logit_table(report)}
</body></html>
"""


def _reason(report: Report) -> str:
    """Why it passed or failed, and what that does not cover."""
    divergence = report.first_divergence
    if divergence is None:
        verdict_html = (
            "<p>No fault: every bit is equal.</p>" if report.passed else "<p class=bad>Something was not compared.</p>"
        )
    else:
        where = escape(divergence.where)
        head = f" (KV head {divergence.head})" if divergence.head is not None else ""
        if divergence.fails:
            verdict_html = f'<p>First fault: <strong class="bad">{where}: {divergence.reason}</strong>{head} in '
        else:
            verdict_html = f"<p><strong>No fault.</strong> First difference: {where}: {divergence.reason}, no fault{head}, in "
        verdict_html += f"{divergence.phase} {divergence.step}.</p><p class='soft'>{escape(divergence.detail)}</p>"
    items_html = "".join(f"<li>{escape(what)}</li>" for what in report.beyond)
    return f"{verdict_html}<p><strong>Not exercised</strong>, so the verdict says nothing of it:</p><ul>{items_html}</ul>"


# Characters of a prompt that the page shows.
_MAX_PROMPT = 200


def _facts(report: Report, about: About) -> str:
    def version_list(entries: Mapping[str, str]) -> str:
        return escape(", ".join(f"{name} {value}" for name, value in entries.items()))

    prompts = "".join(
        f"<div><code>{escape(text[:_MAX_PROMPT])}{'…' * (len(text) > _MAX_PROMPT)}</code> ({count_noun(n, 'token')})</div>"
        for text, n in zip((" ".join(text.split()) for text in about.prompts), report.prompt_tokens, strict=True)
    )
    steps = count_noun(report.steps, "decode step")
    rows = {
        "executor": escape(f"{report.candidate}, compared with {report.reference}"),
        "model": escape(f"{about.model} in {report.dtype}, KV cache {report.kv}; {steps}"),
        "command": f"<code>{escape(about.command)}</code>", "prompts": prompts,
        "versions": version_list(about.versions), "machine": version_list(about.machine), "date": escape(about.date),
    }  # fmt: skip
    cells = "".join(
        f'<tr><th class="left">{name}</th><td class="left said">{value_html}</td></tr>' for name, value_html in rows.items()
    )
    return f'<div class="table"><table>{cells}</table></div>'


# -- The plot --------------------------------------------------------------------------------------------------------------
# Wide enough for the larger letters of a narrow screen.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 300, 96, 30, 20, 60
_FLOOR = 1e-16
"""Of a share of nothing, whose power of ten there is none of."""
_LINES: Mapping[Mode, tuple[str, str]] = {
    "teacher-forced": ("each layer alone", "a"),
    "free-running": ("layers in a row", "b"),
}


def _plot(report: Report) -> str:
    """In each mode the worst share of each layer, by its power of ten, and across it where faults begin."""
    shares: dict[Mode, dict[int, list[float]]] = {mode: {} for mode in _LINES}
    for row in report.rows:
        shares[row.mode].setdefault(row.layer, []).append(row.share)
    lines = {mode: {layer: _exponent(values) for layer, values in by_layer.items()} for mode, by_layer in shares.items()}
    layers = sorted({layer for line in lines.values() for layer in line})
    exponents = [0.0, *(value for line in lines.values() for value in line.values() if math.isfinite(value))]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents) + 1e-9)
    step = max(1, -(-(high - low) // 6))
    ticks = range(low, high + step, step)

    def x(layer: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * layers.index(layer) / max(len(layers) - 1, 1)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (value - low) / (ticks[-1] - low))

    def across(value: float, kind: str) -> str:
        return f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'

    def word(text: str, at: float, height: float, anchor: str = "middle", kind: str = "") -> str:
        return f'<text class="{kind}" x="{at:.1f}" y="{height:.1f}" text-anchor="{anchor}">{text}</text>'

    parts = [across(tick, "grid") + word(f"1e{tick}", _LEFT - 8, y(tick) + 4, "end") for tick in ticks]
    parts += [word(str(layer), x(layer), _HEIGHT - 34) for layer in layers[:: -(-len(layers) // 14)]]
    parts += [word("layer", (_WIDTH + _LEFT) / 2, _HEIGHT - 8), across(0.0, "bound")]
    parts.append(word("a fault from here on", _WIDTH - _RIGHT - 4, y(0.0) - 5, "end", "bad"))
    for mode, (words, colour) in _LINES.items():
        points = [(x(at), y(value), at) for at, value in sorted(lines[mode].items()) if math.isfinite(value)]
        parts.append(f'<polyline class="{colour}" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)}"/>')
        parts += [
            f'<circle class="{colour}" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{words}, layer {at}</title></circle>'
            for px, py, at in points
        ]
        parts += [word("NaN", x(at), _TOP + 12, kind="bad") for at, value in lines[mode].items() if not math.isfinite(value)]
    title = "Share of what honest runs allow"
    key = ", ".join(f'<span class="{colour}">● {words}</span>' for words, colour in _LINES.values())
    return (
        f'<figure><figcaption>{title}</figcaption><p class="soft">The worst figure of each layer, as a share of what honest '
        f'runs allow; above the red line it is a fault.</p><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}, by layer">{"".join(parts)}</svg><div class="key">{key}</div></figure>'
    )


def _exponent(shares: Sequence[float]) -> float:
    """The power of ten of the largest; NaN if one is not finite."""
    return math.log10(max(*shares, _FLOOR)) if all(map(math.isfinite, shares)) else math.nan


# -- Tables ----------------------------------------------------------------------------------------------------------------
def _table(columns: Iterable[str], rows: Sequence[Sequence[str | float]], left: int, bad: Sequence[bool]) -> str:
    """A table whose first `left` columns hold words; a number is a share, drawn as a bar. Rows that are `bad` are red."""

    def cell(content: str | float, tag: str, place: int) -> str:
        if isinstance(content, str):
            return f"<{tag}{' class=left' * (place < left)}>{escape(content)}</{tag}>"
        finite = math.isfinite(content)
        width, words = min(content, 1.0) if finite else 1.0, f"{100 * content:.3g} %" if finite else "beyond it"
        return f'<{tag} class=left><span class="bar"><i style="width:{100 * width:.1f}%"></i></span> {words}</{tag}>'

    def cells(tag: str, row: Iterable[str | float]) -> str:
        return "".join(cell(content, tag, place) for place, content in enumerate(row))

    body = "".join(f"<tr{' class=bad' * wrong}>{cells('td', row)}</tr>" for row, wrong in zip(rows, bad, strict=True))
    return f'<div class="table"><table><tr>{cells("th", columns)}</tr>{body}</table></div>'


def _tensor_table(report: Report) -> str:
    tensors = sorted(report.tensors, key=lambda t: -t.share if math.isfinite(t.share) else -math.inf)
    rows: list[list[str | float]] = [
        [t.stage, "–" if t.layer is None else str(t.layer), t.reason or "equal", t.share, f"{t.phase} {t.step}"]
        for t in tensors
    ]
    columns = ["tensor", "layer", "found", "of what is allowed", "forward"]
    return _table(columns, rows, 4, [t.fails or not t.share <= 1 for t in tensors])


def _logit_table(report: Report) -> str:
    rows = [
        [f"{r.phase} {r.step}", f"{r.cos:.8f}", f"{r.rel_l2:.2e}", f"{r.max_abs:.2e}", f"{r.same_token} of {r.predictions}"]
        for r in report.logits
    ]
    bad = [not math.isfinite(r.cos) for r in report.logits]
    return _table(["forward", "lowest cosine", "rel. L2", "max abs", "same next token"], rows, 1, bad)
