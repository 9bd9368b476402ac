"""The op tables of `op_contract` as tests open them, and the caches that their tests share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from op_contract import caches
from op_contract.caches import CacheCase as Case
from op_contract.suite import CPU, CUDA, Table
from torch import Tensor

from haarkv.tq_ops.cpu.build import compiler
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable

LAYER = caches.LAYER
OTHER_CPU = "this CPU has no"


def open_table(table: Table) -> OpTable:
    """The table, or a skip with the reason why it cannot run here."""
    if reason := table.missing():
        # With a compiler the package builds the kernels as it is installed: then their absence is a failure.
        if table in CPU and compiler() is not None and not reason.startswith(OTHER_CPU):
            pytest.fail(reason)
        pytest.skip(reason)
    return table.open()


# Of a table whose instructions this CPU lacks, `test_op_tables` says so once, and no other test is made.
TABLES: tuple[Table, ...] = tuple(
    replace(table, open=partial(open_table, table)) for table in CPU if not (table.missing() or "").startswith(OTHER_CPU)
)
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
# On a card the contract alone says what is stored.
_INTERPRETED = [replace(CUDA, open=partial(open_table, CUDA))] if CUDA.interpreted and not CUDA.missing() else []
every_storing_table = pytest.mark.parametrize("table", [*TABLES, *_INTERPRETED], ids=lambda table: table.name)


def filled(case: Case) -> tuple[PagedKVCache, Batch]:
    """As `caches.fill_cache`, on the host; what a test then draws is the same each time, too."""
    torch.manual_seed(0)
    return caches.fill_cache(case)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest distance of a vector [..., D], relative to its length."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
