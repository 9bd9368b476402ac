"""Comparing vectors of two executors, each against its own length, for the columns of a report."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.validation.layers.report import ASCEND_COLUMNS


@dataclass(frozen=True)
class VectorComparison:
    """How two executors' vectors differ, the worst of all vectors; a NaN anywhere makes every figure NaN.

    Attributes:
        cosine: lowest.
        rel_l2: largest distance of two vectors, relative to the first one's length.
        max_abs: largest difference of a number.
        update: largest distance beyond rounding, relative to what the layer added to the vector.
    """

    cosine: float
    rel_l2: float
    max_abs: float
    update: float


def compare_vectors(ours: Tensor, theirs: Tensor, before: Tensor | None = None) -> VectorComparison:
    """Compare vectors one by one, so that a long one does not hide a short one.

    Args:
        ours, theirs: [..., N]; ours is the reference.
        before: [..., N], the residual stream before the layer. A layer that adds little to a long vector could add anything
            and still be near; so its update is compared too, less two roundings of the residuals.
    """
    a, b = ours.double(), theirs.double()
    distance, length = (b - a).norm(dim=-1), a.norm(dim=-1)
    cosine = _ratio((a * b).sum(-1), length * b.norm(dim=-1), empty=1.0).clamp(max=1.0)
    update = torch.zeros(())
    if before is not None:
        eps = torch.finfo(ours.dtype).eps
        step = torch.ldexp(torch.full_like(a, eps), torch.frexp(torch.maximum(a.abs(), b.abs())).exponent - 1)
        update = _ratio(((b - a).abs() - 2 * step).clamp(min=0).norm(dim=-1), (a - before.double()).norm(dim=-1)).max()
    return VectorComparison(
        cosine=float(cosine.min()),
        rel_l2=float(_ratio(distance, length).max()),
        max_abs=float((theirs.double() - a).abs().max()),
        update=float(update),
    )


def _ratio(part: Tensor, whole: Tensor, empty: float = 0.0) -> Tensor:
    """part / whole, where 0 / 0 is `empty`."""
    return torch.where((part == 0) & (whole == 0), empty, part / whole)


# -- As Ascend's own tool has it ---------------------------------------------------------------------------------------------
_FP32_EPS = torch.finfo(torch.float32).eps


def ascend_metrics(theirs: Tensor, ours: Tensor) -> dict[str, float | str]:
    """The columns of Ascend's accuracy comparison (msaccucmp, in msProbe), for reading side by side; they judge nothing.

    They are of a whole tensor at once, where a long token hides a short one. With x on trial and y the ground truth,
    relative errors are |x / y - 1|, 0 where |y| <= FP32's epsilon; the divergence is of x and y, each scaled to 0 … 1 and
    divided by its sum.
    """
    x, y = theirs.double().flatten(), ours.double().flatten()
    error = (x - y).abs()
    relative = torch.where(y.abs() > _FP32_EPS, (x / y - 1).abs(), 0.0)
    p, q = _as_distribution(x), _as_distribution(y)
    figures = (
        float((x @ y) / (x.norm() * y.norm())),
        float(error.max()),
        float(relative.sum()),
        float(error.norm() / y.norm()),
        float((p * (p / q).log()).sum()),
        "({:.3f};{:.3f}),({:.3f};{:.3f})".format(
            *(float(f) for f in (x.mean(), x.std(correction=0), y.mean(), y.std(correction=0)))
        ),
        float(error.mean()),
        float(error.square().mean().sqrt()),
        float(relative.max()),
        float(relative.mean()),
    )
    return dict(zip(ASCEND_COLUMNS, figures, strict=True))


def _as_distribution(x: Tensor) -> Tensor:
    span = x.max() - x.min()
    distribution = (x - x.min()) / span if span != 0 else x
    distribution = distribution.clamp(min=_FP32_EPS)
    return distribution / distribution.sum()
