"""Comparing what two executors made of the same input: levels, stored K and V, and vectors, each against its own length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token
from haarkv.validation.layers.report import ASCEND_COLUMNS
from haarkv.validation.layers.slack import nearer


@dataclass(frozen=True)
class LevelComparison:
    """How two executors' levels differ.

    Attributes:
        total: coordinates compared.
        different: coordinates with another level.
        unexplained: those that differ by more than one, or whose rotated value is not near the boundary between.
        guilty: along the first axis, where there are unexplained ones or a tenth as many other levels as where there are most:
            KV heads, of fields that have these first.
    """

    total: int
    different: int
    unexplained: int
    guilty: tuple[int, ...] = ()

    @property
    def match(self) -> float:
        """Share of equal levels."""
        return 1 - self.different / self.total if self.total else 1.0


def compare_levels(
    ours: Tensor, theirs: Tensor, rotated: Tensor, boundaries: Tensor, atol: float | Tensor, rtol: float = 0.0
) -> LevelComparison:
    """Count the levels that differ, and those whose difference a rounding does not explain.

    A level may differ by one, and only where the rotated value lies within `atol + rtol * |boundary|` of the boundary
    between the two levels.

    Args:
        ours, theirs: [..., D] integer levels.
        rotated: [..., D] fp32, the value that `ours` was chosen from.
        boundaries: [levels - 1] fp32, ascending.
        atol, rtol: how far rounding may move a rotated value, from `validation.bounds` or coordinate by coordinate.
    """
    gap = ours.int() - theirs.int()
    different = gap != 0
    # Between levels n and n + 1 lies boundary n. Where the levels are equal or far apart the index means nothing.
    between = boundaries[ours.int().minimum(theirs.int()).clamp(max=len(boundaries) - 1)]
    near = (rotated - between).abs() <= atol + rtol * between.abs()
    unexplained = different & ~((gap.abs() == 1) & near)
    return LevelComparison(different.numel(), int(different.sum()), int(unexplained.sum()), _where(unexplained, different))


def _where(unexplained: Tensor, different: Tensor) -> tuple[int, ...]:
    """Places along the first axis where something is wrong."""
    if unexplained.ndim < 2:
        return ()
    count = different.flatten(1).sum(-1)
    wrong = unexplained.flatten(1).any(-1) | (10 * count >= count.max().clamp(min=1))
    return tuple(wrong.nonzero().flatten().tolist())


def compare_numbers(ours: Tensor, theirs: Tensor, x: Tensor, noise: float | Tensor) -> LevelComparison:
    """Count the stored numbers that differ, and those that are no rounding of the vector they stand for.

    A number may differ where it is x, off by at most `noise` of its vector's length, rounded to the stored dtype.

    Args:
        ours, theirs: [..., D] of a floating dtype.
        x: [..., D] fp32, what `ours` was rounded from.
        noise: as in `KVFormat.choice`.
    """
    different = ours != theirs
    half_step = torch.finfo(ours.dtype).eps / 2 * torch.maximum(x.abs(), theirs.float().abs())
    near = (theirs.float() - x).abs() <= half_step + noise * x.norm(dim=-1, keepdim=True)
    unexplained = different & ~near
    return LevelComparison(different.numel(), int(different.sum()), int(unexplained.sum()), _where(unexplained, different))


def compare_stored(
    kv_format: KVFormat, layer: int, ours: dict[str, Tensor], theirs: dict[str, Tensor], x: Tensor, noise: float | Tensor
) -> tuple[LevelComparison, float]:
    """Compare K or V as two executors stored them: levels where the format has levels, else the numbers themselves.

    Args:
        ours, theirs: fields of vectors [..., D], KV heads before tokens as in `KVFormat.quantize`.
        x: [..., D] fp32, the vectors that `ours` was quantized from.
        noise: as in `KVFormat.choice`.
    Returns:
        the comparison, and the largest relative difference of a vector's stored length, which is its scale's error whatever
        levels it goes with; beyond what `KVFormat.length_reach` allows.
    """
    levels, other = kv_format.levels(ours), kv_format.levels(theirs)
    choice = kv_format.choice(x, layer, noise, other)
    if levels is None or other is None or choice is None:
        parts = [compare_numbers(ours[name], theirs[name], x, noise) for name in ours]
        compared = LevelComparison(
            sum(p.total for p in parts), sum(p.different for p in parts), sum(p.unexplained for p in parts),
            tuple(sorted({head for p in parts for head in p.guilty})),
        )  # fmt: skip
    else:
        # A level that refines another follows from the one that they chose there, which may be a tie.
        expected = torch.bucketize(choice.value.contiguous(), choice.boundaries, right=True)
        found = compare_levels(expected, other, choice.value, choice.boundaries, choice.reach)
        compared = LevelComparison(levels.numel(), int((levels != other).sum()), found.unexplained, found.guilty)
    lengths = [kv_format.lengths(fields, layer) for fields in (ours, theirs)]
    off = _ratio((lengths[1] - lengths[0]).abs(), lengths[0])
    off = (off - kv_format.length_reach(x, layer, noise)).clamp(min=0.0)
    return compared, float(off.max())


def compare_tokens(
    kv_format: KVFormat, layer: int, ours: dict[str, Tensor], theirs: dict[str, Tensor], x: Tensor, noise: float | Tensor
) -> tuple[LevelComparison, float]:
    """`compare_stored` of vectors [T, Hkv, D] and their fields, tokens first, as a forward has them."""
    noise = noise.transpose(0, 1) if isinstance(noise, Tensor) and noise.ndim > 1 else noise
    return compare_stored(kv_format, layer, by_token(ours), by_token(theirs), x.transpose(0, 1), noise)


@dataclass(frozen=True)
class VectorComparison:
    """How two executors' vectors differ, the worst of all vectors; a NaN anywhere makes every figure NaN.

    Attributes:
        identical: the same numbers.
        cosine: lowest cosine of a vector and its counterpart.
        rel_l2: largest distance of a vector from its counterpart, relative to that one's own length.
        max_abs: largest difference of a number.
        update: largest distance that rounding the result does not explain, relative to what the layer added to the vector.
    """

    identical: bool
    cosine: float
    rel_l2: float
    max_abs: float
    update: float


def compare_vectors(
    ours: Tensor, theirs: Tensor, before: Tensor | None = None, allowed: Tensor | None = None
) -> VectorComparison:
    """Compare vectors one by one, so that a long one does not hide what happens to a short one.

    Args:
        ours, theirs: [..., N]; ours is the reference.
        before: [..., N], the residual stream that a layer made `ours` from. A layer that adds little to a long vector
            could add anything and still be near; what it adds is therefore compared too, less the two roundings (of
            the residuals) by which honest results differ.
        allowed: [...], how far each vector may differ before anything is counted, of `slack.judged`.
    """
    a, b = ours.double(), nearer(ours, theirs, allowed).double()
    distance, length = (b - a).norm(dim=-1), a.norm(dim=-1)
    cosine = _ratio((a * b).sum(-1), length * b.norm(dim=-1), empty=1.0).clamp(max=1.0)
    update = torch.zeros(())
    if before is not None:
        eps = torch.finfo(ours.dtype).eps
        step = torch.ldexp(torch.full_like(a, eps), torch.frexp(torch.maximum(a.abs(), b.abs())).exponent - 1)
        update = _ratio(((b - a).abs() - 2 * step).clamp(min=0).norm(dim=-1), (a - before.double()).norm(dim=-1)).max()
    return VectorComparison(
        identical=torch.equal(ours, theirs),
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
    """The columns of `ASCEND_COLUMNS`, of Ascend's accuracy comparison (msaccucmp, in msProbe), to be read side by side.

    They are of a whole tensor at once and judge nothing here: a long token hides a short one in every one of them.

    With x on trial and y the ground truth, relative errors are |x / y - 1|, 0 where |y| is not above FP32's epsilon; the
    divergence is that of x and y, each shifted and scaled to 0 … 1 and divided by its sum.

    Args:
        theirs: the tensor on trial, any shape.
        ours: the ground truth.
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
    scaled = (x - x.min()) / span if span != 0 else x
    scaled = scaled.clamp(min=_FP32_EPS)
    return scaled / scaled.sum()
