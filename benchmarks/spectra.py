"""Draw what a calibration found: the spectra of every KV head, and what they promise over a fixed rotation.

python -m haarkv.benchmarks.spectra tiny.safetensors learned.svg
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from haarkv.benchmarks.npu_plot import require_matplotlib
from haarkv.codebooks.learned import Basis, errors, expected_cost
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.calibration_file import load

_STYLE = {"k": ("K", "#2563a8", "o"), "v": ("V", "#c2571a", "s")}


def flatness_db(basis: Basis) -> Tensor:
    """Arithmetic over geometric mean of each head's weights, in dB: [H]. 0 where all coordinates weigh alike."""
    weights = basis.weights.double()
    return 10 * (weights.mean(1).log10() - weights.log10().mean(1))


def alignment_db(basis: Basis) -> Tensor:
    """tr(M) tr(C) / D over tr(M C), in dB: [H]. Below 0 where vectors lie in the directions in which errors cost most.

    M and C are those that the basis was learned from, up to rounding: C is back^T back, M is
    forward diag(weights) forward^T, and tr(M C) the sum of the weights.
    """
    forward, back, weights = basis.forward.double(), basis.back.double(), basis.weights.double()
    metric = (forward.square() * weights.unsqueeze(1)).sum((1, 2))
    return 10 * (metric * back.square().sum((1, 2)) / basis.head_dim / weights.sum(1)).log10()


def nibbles_db(basis: Basis) -> Tensor:
    """What the allocation of D nibbles wins over one for each coordinate, in dB: [H]."""
    return 10 * (errors()[1] / expected_cost(basis.weights, basis.head_dim)).log10()


def promised_db(basis: Basis) -> Tensor:
    """How far below a fixed rotation's the expected cost lies at equal bytes, in dB: [H].

        rotation: errors()[1] * tr(M) * tr(C) / D        learned: expected_cost(D nibbles) * tr(M C)

    A rotation by chance spreads its error evenly, whatever M says.
    """
    return alignment_db(basis) + nibbles_db(basis)


def svg(calibration: Calibration, title: str) -> str:
    """Two panels: weights by coordinate, a line for each layer and head; and by layer what they promise over a rotation."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A fixed salt and no date: the same calibration gives the same file.
    with rc_context({"svg.hashsalt": "haarkv", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.2, 3.6), layout="constrained")
        spectra, promise = figure.subplots(1, 2)
        for side, (name, color, marker) in _STYLE.items():
            bases: tuple[Basis, ...] = getattr(calibration, side)
            lines = torch.cat([basis.weights for basis in bases])
            for number, line in enumerate(lines.tolist()):
                spectra.plot(range(1, len(line) + 1), line, color=color, linewidth=0.8, label="" if number else name)
            layers = [layer for layer, basis in enumerate(bases) for _ in range(basis.num_kv_heads)]
            db = torch.cat([promised_db(basis) for basis in bases]).tolist()
            promise.plot(layers, db, color=color, marker=marker, linestyle="", markersize=4, label=name)
        spectra.axhline(1.0, color="#888888", linewidth=0.8, linestyle=":")
        spectra.set(yscale="log", ylim=(1e-6, None), xlabel="coordinate", ylabel="weight; 1 in a fixed rotation")
        promise.set(xlabel="layer", ylabel="expected cost below tq4's, dB", ylim=(0, None))
        promise.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in (spectra, promise):
            axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
            axis.legend(frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=11)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="white")
    return text.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", type=Path, help="a file of tq calibrate")
    parser.add_argument("svg", type=Path, help="the file to write")
    args = parser.parse_args(argv)
    require_matplotlib()
    calibration = load(args.calibration).calibration
    args.svg.write_text(svg(calibration, f"{args.calibration.stem}: what was learned of each KV head"), encoding="utf-8")
    for side in _STYLE:
        for layer, basis in enumerate(getattr(calibration, side)):
            found = (
                (flatness_db(basis), "AM/GM"), (nibbles_db(basis), "nibbles"), (alignment_db(basis), "alignment"),
                (promised_db(basis), "below tq4"),
            )  # fmt: skip
            figures = "; ".join(f"{word} {', '.join(f'{x:.1f}' for x in of.tolist())} dB" for of, word in found)
            print(f"layer {layer} {side.upper()}: {figures}")


if __name__ == "__main__":
    main()
