"""The figures of Ascend's own accuracy comparison (msaccucmp, in msProbe), so that both can be read side by side.

They are taken of a whole tensor at once, after its columns' published definitions, and judge nothing here: a long token hides
a short one in every one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.validation.layers.report import ASCEND_COLUMNS

_EPS = torch.finfo(torch.float32).eps


def ascend_metrics(theirs: Tensor, ours: Tensor) -> dict[str, float | str]:
    """The columns of `ASCEND_COLUMNS`.

    With x on trial and y the ground truth, relative errors are |x / y - 1|, 0 where |y| is not above FP32's epsilon; the
    divergence is that of x and y, each shifted and scaled to 0 … 1 and divided by its sum.

    Args:
        theirs: the tensor on trial, any shape.
        ours: the ground truth.
    """
    x, y = theirs.double().flatten(), ours.double().flatten()
    error = (x - y).abs()
    relative = torch.where(y.abs() > _EPS, (x / y - 1).abs(), 0.0)
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
    scaled = (x - x.min()) / span if span != 0 else x
    scaled = scaled.clamp(min=_EPS)
    return scaled / scaled.sum()
