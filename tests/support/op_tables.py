"""The op tables that must do what the reference does, where each can run, and the caches that their tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from small_models import cache_tensors
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.build import compiler
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.pages import page_bytes
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OpTable


@dataclass(frozen=True)
class Backend:
    """One table to test.

    Attributes:
        name: of the test.
        device: where its tensors live.
        open: the table, or a skip with the reason why it cannot run here.
    """

    name: str
    device: str
    open: Callable[[], OpTable]


def _cpu(isa: str) -> Callable[[], OpTable]:
    def open_isa() -> OpTable:
        # With a compiler the package builds the kernels as it is installed: then their absence is a failure.
        if compiler() is None:
            pytest.skip("no C++ compiler, so no CPU kernels")
        if isa not in library.isas():
            pytest.skip(f"this CPU has no {isa}")
        return CpuOps(isa)

    return open_isa


TABLES = tuple(Backend(f"cpu-{isa}", "cpu", _cpu(isa)) for isa in library.ISAS)
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


# -- Caches to attend to -------------------------------------------------------------------------------------------------
LAYER = 1
"""Of every case: not the first, so that a layer's own rotation counts."""


@dataclass(frozen=True)
class Case:
    """One attention: `stored` tokens of each sequence, then `new` ones with queries of these dtypes."""

    kv: str
    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    stored: tuple[int, ...]
    new: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    pages: bool = False  # the cache lies in pages of another owner, which are apart

    def __str__(self) -> str:
        name = f"{self.kv}-d{self.head_dim}-gqa{self.group}-{len(self.new)}x{max(self.stored)}-block{self.block_size}"
        return name + "-pages" * self.pages


def poisoned_cache(case: Case, device: torch.device | str = "cpu") -> PagedKVCache:
    """A cache whose every slot holds the highest levels at scale NaN, so that reading one that was not written shows."""
    blocks = sum(-(-(s + n) // case.block_size) for s, n in zip(case.stored, case.new, strict=True)) + 2
    plan = KVSpec(case.kv).plan(LAYER + 1)
    shape = {"num_kv_heads": case.kv_heads, "head_dim": case.head_dim, "block_size": case.block_size}
    # Another layer's pages lie between.
    pages = torch.empty(blocks, 2, page_bytes(plan.layers[LAYER], **shape), dtype=torch.uint8, device=device)
    made = PagedKVCache(plan, num_blocks=blocks, device=device, pages={LAYER: pages[:, 1]} if case.pages else None, **shape)
    for _, _, name, tensor in cache_tensors(made):
        tensor.fill_(float("nan") if name == "scale" else 255)
    return made


def filled(case: Case) -> tuple[PagedKVCache, Batch]:
    """A cache on the host with everything stored by the reference, its blocks permuted, and the batch of the new tokens."""
    torch.manual_seed(0)
    made = poisoned_cache(case)
    paging = PagedSequences(made.num_blocks, case.block_size, order=torch.randperm(made.num_blocks).tolist())
    ids = [paging.add() for _ in case.new]
    older = [(i, n) for i, n in zip(ids, case.stored, strict=True) if n]
    for pairs in filter(None, [older, list(zip(ids, case.new, strict=True))]):
        batch = paging.batch(*zip(*pairs, strict=True))
        k, v = torch.randn(2, len(batch.positions), case.kv_heads, case.head_dim)
        reference.store_kv(k, v, made, LAYER, batch)
    return made, batch


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest distance of a vector, relative to its length."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
