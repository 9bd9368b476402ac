"""The plot of simulated attention cycles, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:
    from haarkv.benchmarks.npu_attention import Point

_STYLE = {"tq4": ("#2563a8", "o", "-"), "published": ("#c2571a", "s", "--"), "bf16": ("#5b6470", "^", ":")}


def require_matplotlib() -> None:
    """Refuse early.

    Raises:
        InputError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InputError("matplotlib is not installed, so nothing can be drawn; run pip install 'haarkv[plot]'")


def svg(points: Sequence[Point]) -> str:
    """Cycles by context, one panel a batch size, both axes logarithmic."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    batches = sorted({p.batch for p in points})
    # A fixed salt and no date: the same points give the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.4 * len(batches) + 0.4, 3.6), layout="constrained")
        axes = figure.subplots(1, len(batches), squeeze=False)[0]
        for axis, batch in zip(axes, batches, strict=True):
            contexts = sorted({p.context for p in points if p.batch == batch})
            for variant in dict.fromkeys(p.variant for p in points):
                line = sorted((p.context, p.cycles) for p in points if p.variant == variant and p.batch == batch)
                color, marker, dash = _STYLE.get(variant, ("#333333", "x", "-."))
                axis.plot(*zip(*line, strict=True), color=color, marker=marker, linestyle=dash, markersize=5, label=variant)
            axis.set(
                xscale="log", yscale="log", title=f"batch {batch}", xlabel="tokens in the cache", ylabel="simulated cycles"
            )
            axis.set_xticks(contexts, [str(c) for c in contexts], minor=False)
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
            axis.minorticks_off()
            axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        axes[0].legend(frameon=False)
        figure.suptitle("Decode attention of one Qwen3-14B layer, simulated (relative, no latency)", fontsize=11)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()
