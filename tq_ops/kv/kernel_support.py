"""Which caches a backend's kernels read, as data, and the function that compares this with the plan of a cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.rotated import Description
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import Shapes, each

ELSEWHERE = "; --executor cpu and reference run every format"
"""Ends a sentence on a format that a backend does not read."""


@dataclass(frozen=True)
class KernelSupport:
    """The caches that a backend's kernels read.

    Attributes:
        kernels: the kernels' name in error messages, such as "its kernels".
        bits: supported widths of a level.
        only: the only rotated format, if its tables are built into the kernels; None if kernels read any tables.
        also: further formats, compared by identity.
        plain: supported dtypes of unquantized numbers.
        bf16_tokens: whether the kernels read residual windows.
        windows: whether the kernels support sliding windows.
        learned: whether the kernels read learned keys.
    """

    kernels: str
    head_dims: tuple[int, ...]
    bits: tuple[int, ...] = (4,)
    only: KVFormat | None = None
    also: tuple[KVFormat, ...] = ()
    plain: tuple[torch.dtype, ...] = ()
    bf16_tokens: bool = False
    windows: bool = False
    learned: bool = False

    def built_in(self, head_dim: int) -> Description:
        """The description of `only`, whose tables are built into the kernels."""
        description = self.only.description(head_dim) if self.only else None
        assert description is not None, f"{self.kernels} hold no format's tables"
        return description


def unsupported(reads: KernelSupport, plan: KVPlan, shapes: Shapes, *, others: bool = False) -> str | None:
    """Why a backend cannot read a cache of this plan and these shapes, in one sentence; None if it can.

    Args:
        others: whether layers in other formats fall back to the reference's ops.
    """
    kv_shapes = dict.fromkeys(shape for shape in each(shapes, len(plan.layers)) if shape is not None)
    for shape in kv_shapes:
        for kv_format in plan.formats:
            if not others and (reason := unsupported_format(reads, kv_format, shape.head_dim)):
                return reason
    if plan.has_windows and not reads.bf16_tokens:
        return f"{reads.kernels} read packed tokens alone, none in BF16 beside them; leave out the tail and the sinks"
    for shape in kv_shapes:
        if shape.window is not None and not reads.windows:
            return f"{reads.kernels} read all tokens of a sequence, and a layer has a sliding window of {shape.window:,}"
        if reason := wrong_head_dim(reads, shape.head_dim):
            return reason
    return None


def wrong_head_dim(reads: KernelSupport, head_dim: int) -> str | None:
    """None if the kernels support a head_dim; else one sentence with the supported ones."""
    if head_dim in reads.head_dims:
        return None
    *others, last = map(str, reads.head_dims)
    dims_text = f"a head_dim of {', '.join(others)} or {last}" if others else f"head_dim {last}"
    return f"{reads.kernels} are made for {dims_text}, not {head_dim}"


def unsupported_format(reads: KernelSupport, kv_format: KVFormat, head_dim: int) -> str | None:
    """None if the kernels read a format; else the reason in one sentence. `wrong_head_dim` checks head_dim."""
    try:
        if _takes(reads, kv_format, head_dim):
            return None
    except InputError as error:
        return str(error)
    *others, last = readable(reads)
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{reads.kernels} read {names}, not {kv_format.name}{ELSEWHERE}"


def _takes(reads: KernelSupport, kv_format: KVFormat, head_dim: int) -> bool:
    """Whether kernels read a format; an InputError if it has no layout for this head_dim."""
    kv_format.fields(head_dim)
    description = kv_format.description(head_dim)
    if kv_format in reads.also or kv_format.plain in reads.plain:
        return True
    if description is None or description.transform.coordinates:
        return description is not None and reads.learned
    return description.bits in reads.bits and (reads.only is None or description == reads.only.description(head_dim))


def readable(reads: KernelSupport) -> list[str]:
    """Names of the formats that a backend reads at one head_dim or more."""
    names = dict[str, None]()
    for name, head_dim in product(formats.names(), reads.head_dims):
        with suppress(InputError):
            if _takes(reads, formats.get(name), head_dim):
                names[name] = None
    return list(names)
