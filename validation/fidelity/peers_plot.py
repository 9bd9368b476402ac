"""The figure of `validation.fidelity.peers`: KL against bits a value, ours and others', one panel a comparison."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from haarkv.validation.fidelity.plot import require_matplotlib, write_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

_TITLES = {
    "alone": "No token in BF16 (windows of 1,024)",
    "window": "The same 128 recent tokens and 4 sinks in BF16 (windows of 4,096)",
}
# Color, mark and name of each family; a row belongs to the first whose prefix its label has.
_FAMILIES = {
    "lr plan": ("#b3261e", "D", "learned nibbles by place (ours)"),
    "lr": ("#d9827b", "d", "learned nibbles, layers alike (ours)"),
    "tq": ("#2563a8", "o", "tq2 … tq8 (ours)"),
    "KVarN": ("#1b7f5c", "s", "KVarN"),
    "OSCAR": ("#8e44ad", "^", "OSCAR"),
    "KIVI": ("#c77700", "v", "KIVI"),
    "": ("#6b7280", "x", "llama.cpp, its forks, ManthanQuant"),
}
_MOST_BITS = 9.0


def family(label: str) -> str:
    """The key of a row's family."""
    return next(prefix for prefix in _FAMILIES if label.startswith(prefix) and not (prefix == "tq" and "_" in label))


def svg(comparisons: Mapping[str, Sequence[Row]]) -> str:
    """Two panels, both axes logarithmic; families are lines where they differ in bits alone.

    Args:
        comparisons: rows by comparison, as the benchmark records them.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date: the same rows give the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.2 * len(comparisons), 6.0), layout="constrained")
        for axes, (name, rows) in zip(
            figure.subplots(1, len(comparisons), squeeze=False)[0], comparisons.items(), strict=True
        ):
            _panel(axes, _TITLES[name], [row for row in rows if row["bits_per_value"] < _MOST_BITS and row["kl_mean"] > 0])
        tokens = max(row["tokens"] for rows in comparisons.values() for row in rows)
        figure.suptitle(f"tiny, {tokens:,} held-out tokens; others' formats as written here after their papers", fontsize=11)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()


def _panel(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    axes.set(
        xscale="log", yscale="log", title=title, xlabel="bits a value, everything counted",
        ylabel="mean KL(bf16 ‖ cache), nats a token",
    )  # fmt: skip
    for prefix, (color, mark, name) in _FAMILIES.items():
        own = sorted((row for row in rows if family(row["kv"]) == prefix), key=lambda row: row["bits_per_value"])
        if not own:
            continue
        joined = prefix in ("lr plan", "lr", "tq")
        axes.plot(
            [row["bits_per_value"] for row in own], [row["kl_mean"] for row in own],
            color=color, marker=mark, linestyle="-" if joined else "none", linewidth=1.3, markersize=6, label=name, zorder=3,
        )  # fmt: skip
    axes.set_xticks([2, 2.5, 3, 3.5, 4, 5, 6, 8], ["2", "2.5", "3", "3.5", "4", "5", "6", "8"])
    axes.minorticks_off()
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6, zorder=0)
    axes.margins(0.1)
    axes.legend(frameon=False, loc="lower left", fontsize=8)
    named = sorted(rows, key=lambda row: row["kl_mean"])
    write_names(axes, [(r["bits_per_value"], r["kl_mean"], r["kv"], _FAMILIES[family(r["kv"])][0]) for r in named], fontsize=8)
