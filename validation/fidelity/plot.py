"""A picture of an evaluation, as SVG text: KL against bytes per token."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    from haarkv.validation.fidelity.evaluation import FidelityRow

_ON, _OFF, _GRID = "#2563a8", "#8a929c", "#dddddd"
# Where a name may stand about its point, in points, the best place first: right, left, above, below, then farther away.
_PLACES = [
    (x * far, y * far, side)
    for far in (1.0, 1.8, 2.8)
    for x, y, side in ((7, 0, "left"), (-7, 0, "right"), (5, 8, "left"), (5, -8, "left"), (-5, 8, "right"), (-5, -8, "right"))
]


def require_matplotlib() -> None:
    """Refuse early.

    Raises:
        InputError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InputError("matplotlib is not installed, so nothing can be drawn; run pip install 'haarkv[plot]'")


def pareto_front(rows: Sequence[FidelityRow]) -> list[FidelityRow]:
    """Rows that no other row beats: none has both as few bytes and as low a mean KL, and one of the two lower.

    Returns:
        by bytes, ascending; of equals all.
    """
    front = [
        row
        for row in rows
        if not any(
            other.bytes_per_token <= row.bytes_per_token
            and other.kl_mean <= row.kl_mean
            and (other.bytes_per_token, other.kl_mean) != (row.bytes_per_token, row.kl_mean)
            for other in rows
        )
    ]
    return sorted(front, key=lambda row: (row.bytes_per_token, row.kv))


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


def svg(rows: Sequence[FidelityRow], title: str) -> str:
    """Mean KL by bytes per token, both axes logarithmic; filled points and the line are the Pareto front.

    bf16 has no divergence from itself and is a vertical line; what takes as many bytes or more saves nothing, and is left out,
    as is a divergence of 0, which no logarithm shows.
    """
    # 16 bits a value is what bf16 takes, whether or not it is a row.
    plotted_rows = [row for row in rows if row.bits_per_value < 16 and row.kl_mean > 0]
    front = pareto_front(plotted_rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        log_axes(axes, f"Fidelity against bytes: {title}", "KV bytes per token, scales included", "format), nats per token")
        axes.plot(
            [row.bytes_per_token for row in front], [row.kl_mean for row in front],
            color=_ON, linewidth=1.2, label="Pareto front", zorder=2,
        )  # fmt: skip
        for row in plotted_rows:
            color, style = (_ON, "full") if row in front else (_OFF, "none")
            axes.plot(row.bytes_per_token, row.kl_mean, "o", color=color, fillstyle=style, markersize=6, zorder=3)
        if rows:
            bf16 = 16 * rows[0].bytes_per_token / rows[0].bits_per_value
            axes.axvline(bf16, color=_OFF, linestyle=":", linewidth=1.2, label="bf16 (KL 0)")
            _ticks(axes, bf16, min([row.bytes_per_token for row in plotted_rows], default=bf16))
        axes.margins(0.08)
        axes.legend(frameon=False, loc="lower left")
        sorted_rows = sorted(plotted_rows, key=lambda row: (row.kl_mean, row.kv))
        dark = [(r.bytes_per_token, r.kl_mean, r.kv, "#222222" if r in front else "#5b6470") for r in sorted_rows]
        write_names(axes, dark, fontsize=9)

    return drawn_as_svg((7.6, 5.0), draw)


def _ticks(axes: Axes, bf16: float, least: float) -> None:
    """Bytes at whole bits a value, which is how formats are told apart."""
    bits = (1, 2, 3, 4, 5, 6, 8, 16)
    axes.set_xticks([bf16 * b / 16 for b in bits], [f"{bf16 * b / 16:,.0f}\n{b} bits" for b in bits])
    axes.minorticks_off()
    axes.set_xlim(min(bf16 * 1.8 / 16, least * 0.9), bf16 * 1.12)  # last: ticks widen the limits


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
