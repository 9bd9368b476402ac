"""The picture of an evaluation: KL against bytes per token, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def svg(rows: Sequence[FidelityRow], title: str) -> str:
    """Mean KL by bytes per token, both axes logarithmic; filled points and the line are the Pareto front.

    bf16 has no divergence from itself and is a vertical line; what takes as many bytes or more saves nothing, and is left out,
    as is a divergence of 0, which no logarithm shows.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # 16 bits a value is what bf16 takes, whether or not it is a row.
    shown = [row for row in rows if row.bits_per_value < 16 and row.kl_mean > 0]
    front = pareto_front(shown)
    # A fixed salt and no date: the same rows give the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.6, 5.0), layout="constrained")
        axes = figure.subplots()
        axes.set(
            xscale="log", yscale="log", xlabel="KV bytes per token, scales included",
            ylabel="mean KL(bf16 ‖ format), nats per token", title=f"Fidelity against bytes: {title}",
        )  # fmt: skip
        axes.plot(
            [row.bytes_per_token for row in front], [row.kl_mean for row in front],
            color=_ON, linewidth=1.2, label="Pareto front", zorder=2,
        )  # fmt: skip
        for row in shown:
            axes.plot(
                row.bytes_per_token, row.kl_mean, "o",
                color=_ON if row in front else _OFF, fillstyle="full" if row in front else "none", markersize=6, zorder=3,
            )  # fmt: skip
        if rows:
            bf16 = 16 * rows[0].bytes_per_token / rows[0].bits_per_value
            axes.axvline(bf16, color=_OFF, linestyle=":", linewidth=1.2, label="bf16 (KL 0)")
            _ticks(axes, bf16, min([row.bytes_per_token for row in shown], default=bf16))
        axes.grid(visible=True, which="major", color=_GRID, linewidth=0.6, zorder=0)
        axes.margins(0.08)
        axes.legend(frameon=False, loc="lower left")
        _name(axes, shown, front)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()


def _ticks(axes: Axes, bf16: float, least: float) -> None:
    """Bytes at whole bits a value, which is how formats are told apart."""
    bits = (1, 2, 3, 4, 5, 6, 8, 16)
    axes.set_xticks([bf16 * b / 16 for b in bits], [f"{bf16 * b / 16:,.0f}\n{b} bits" for b in bits])
    axes.minorticks_off()
    axes.set_xlim(min(bf16 * 1.8 / 16, least * 0.9), bf16 * 1.12)  # last: ticks widen the limits


def _name(axes: Axes, shown: Sequence[FidelityRow], front: Sequence[FidelityRow]) -> None:
    """Write each row's name beside its point."""
    write_names(
        axes,
        [
            (row.bytes_per_token, row.kl_mean, row.kv, "#222222" if row in front else "#5b6470")
            for row in sorted(shown, key=lambda row: (row.kl_mean, row.kv))
        ],
        fontsize=9,
    )


def write_names(axes: Axes, points: Sequence[tuple[float, float, str, str]], fontsize: float) -> None:
    """Write names beside points, where each covers no other name and no point as far as there is such a place.

    Args:
        points: x, y, name and color of each; the first have the first choice of a place.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    assert isinstance(axes.figure, Figure)
    axes.figure.draw_without_rendering()  # lays out the axes, without which nothing has a place
    places = [axes.transData.transform(point[:2]) for point in points]
    marks = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places]
    legend = axes.get_legend()
    taken = [*marks, legend.get_window_extent()] if legend else list(marks)
    for (left, height, name, color), own in zip(points, marks, strict=True):
        label = axes.annotate(
            name, (left, height), xytext=(0, 0), textcoords="offset points", va="center", fontsize=fontsize, color=color,
            annotation_clip=False,
        )  # fmt: skip
        best: tuple[float, int] | None = None
        for number, (x, y, side) in enumerate(_PLACES):
            label.set(position=(x, y), ha=side)
            box = label.get_window_extent()
            covered = sum(_overlap(box, other) for other in taken if other is not own) + _outside(box, axes.bbox)
            if best is None or covered < best[0] - 1e-6:
                best = (covered, number)
        assert best is not None
        x, y, side = _PLACES[best[1]]
        label.set(position=(x, y), ha=side)
        taken.append(label.get_window_extent())


def _overlap(a: Bbox, b: Bbox) -> float:
    """Square pixels that two boxes share."""
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(0.0, width) * max(0.0, height))


def _outside(box: Bbox, frame: Bbox) -> float:
    """Square pixels of a box that lie outside a frame."""
    return float(box.width * box.height) - _overlap(box, frame)
