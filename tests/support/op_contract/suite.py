"""The op tables of this project, the caches that each reads, and the cases of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import cast

import torch

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cuda import layout as cuda_layout
from haarkv.tq_ops.cuda.available import unavailable
from haarkv.tq_ops.cuda.block_planes import PLANES
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.kv.kernel_support import unsupported
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.table import OP_NAMES, OpTable
from op_contract.caches import Attention, CacheCase, Store
from op_contract.cases import BF16, FP32, HOST, Finding, Plain, Product
from op_contract.delta import Delta


# -- Op tables -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """One op table.

    Attributes:
        interpreted: it runs, but slowly: in Triton's interpreter.
        reads: why it cannot read a cache of a plan and shape, or None.
        blocks: names of weight-block types to multiply with; the interpreter of `cuda` would take minutes.
    """

    name: str
    device: torch.device
    interpreted: bool
    missing: Callable[[], str | None]
    open: Callable[[], OpTable]
    reads: Callable[[KVPlan, KVShape], str | None]
    blocks: tuple[str, ...] = ()

    def unsupported(self, plan: KVPlan, head_dim: int) -> str | None:
        """Why the table cannot read such a cache, or None; the reason is its own or the format's."""
        try:
            descriptions = [kv_format.description(head_dim) for kv_format in plan.formats]
            # Learned coordinates are of as many KV heads as they were learned of.
            heads = {description.transform.heads for description in descriptions if description} - {None}
            shape = KVShape(next(iter(heads), None) or 1, head_dim)
            plan.require_layout(shape)
        except InputError as error:
            return str(error)
        return self.reads(plan, shape)


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


_GPU = torch.cuda.is_available()
REFERENCE = Table("reference", HOST, False, lambda: None, lambda: cast(OpTable, reference), lambda *_: None, library.BLOCKS)
CPU = tuple(
    Table(
        f"cpu-{isa}", HOST, False, partial(_no_isa, isa), partial(_cpu, isa), partial(unsupported, cpu_layout.READS),
        library.BLOCKS,
    )
    for isa in library.ISAS
)  # fmt: skip
CUDA = Table(
    "cuda",
    torch.device("cuda") if _GPU else HOST,
    not _GPU,
    unavailable,
    _cuda,
    partial(unsupported, cuda_layout.READS),
    tuple(PLANES) if _GPU else (),
)
TABLES = (REFERENCE, *CPU, CUDA)


# -- Cases ---------------------------------------------------------------------------------------------------------------
HEAD_DIMS = (64, 128, 256)

# Rows and numbers left over of what a kernel reads at once, an odd one too, one item and many.
_PLAIN = {
    "rms_norm": ((1, 64), (3, 5, 80), (2, 1000)),
    "linear": ((1, 64, 3), (1, 1000, 700), (2, 37, 9), (3, 128, 24), (5, 66, 17), (8, 4096, 40), (12, 96, 8), (40, 32, 16)),
    "rope": ((4, 5, 64), (1, 40, 128), (3, 2, 256)),
    "silu_mul": ((2, 1100), (1, 7)),
    "gelu_mul": ((2, 1100), (1, 7)),
    "sigmoid_mul": ((2, 1100), (1, 7)),
}
# One token of each sequence and chunks, heads that share keys, columns that fill no register, a state's first tokens.
DELTAS = (
    Delta(2, 4, 128, 128, (0, 70, 3), (1, 1, 1), small=False),
    Delta(2, 4, 128, 128, (40, 0), (70, 9), small=False),
    Delta(1, 3, 48, 80, (0, 5, 1), (20, 2, 1), small=False),
    Delta(1, 3, 24, 40, (0, 5), (3, 1)),
    Delta(1, 2, 128, 24, (0, 9), (1, 1)),
    Delta(2, 2, 7, 21, (6, 0, 2), (1, 5, 3), taps=3),
    Delta(1, 1, 64, 32, (9,), (1,), taps=2),
)
# Every pair of format, head_dim, group, batch and length, as far as a format has the head_dim.
ATTENTION = (
    CacheCase("tq4", 128, 5, 2, 128, (0, 2, 126, 127, 128, 512), (1, 1, 1, 1, 1, 1)),
    CacheCase("tq4", 128, 1, 3, 128, (2047,), (1,)),
    CacheCase("tq4", 128, 8, 1, 8, (127, 2), (1, 1)),
    CacheCase("tq4", 128, 2, 2, 16, (0, 120), (9, 7)),
    CacheCase("tq4", 64, 1, 1, 128, (2047, 3), (1, 1)),
    CacheCase("tq4", 256, 2, 2, 128, (128, 512, 0), (1, 1, 3)),
    CacheCase("tq4", 256, 5, 1, 24, (0, 40, 100), (11, 1, 2)),
    CacheCase("tq4", 256, 8, 1, 128, (2047,), (1,)),
    CacheCase("tq4", 128, 2, 2, 16, (0, 120), (9, 7), window=40),
    CacheCase("k=tq3,v=bf16", 128, 5, 2, 32, (265, 1), (64, 30), window=200),
    CacheCase("k=fp32,v=tq8", 128, 5, 2, 32, (170, 9), (1, 64), sink=9, window=1),
    CacheCase("tq4", 128, 5, 2, 32, (301, 9), (64, 1), tail=33, sink=3, window=40),
    CacheCase("k=lr4,v=tq3", 128, 5, 2, 32, (30, 265), (64, 1), tail=7, window=200),
    CacheCase("tq4", 128, 5, 2, 16, (0, 126, 300), (3, 1, 1), pages=True),
    CacheCase("tq3", 128, 5, 2, 128, (0, 2, 126, 127, 128, 512), (1, 1, 1, 1, 1, 1)),
    CacheCase("tq2", 128, 5, 2, 128, (1000, 0), (70, 40)),
    CacheCase("k=tq4,v=tq2", 128, 8, 2, 128, (2047, 3), (1, 1)),
    CacheCase("k=tq8,v=tq3", 64, 2, 2, 16, (200, 0), (30, 50)),
    # Learned keys of each width, in columns.
    CacheCase("k=lr4,v=tq3", 128, 5, 2, 128, (0, 2, 126, 127, 128, 1500), (1, 1, 1, 1, 1, 1)),
    CacheCase("k=lr4,v=tq3", 128, 5, 2, 128, (0, 300), (3, 1)),
    CacheCase("k=lr3,v=tq5", 128, 8, 2, 24, (0, 100), (9, 1)),
    CacheCase("k=lr5,v=tq3", 128, 2, 1, 128, (200,), (2,)),
    CacheCase("k=lr2,v=tq5", 64, 5, 2, 16, (0, 60), (17, 1), pages=True),
    CacheCase("k=lr5,v=tq5", 256, 1, 2, 128, (130,), (2,)),
    CacheCase("k=lr2,v=tq4", 128, 5, 2, 128, (130, 7), (1, 2)),
    CacheCase("k=lr4,v=tq4", 128, 2, 2, 16, (40,), (9,)),
    # Across the border of a stretch of keys, beside a tail and in a window.
    CacheCase("k=lr4,v=tq4", 64, 3, 2, 64, (1014, 1054), (40, 1)),
    CacheCase("k=lr4,v=tq4", 64, 3, 2, 64, (1014, 1054), (40, 1), window=300),
    CacheCase("k=lr3,v=tq3", 64, 3, 2, 64, (1014, 1054), (40, 1), tail=40, sink=3),
    CacheCase("k=lr5,v=bf16", 64, 3, 2, 64, (1014, 1054), (40, 1)),
    # Levels wider than 4 bits, and numbers as they are.
    CacheCase("k=bf16,v=tq4", 128, 5, 2, 128, (1500, 0), (1, 9)),
    CacheCase("k=tq6,v=bf16", 128, 8, 1, 16, (130,), (3,), pages=True),
    CacheCase("k=tq5,v=tq8", 256, 2, 2, 24, (40, 0), (1, 7)),
    CacheCase("k=fp32,v=tq4", 128, 5, 2, 16, (40,), (3,), sink=7),
    # Tails and sinks: of every kind of side, over blocks and items; a tail longer than an item, sinks of a whole block.
    CacheCase("tq4", 128, 5, 2, 128, (0, 2, 126, 300, 1500, 1100), (1,) * 6, tail=128, sink=4),
    CacheCase("k=lr4,v=tq3", 128, 5, 2, 128, (0, 300, 1500, 7), (1, 1, 9, 20), tail=128, sink=4),
    CacheCase("k=lr4,v=tq3", 128, 8, 1, 16, (0, 30, 1030), (1, 1, 9), tail=17, sink=20),
    CacheCase("k=bf16,v=tq3", 128, 5, 2, 128, (0, 300), (1, 20), tail=32, sink=4),
    CacheCase("k=fp32,v=bf16", 256, 2, 2, 128, (0, 300), (1, 9), tail=32),
    CacheCase("k=tq8,v=tq2", 64, 1, 2, 24, (1500, 7), (1, 9), tail=1200, sink=30),
)
# Where RoPE turns a part of each key, whose halves are then not those of memory, or how it turns is not known.
BORDER_OF_TURNS = (
    CacheCase("k=lr3,v=tq4", 64, 2, 2, 16, (1021,), (6,), rope_dims=48),
    CacheCase("k=lr3,v=tq4", 64, 2, 2, 16, (1021,), (6,), rope_dims=32),
    CacheCase("k=lr3,v=tq4", 64, 2, 2, 16, (1021,), (6,), tail=9, sink=2, rope_dims=0),
)
# For interpreters, too: of each pair what is quick.
SMALL_ATTENTION = (
    CacheCase("tq4", 128, 5, 2, 128, (0, 2, 126, 127, 128, 512), (1, 1, 1, 1, 1, 1)),
    CacheCase("tq4", 128, 1, 1, 8, (30, 0, 9), (5, 11, 1)),
    CacheCase("tq4", 64, 8, 1, 128, (0, 1, 2, 3, 126, 127, 128, 140), (1,) * 8),
    CacheCase("tq4", 64, 5, 1, 24, (0, 30), (13, 5)),
    CacheCase("tq4", 256, 2, 1, 128, (128, 0), (1, 1)),
    CacheCase("tq4", 64, 5, 2, 128, (0, 130), (1, 1), pages=True),
    CacheCase("tq4", 128, 8, 1, 16, (30, 0), (9, 12)),
    CacheCase("k=tq2,v=tq3", 128, 8, 1, 128, (20,), (12,)),
    CacheCase("k=tq4,v=tq2", 128, 2, 1, 8, (20, 3), (1, 1)),
    CacheCase("tq4", 128, 1, 2, 8, (30,), (5,), pages=True),
    # Tails and sinks: contexts shorter than them and longer, one new token and chunks, rings that begin anew.
    CacheCase("tq4", 64, 5, 2, 16, (0, 3, 4, 12, 60), (1,) * 5, tail=9, sink=4),
    CacheCase("k=tq3,v=tq4", 64, 2, 1, 8, (0, 30, 9), (13, 12, 1), tail=4, sink=2),
    CacheCase("tq4", 64, 8, 1, 16, (40, 0), (9, 3), tail=5),
    CacheCase("tq4", 64, 8, 1, 128, (35,), (9,), sink=6),
    CacheCase("tq4", 128, 8, 1, 128, (150, 2), (1, 1), tail=1, sink=40),
    CacheCase("tq4", 256, 2, 1, 8, (20,), (5,), tail=40, sink=2),
    # Learned keys of each width, chunks and single tokens.
    CacheCase("k=lr4,v=tq3", 128, 5, 2, 128, (126, 0), (1, 1)),
    CacheCase("k=lr3,v=tq3", 64, 2, 2, 8, (20, 3), (2, 1)),
    CacheCase("k=lr3,v=tq4", 64, 2, 2, 16, (7,), (3,), pages=True, tail=4, sink=2),
    CacheCase("k=lr3,v=tq4", 64, 2, 2, 8, (20, 3), (1, 1), tail=4, sink=2),
    CacheCase("k=tq4,v=tq3", 64, 2, 2, 8, (20, 3), (2, 1), tail=4, sink=2),
    CacheCase("k=lr5,v=tq5", 256, 1, 2, 8, (9,), (1,), tail=3),
    # Across the border of a stretch: single tokens, a chunk that begins before it, and beside a tail and sinks.
    CacheCase("k=lr4,v=tq3", 64, 2, 2, 128, (1100, 3), (1, 1)),
    CacheCase("k=lr4,v=tq3", 64, 2, 2, 16, (1022,), (4,)),
    CacheCase("k=lr3,v=tq4", 64, 2, 1, 16, (1040,), (1,), tail=9, sink=3),
    # Two borders behind one token, in blocks that do not divide a stretch; chunks on both sides, few columns and many.
    CacheCase("k=lr4,v=tq4", 64, 2, 1, 128, (2600,), (1,)),
    CacheCase("k=lr3,v=tq3", 64, 2, 2, 24, (2060, 3), (1, 1), tail=9, sink=4),
    CacheCase("k=lr4,v=tq4", 64, 2, 1, 16, (1022, 30), (5, 1)),
    CacheCase("k=lr5,v=tq2", 64, 8, 1, 128, (1020,), (8,)),
    *BORDER_OF_TURNS,
    # Windows that begin before a border and behind it, whose first tile is not a stretch's first.
    CacheCase("k=lr4,v=tq4", 64, 2, 1, 16, (1030, 3), (1, 1), window=40),
    CacheCase("k=lr4,v=tq4", 64, 2, 1, 16, (1080, 1030), (3, 2), tail=8, window=40),
    # Sequences shorter than a window and longer, rings that began anew; one new token, some, and many columns.
    CacheCase("tq4", 64, 2, 1, 8, (60, 3), (1, 1), window=20),
    CacheCase("tq4", 64, 2, 2, 8, (60, 3, 300), (4, 2, 1), window=20),
    CacheCase("tq4", 64, 8, 1, 8, (60, 3), (8, 1), window=20),
    CacheCase("tq4", 64, 2, 1, 8, (70, 0), (1, 1), window=1),
    # A window that begins within a block, in blocks of several tiles; over all blocks of another owner; of Gemma's shape.
    CacheCase("tq3", 64, 2, 1, 128, (300, 130), (1, 1), window=140),
    CacheCase("tq4", 64, 2, 1, 8, (60, 3), (4, 2), pages=True, window=20),
    CacheCase("tq4", 256, 4, 1, 128, (600, 3), (1, 1), window=512),
    # A tail within a window, one beyond it, and sinks that it has left.
    CacheCase("tq4", 64, 2, 1, 8, (60, 3), (1, 1), tail=5, sink=2, window=20),
    CacheCase("tq4", 64, 2, 1, 8, (60, 30), (4, 2), tail=5, sink=2, window=20),
    CacheCase("k=lr3,v=tq4", 64, 2, 2, 16, (60, 30), (4, 1), tail=25, sink=2, window=20),
)
STORES = (
    CacheCase("tq4", 64, 1, 3, 8, (0, 0), (11, 4)),
    CacheCase("tq4", 128, 1, 8, 128, (0, 0, 0), (1, 1, 1)),
    CacheCase("tq4", 128, 1, 9, 16, (0,), (40,)),
    CacheCase("tq4", 256, 1, 2, 128, (0,), (5,)),
    CacheCase("tq4", 128, 1, 2, 16, (0, 0), (40, 3), pages=True),
    CacheCase("k=lr4,v=tq3", 128, 1, 8, 128, (0, 0), (1, 30)),
    CacheCase("k=lr3,v=tq5", 128, 1, 2, 8, (0,), (12,), pages=True),
    CacheCase("k=lr5,v=tq3", 64, 1, 9, 16, (0,), (11,)),
    CacheCase("k=lr2,v=tq5", 256, 1, 1, 16, (0,), (5,)),
    CacheCase("k=lr2,v=tq4", 128, 1, 3, 16, (0,), (20,)),
    CacheCase("k=lr3,v=tq3", 128, 1, 3, 16, (0,), (4,)),
    CacheCase("k=tq3,v=tq2", 128, 1, 3, 16, (0,), (20,)),
    CacheCase("k=tq5,v=tq6", 64, 1, 3, 8, (0, 0), (11, 4), pages=True),
    CacheCase("k=bf16,v=tq8", 256, 1, 2, 16, (0,), (12,)),
    CacheCase("k=tq6,v=fp32", 256, 1, 3, 64, (0, 0), (64, 130), pages=True, tail=100, sink=5),
)
SMALL_STORES = (
    CacheCase("tq4", 64, 1, 3, 8, (0, 0), (11, 4)),
    CacheCase("tq4", 256, 1, 1, 24, (0,), (5,)),
    CacheCase("tq4", 64, 1, 3, 8, (0, 0), (11, 4), pages=True),
    CacheCase("tq4", 64, 1, 3, 8, (0, 30, 12, 5), (11, 9, 1, 2), tail=4, sink=3),
    CacheCase("k=tq4,v=tq3", 64, 1, 2, 8, (0, 40), (3, 2), sink=2),
    CacheCase("tq4", 128, 1, 2, 16, (7, 40), (1, 1), tail=9),
    CacheCase("k=lr4,v=tq3", 128, 1, 2, 8, (0,), (3,), pages=True),
    CacheCase("k=tq4,v=tq5", 64, 1, 2, 8, (0,), (19,), tail=4, sink=3),
    CacheCase("k=lr3,v=tq3", 64, 1, 2, 16, (0, 30, 12), (11, 9, 1), tail=9, sink=3),
    # Both sides of the border of a stretch.
    CacheCase("k=lr4,v=tq3", 64, 1, 2, 16, (1022,), (4,)),
    *BORDER_OF_TURNS,
)


# One token and few, which meet each row as it is unpacked, and many, over which panels pass; groups of blocks cut short.
_PRODUCTS = ((1, 1536, 33), (1, 2560, 7), (5, 512, 40), (40, 1792, 33))
OpCase = Plain | Attention | Store | Delta | Product


def block_cases(table: Table) -> Iterator[OpCase]:
    """Products with every type of weight block that a table multiplies with."""
    for kind in table.blocks:
        for sizes in _PRODUCTS:
            yield from (Product(kind, *sizes, dtype) for dtype in (FP32, BF16))


def named_cases() -> Iterator[OpCase]:
    for op in OP_NAMES:
        for shape in _PLAIN.get(op, ()):
            for dtype in (FP32, BF16) if op != "rope" else (FP32,):
                yield Plain(op, shape, dtype)
    for cache_case in STORES:
        yield from (Store(cache_case, dtype) for dtype in (FP32, BF16))
    yield from (Store(cache_case, small=True) for cache_case in SMALL_STORES)
    for cache_case in ATTENTION:
        yield from (Attention(cache_case, dtype) for dtype in (FP32, BF16))
    for cache_case in SMALL_ATTENTION:
        yield from (Attention(cache_case, dtype, small=True) for dtype in (FP32, BF16))
    yield from DELTAS


def format_cases(table: Table) -> Iterator[OpCase]:
    """Storing and attending in every format and head_dim that the table reads, so that a new format is tested unnamed."""
    for name in (*formats.names(), *(f"k=lr{bits},v=tq4" for bits in COLUMNS)):
        for head_dim in HEAD_DIMS:
            cache_case = CacheCase(name, head_dim, 1, 2, 8, (0,), (3,))
            if table is not REFERENCE and table.unsupported(cache_case.plan, head_dim) is None:
                yield Store(cache_case, small=True)
                yield Attention(CacheCase(name, head_dim, 2, 1, 8, (11,), (2,)), FP32, small=True)


def cases(table: Table) -> list[OpCase]:
    """Everything that a table reads, in an interpreter its small cases."""
    all_cases = dict.fromkeys((*named_cases(), *format_cases(table), *block_cases(table)))
    return [
        case for case in all_cases
        if (case.small or not table.interpreted)
        and (case.plan is None or case.head_dim is None or table.unsupported(case.plan, case.head_dim) is None)
    ]  # fmt: skip


def run(table: Table, selection: Sequence[OpCase] | None = None) -> Iterator[tuple[OpCase, Finding]]:
    ops = table.open()
    for case in cases(table) if selection is None else selection:
        yield case, case.check(ops, table.device)
