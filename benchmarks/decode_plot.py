"""The plot of decode latencies, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from haarkv.benchmarks.decode_cost import CostRow
from haarkv.benchmarks.npu_plot import require_matplotlib

__all__ = ["require_matplotlib", "svg"]

_TITLES = {
    "layer": "one call of a layer",
    "attention": "attention of one layer",
    "store": "storing a token",
    "prompt": "whole prompt",
    "step": "whole step",
}
_COLORS = ("#2563a8", "#c2571a", "#2b8a5a", "#8a4fb5", "#b8336a", "#6b7280", "#0e7490", "#92400e")


def svg(rows: Sequence[CostRow], title: str) -> str:
    """Milliseconds by context, a panel for each batch and kind; ours solid, others dashed; medians with their extremes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((r.kind, r.batch) for r in rows))
    names = list(dict.fromkeys(r.who for r in rows if r.ms is not None))
    color = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
    # A fixed salt and no date: the same rows give the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.6 * len(panels) + 2.4, 3.8), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (kind, batch) in zip(axes, panels, strict=True):
            here = [r for r in rows if (r.kind, r.batch) == (kind, batch) and r.ms is not None]
            for name in names:
                line = sorted((r for r in here if r.who == name), key=lambda r: r.context)
                if not line:
                    continue
                ms = [r.ms or 0.0 for r in line]
                extremes = [[r.ms - r.low for r in line], [r.high - r.ms for r in line]]  # type: ignore[operator]
                axis.errorbar(
                    [r.context for r in line], ms, yerr=extremes, color=color[name], label=name, markersize=4,
                    marker="s" if line[0].peer else "o", linestyle="--" if line[0].peer else "-", elinewidth=0.8,
                )  # fmt: skip
            contexts = sorted({r.context for r in here})
            axis.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="ms")
            axis.set_title(f"{_TITLES[kind]}, batch {batch}")
            axis.set_xticks(contexts, [f"{c:,}" for c in contexts], minor=False)
            axis.minorticks_off()
            axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
        figure.suptitle(f"Decode latency: {title}", fontsize=11)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()
