"""The plot of a server under load, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from haarkv.benchmarks.npu_plot import require_matplotlib
from haarkv.benchmarks.serve_rounds import LoadRow

__all__ = ["require_matplotlib", "svg"]

_STYLE = {"bf16": ("#c2571a", "s", "--"), "tq4": ("#2563a8", "o", "-")}
_PANELS = (("output_rate", "answers, tokens/s"), ("tpot", "ms a token"), ("ttft", "ms to the first token"))


def svg(rows: Sequence[LoadRow], title: str) -> str:
    """Rate of answers, time of a token and time to the first one by users; a line of panels for each prompt length."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    prompts, users = (sorted({getattr(r, name) for r in rows}) for name in ("prompt", "users"))
    # A fixed salt and no date: the same rows give the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 2.9 * len(prompts) + 0.7), layout="constrained")
        axes = figure.subplots(len(prompts), len(_PANELS), squeeze=False)
        for line, prompt in zip(axes, prompts, strict=True):
            for axis, (name, label) in zip(line, _PANELS, strict=True):
                for kv in dict.fromkeys(r.kv for r in rows):
                    here = sorted((r for r in rows if (r.kv, r.prompt) == (kv, prompt)), key=lambda r: r.users)
                    values = [getattr(r, name) for r in here]
                    color, marker, style = _STYLE[kv]
                    spread = [[r.output_rate - r.low for r in here], [r.high - r.output_rate for r in here]]
                    axis.errorbar(
                        [r.users for r in here], values, yerr=spread if name == "output_rate" else None, label=kv, color=color,
                        marker=marker, linestyle=style, markersize=4, elinewidth=0.8,
                    )  # fmt: skip
                axis.set(xlabel="users", ylabel=label, title=f"prompts of {prompt:,} tokens")
                axis.set_xscale("log", base=2)
                axis.set_xticks(users, [str(u) for u in users], minor=False)
                axis.set_ylim(0, 1.08 * axis.dataLim.y1)
                axis.minorticks_off()
                axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        figure.suptitle(title, fontsize=11)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()
