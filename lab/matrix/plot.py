"""The picture of a matrix, as SVG text: mean KL of ours and of others by bits a value."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

Row = Mapping[str, Any]
"""As `measure` records it."""
# Color, mark and name of each family; a row belongs to the first whose prefix its label has.
_FAMILIES = {
    "the default": ("#0b1f4b", "p", "the default (ours)"),
    "by layer": ("#0b1f4b", "*", "learned coordinates, by layer (ours)"),
    "learned": ("#b8336a", "d", "learned coordinates (ours)"),
    "tq": ("#2563a8", "o", "tq2 … tq8 (ours)"),
    "K ": ("#5aa0e0", "D", "K finer than V (ours)"),
    "KVarN": ("#1b7f5c", "s", "KVarN"),
    "OSCAR": ("#8e44ad", "^", "OSCAR"),
    "KIVI": ("#c77700", "v", "KIVI"),
    "llama.cpp": ("#b3261e", "x", "llama.cpp"),
    "vLLM": ("#0e7490", "P", "vLLM TurboQuant"),
    "": ("#6b7280", "+", "other"),
}
_LINES = ("by layer", "learned", "tq")
_MOST_BITS = 13.0
_GRID = "#dddddd"
# Where a name may stand about its point, in points, the best place first: right, left, above, below, then farther away.
_PLACES = [
    (x * far, y * far, side)
    for far in (1.0, 1.8, 2.8)
    for x, y, side in ((7, 0, "left"), (-7, 0, "right"), (5, 8, "left"), (5, -8, "left"), (-5, 8, "right"), (-5, -8, "right"))
]


def family(label: str) -> str:
    """The key of a row's family."""
    return next(prefix for prefix in _FAMILIES if label.startswith(prefix) and not (prefix == "tq" and "_" in label))


def _average_texts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row a cache: the mean over texts, weighted by their tokens, of the rows that have all texts."""
    by_text: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_text.setdefault(row["label"], {})[row["text"]] = row  # the later one counts
    by_label = {label: list(label_rows.values()) for label, label_rows in by_text.items()}
    most = max(map(len, by_label.values()), default=0)
    return [
        {"label": label, "bits_per_value": label_rows[0]["bits_per_value"],
         "kl_mean": sum(r["tokens"] * r["kl_mean"] for r in label_rows) / sum(r["tokens"] for r in label_rows)}
        for label, label_rows in by_label.items() if len(label_rows) == most
    ]  # fmt: skip


def matrix_svg(rows: Sequence[Row]) -> str:
    """Mean KL over all texts by bits a value: a line of panels for each model, one for each window and tail.

    Args:
        rows: as `matrix` records them, at least one.
    """
    panels: dict[str, dict[tuple[int, int, int], list[Row]]] = {}
    for row in rows:
        panels.setdefault(row["model"], {}).setdefault((row["window"], row["tail"], row["sink"]), []).append(row)
    settings = sorted({setting for model_rows in panels.values() for setting in model_rows})

    def draw(figure: Figure) -> None:
        grid, panel_rows = figure.subplots(len(panels), len(settings), squeeze=False), []
        for line, (model, model_rows) in zip(grid, panels.items(), strict=True):
            for axes, setting in zip(line, settings, strict=True):
                visible_rows = [
                    r
                    for r in _average_texts(model_rows.get(setting, []))
                    if r["bits_per_value"] < _MOST_BITS and r["kl_mean"] > 0
                ]
                window, tail, sink = setting
                title = f"{model}, windows of {window:,}, " + (f"tail {tail}, {sink} sinks" if tail or sink else "no tail")
                if visible_rows:
                    _panel(axes, title, visible_rows)
                    panel_rows.append((axes, visible_rows))
                else:
                    axes.set_axis_off()
        for axes, visible_rows in panel_rows:  # once all panels have their places
            rows_by_kl = sorted(visible_rows, key=lambda row: row["kl_mean"])
            points = [(r["bits_per_value"], r["kl_mean"], r["label"], _FAMILIES[family(r["label"])][0]) for r in rows_by_kl]
            write_names(axes, points, fontsize=8)

    return drawn_as_svg((7.2 * len(settings), 5.6 * len(panels)), draw)


def _panel(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    log_axes(axes, title, "bits a value, everything counted", "cache), nats a token")
    for prefix, (color, mark, name) in _FAMILIES.items():
        members = sorted((row for row in rows if family(row["label"]) == prefix), key=lambda row: row["bits_per_value"])
        if members:
            axes.plot(
                [row["bits_per_value"] for row in members], [row["kl_mean"] for row in members], color=color, marker=mark,
                linestyle="-" if prefix in _LINES else "none", linewidth=1.3, markersize=6, label=name,
                zorder=3,
            )  # fmt: skip
    ticks = (2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(0.1)
    axes.legend(frameon=False, loc="best", fontsize=8)


# -- Drawing ---------------------------------------------------------------------------------------------------------------
def drawn_as_svg(size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """A figure as SVG text; the same drawing gives the same text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure, text = Figure(figsize=size, layout="constrained"), io.StringIO()
        draw(figure)
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()


def log_axes(axes: Axes, title: str, across: str, up: str) -> None:
    """Both axes logarithmic, with a grid behind what is drawn."""
    axes.set(xscale="log", yscale="log", title=title, xlabel=across, ylabel=f"mean KL(bf16 ‖ {up}")
    axes.grid(visible=True, which="major", color=_GRID, linewidth=0.6, zorder=0)


def write_names(axes: Axes, points: Sequence[tuple[float, float, str, str]], fontsize: float) -> None:
    """Write names beside points, where each meets no other name, no point and no line as far as there is such a place.

    Args:
        points: x, y, name and color of each; the first have the first choice of a place.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    assert isinstance(axes.figure, Figure)
    axes.figure.draw_without_rendering()  # lays out the axes, without which nothing has a place
    marks = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in (axes.transData.transform(point[:2]) for point in points)]
    lines = [axes.transData.transform_path(line.get_path()) for line in axes.lines if line.get_linestyle() == "-"]
    legend = axes.get_legend()
    occupied_boxes = [*marks, *([legend.get_window_extent()] if legend else [])]
    for (left, height, name, color), mark in zip(points, marks, strict=True):
        label = axes.annotate(
            name, (left, height), xytext=(0, 0), textcoords="offset points", va="center", fontsize=fontsize, color=color,
            annotation_clip=False,
        )  # fmt: skip

        def count_overlaps_at(place: tuple[float, float, str], label: Annotation = label, mark: Bbox = mark) -> int:
            label.set(position=place[:2], ha=place[2])
            box = label.get_window_extent()
            outside = not all(axes.bbox.contains(*corner) for corner in box.corners())
            crossings = sum(line.intersects_bbox(box, filled=False) for line in lines)
            return box.count_overlaps([other for other in occupied_boxes if other is not mark]) + crossings + outside

        x, y, side = min(_PLACES, key=count_overlaps_at)  # of equals the first
        label.set(position=(x, y), ha=side)
        occupied_boxes.append(label.get_window_extent())
