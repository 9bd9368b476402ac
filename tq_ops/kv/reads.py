"""What a backend's kernels read, as data, and the one function that compares it with what a cache would hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.numbers import Kind
from haarkv.tq_ops.formats.rotated import Description, Quantizer
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import Shapes, each

ELSEWHERE = "; only --executor reference reads every format"
"""Ends a sentence on a format that a backend does not read."""


@dataclass(frozen=True)
class Reads:
    """What the kernels of a backend take. Whatever is None may be anything.

    Attributes:
        kernels: the subject of a sentence about them, such as "its kernels".
        head_dims: those they are made for.
        planes: widths of a level's planes, low bits first, each way they take: (4,) is 4 bits in one, (2, 1) is 3 in two.
        scale_dtype: of a scale.
        order: (levels of a vector, width of a plane) -> the place of each as they lie in the bytes.
        in_one_order: whether the planes of a description lie in one order that the kernels know, where any order will not do.
        matrix_dtype: of the rotation's entries.
        quantizer: how vectors become levels.
        only: the one format of rotated levels whose tables are built into the kernels.
        also: formats that the kernels know beside those of rotated levels, each by itself and no copy of it.
        numbers: kinds of formats that they read beside those of rotated levels.
        kept: whether they read tokens in BF16 beside the packed ones.
        windows: whether they take layers with a sliding window.
        learned: head_dim -> how many levels of learned coordinates (`Coordinates`) they take; None if they take none.
    """

    kernels: str
    head_dims: tuple[int, ...]
    planes: tuple[tuple[int, ...], ...] = ((4,),)
    scale_dtype: torch.dtype = torch.float16
    order: Callable[[int, int], tuple[int, ...]] | None = None
    in_one_order: Callable[[Description], bool] | None = None
    matrix_dtype: torch.dtype | None = None
    quantizer: Quantizer | None = None
    only: KVFormat | None = None
    also: tuple[KVFormat, ...] = ()
    numbers: frozenset[Kind] = frozenset()
    kept: bool = False
    windows: bool = False
    learned: Callable[[int], range] | None = None

    def built_in(self, head_dim: int) -> Description:
        """The description of `only`, whose tables the kernels hold."""
        found = self.only.description(head_dim) if self.only else None
        assert found is not None, f"{self.kernels} hold no format's tables"
        return found


def unsupported(reads: Reads, plan: KVPlan, shapes: Shapes) -> str | None:
    """None, or in one sentence why a backend cannot read a cache of this plan and these shapes."""
    used = dict.fromkeys(shape for shape in each(shapes, len(plan.layers)) if shape is not None)
    for shape in used:
        for kv_format in plan.formats:
            if reason := misfit(reads, kv_format, shape.head_dim):
                return reason
    if plan.keeps_tokens and not reads.kept:
        return f"{reads.kernels} read packed tokens alone, none in BF16 beside them; leave out the tail and the sinks"
    for shape in used:
        if shape.window is not None and not reads.windows:
            return f"{reads.kernels} read all tokens of a sequence, and a layer has a sliding window of {shape.window:,}"
        if reason := wrong_head_dim(reads, shape.head_dim):
            return reason
    return None


def wrong_head_dim(reads: Reads, head_dim: int) -> str | None:
    """None, or in one sentence which head_dims a backend is made for."""
    if head_dim in reads.head_dims:
        return None
    *others, last = map(str, reads.head_dims)
    made_for = f"a head_dim of {', '.join(others)} or {last}" if others else f"head_dim {last}"
    return f"{reads.kernels} are made for {made_for}, not {head_dim}"


def misfit(reads: Reads, kv_format: KVFormat, head_dim: int) -> str | None:
    """None, or in one sentence why a backend cannot read a format; a head_dim that it is not made for is left out of it."""
    try:
        if kv_format in reads.also or _is_of_numbers(reads, kv_format, head_dim):
            return None
        found = kv_format.description(head_dim)
        of_kind = _is_of_kind(reads, found, head_dim)
    except InputError as error:
        return str(error)
    if found is None or not of_kind:
        *others, last = readable(reads)
        names = f"{', '.join(others)} and {last}" if others else last
        return f"{reads.kernels} read {names}, not {kv_format.name}{ELSEWHERE}"
    return _misfit_of_tables(reads, kv_format.name, found)


def _is_of_numbers(reads: Reads, kv_format: KVFormat, head_dim: int) -> bool:
    """
    Raises:
        InputError: the format has no layout for this head_dim.
    """
    return bool(reads.numbers) and (found := kv_format.numbers(head_dim)) is not None and found.kind in reads.numbers


def _is_of_kind(reads: Reads, found: Description | None, head_dim: int) -> bool:
    """Whether the kernels could read it at all, whatever its tables."""
    if found is None or found.scale_dtype != reads.scale_dtype or (found.transform.coordinates and reads.learned is None):
        return False
    if tuple(plane.bits for plane in found.planes) not in reads.planes:
        return False
    return bool(found.transform.coordinates) or reads.only is None or found == reads.only.description(head_dim)


def _misfit_of_tables(reads: Reads, name: str, found: Description) -> str | None:
    if found.transform.coordinates and reads.learned and found.levels not in (taken := reads.learned(found.head_dim)):
        return f"{reads.kernels} take {taken[0]} to {taken[-1]} learned nibbles in steps of {taken.step}, not {found.levels}"
    if (order := reads.order) and any(plane.order != order(found.levels, plane.bits) for plane in found.planes):
        return f"{reads.kernels} read another order of coordinates than {name} has"
    if reads.in_one_order and not reads.in_one_order(found):
        return f"{reads.kernels} read planes of one order of coordinates, and {name} has planes of several"
    if reads.matrix_dtype and found.transform.dtype != reads.matrix_dtype:
        return f"{reads.kernels} rotate by a matrix of {reads.matrix_dtype}, and that of {name} is {found.transform.dtype}"
    if reads.quantizer and found.quantizer != reads.quantizer:
        return f"{reads.kernels} quantize by {reads.quantizer}, and {name} by {found.quantizer}"
    return None


def readable(reads: Reads) -> list[str]:
    """Names of the formats that a backend reads, at some head_dim at least."""
    return [name for name in formats.names() if any(_readable_at(reads, name, head_dim) for head_dim in reads.head_dims)]


def _readable_at(reads: Reads, name: str, head_dim: int) -> bool:
    kv_format = formats.get(name)
    try:
        if kv_format in reads.also or _is_of_numbers(reads, kv_format, head_dim):
            return True
        return _is_of_kind(reads, kv_format.description(head_dim), head_dim)
    except InputError:  # it has no layout for this head_dim
        return False
