"""Every plot of the benchmarks, as SVG text: lines over logarithmic axes, a panel for each case."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from haarkv.benchmarks.decode import TITLES, Request
from haarkv.benchmarks.decode_cost import CostRow

_COLORS = ("#2563a8", "#c2571a", "#2b8a5a", "#8a4fb5", "#b8336a", "#6b7280", "#0e7490", "#92400e")

Point = float | tuple[float, float, float]
"""A value, or a value with the lowest and the highest."""


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        lines: by name, the point of each x.
        dashed: lines that are drawn so.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Mapping[int, Point]]
    dashed: frozenset[str] = frozenset()


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Panels side by side; a line has the same colour in all of them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    # A fixed salt and no date: the same figures give the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.4 * len(panels) + 2.4, 3.8), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            for name, points in panel.lines.items():
                given = [(x, *(p if isinstance(p, tuple) else (p, p, p))) for x, p in sorted(points.items())]
                xs, ys, low, high = zip(*given, strict=True) if given else ((), (), (), ())
                spread = [[y - a for y, a in zip(ys, low, strict=True)], [b - y for y, b in zip(ys, high, strict=True)]]
                dashed = name in panel.dashed
                axis.errorbar(
                    xs, ys, yerr=spread, color=_COLORS[names.index(name) % len(_COLORS)], label=name, markersize=4,
                    marker="s" if dashed else "o", linestyle="--" if dashed else "-", elinewidth=0.8,
                )  # fmt: skip
            ticks = sorted({x for points in panel.lines.values() for x in points})
            axis.set(xscale="log", yscale="log", xlabel=panel.x, ylabel=panel.y, title=panel.title)
            axis.set_xticks(ticks, [f"{x:,}" for x in ticks], minor=False)
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.minorticks_off()
            axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=11)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()


def latency_svg(request: Request, rows: Sequence[CostRow]) -> str:
    """Milliseconds by context, a panel for each batch and kind; ours solid, others dashed; medians with their extremes."""
    panels = []
    for kind, batch in dict.fromkeys((r.kind, r.case.batch) for r in rows):
        lines: dict[str, dict[int, Point]] = {}
        for r in rows:
            if r.taken and (r.kind, r.case.batch) == (kind, batch):
                lines.setdefault(r.who, {})[r.case.context] = (r.taken.ms, r.taken.low, r.taken.high)
        title = f"{TITLES.get(kind, 'attention of a prompt').split(',')[0]}, batch {batch}"
        dashed = frozenset(r.who for r in rows if r.peer)
        panels.append(Panel(title, "tokens in the cache", "ms", lines, dashed))
    return svg(f"Decode latency: {request.model}, {request.dtype}", panels)
