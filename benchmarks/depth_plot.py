"""Draw how an executor drifts from the reference, layer by layer, from what `tq validate --json` printed.

python -m haarkv.benchmarks.depth_plot validate.json drift.svg
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from haarkv.benchmarks.npu_plot import require_matplotlib

# mode -> colour, marker, line
_STYLE = {"teacher-forced": ("#2563a8", "o", "-"), "free-running": ("#c2571a", "s", "--")}
_SIDES = (("k_match", "K", "-"), ("v_match", "V", ":"))
_FLOOR = 1e-16  # 1 - cosine of equal states


def worst(rows: Sequence[dict[str, Any]], mode: str, figure: str) -> dict[int, float]:
    """layer -> the lowest figure of all forwards in a mode."""
    found: dict[int, float] = {}
    for row in rows:
        if row["mode"] == mode:
            found[row["layer"]] = min(row[figure], found.get(row["layer"], row[figure]))
    return dict(sorted(found.items()))


def svg(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Two panels by layer: how far the worst token's hidden state is from the reference's, and which share of codes is equal.

    Args:
        rows: of the report, as JSON.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A fixed salt and no date: the same rows give the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.2, 3.6), layout="constrained")
        drift, codes = figure.subplots(1, 2)
        for mode, (color, marker, line) in _STYLE.items():
            cosine = worst(rows, mode, "hidden_cos")
            far = [max(1 - value, _FLOOR) for value in cosine.values()]
            drift.plot(list(cosine), far, color=color, marker=marker, linestyle=line, markersize=3.5, label=mode)
            for name, side, dash in _SIDES:
                equal = worst(rows, mode, name)
                percent = [100 * value for value in equal.values()]
                codes.plot(list(equal), percent, color=color, linestyle=dash, label=f"{side}, {mode}")
        drift.set(yscale="log", xlabel="layer", ylabel="1 - lowest cosine of a hidden state")
        codes.set(xlabel="layer", ylabel="codes that are equal, %")
        for axis in (drift, codes):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
            axis.legend(frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=11)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the output of tq validate --json")
    parser.add_argument("svg", type=Path, help="the file to write")
    args = parser.parse_args(argv)
    require_matplotlib()
    report = json.loads(args.report.read_text(encoding="utf-8"))
    title = f"{report['model']}: {report['candidate']} against {report['reference']}, {report['kv']}, {report['dtype']}"
    args.svg.write_text(svg(report["rows"], title), encoding="utf-8")


if __name__ == "__main__":
    main()
