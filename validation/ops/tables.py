"""The op tables of this project, where each can run, and which caches it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import cast

import torch

from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cuda import layout as cuda_layout
from haarkv.tq_ops.cuda.available import unavailable
from haarkv.tq_ops.cuda.block_planes import PLANES
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.table import OpTable


@dataclass(frozen=True)
class Table:
    """One op table.

    Attributes:
        interpreted: it runs, but slowly: in Triton's interpreter.
        missing: None, or why it cannot run here.
        open: the table itself, where it can run.
        reads: None, or why it cannot read a cache of this plan and shape.
        blocks: types of quantised blocks, by name, that cases multiply with; the interpreter of `cuda` would take minutes.
    """

    name: str
    device: torch.device
    interpreted: bool
    missing: Callable[[], str | None]
    open: Callable[[], OpTable]
    reads: Callable[[KVPlan, KVShape], str | None]
    blocks: tuple[str, ...] = ()

    def unsupported(self, plan: KVPlan, head_dim: int) -> str | None:
        """None, or why the table cannot read such a cache, be it the table's reason or the format's own."""
        try:
            described = [kv_format.description(head_dim) for kv_format in plan.formats]
            # Learned coordinates are of as many KV heads as they were learned of.
            heads = {found.transform.heads for found in described if found} - {None}
            shape = KVShape(next(iter(heads), None) or 1, head_dim)
            plan.require_layout(shape)
        except InputError as error:
            return str(error)
        return self.reads(plan, shape)


def _reference() -> OpTable:
    return cast(OpTable, reference)


def _cuda() -> OpTable:
    from haarkv.tq_ops.cuda import ops

    return cast(OpTable, ops)


@cache
def _cpu(isa: str) -> OpTable:
    from haarkv.tq_ops.cpu.ops import CpuOps

    return CpuOps(isa)


def _no_isa(isa: str) -> str | None:
    try:
        return None if isa in library.isas() else f"this CPU has no {isa}"
    except library.KernelsMissingError as error:
        return str(error)


_HOST = torch.device("cpu")
_GPU = torch.cuda.is_available()
REFERENCE = Table("reference", _HOST, False, lambda: None, _reference, lambda _plan, _shape: None, library.BLOCKS)
CPU = tuple(
    Table(
        f"cpu-{isa}", _HOST, False, partial(_no_isa, isa), partial(_cpu, isa), partial(unsupported, cpu_layout.READS),
        library.BLOCKS,
    )
    for isa in library.ISAS
)  # fmt: skip
CUDA = Table(
    "cuda",
    torch.device("cuda") if _GPU else _HOST,
    not _GPU,
    unavailable,
    _cuda,
    partial(unsupported, cuda_layout.READS),
    tuple(PLANES) if _GPU else (),
)
TABLES = (REFERENCE, *CPU, CUDA)
"""Every op table, the reference first."""
