"""The rungs below a layer: the smallest kernel, and storing K and V, each against the host."""

from __future__ import annotations

from typing import Any, cast

import torch

from haarkv.tq_ops import reference
from haarkv.tq_ops.npu.device import Runner
from haarkv.tq_ops.npu.first_programs import StoreByProgram, add
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.bringup.result import Found
from haarkv.validation.bringup.workbench import Workbench
from haarkv.validation.ops.caches import CacheCase
from haarkv.validation.ops.cases import BF16, Plain, Store

_ROWS = 512
# Two sequences whose tokens fill no tile, one of them behind others.
_NEW, _STORED = (9, 21), (0, 120)
_HEADS, _BLOCK = 2, 128
_NOTHING = "this executor runs whole graphs: it has no kernel to call alone"


def smallest_kernel(bench: Workbench) -> Found:
    """A sum by a program, bit for bit; of an executor with an op table its simplest op."""
    if bench.programs is not None:
        return _add(bench.programs)
    executor = bench.executor(bench.first_layer, next(iter(bench.plans.values())))
    if executor.ops is None:
        return Found(None, _NOTHING)
    case = Plain("silu_mul", (_ROWS, 1100), BF16)
    finding = case.check(executor.ops, executor.device)
    said = finding.fault or f"silu_mul: largest relative error {finding.error:.1e}, bound {finding.bound:.1e}"
    return Found(finding.passed, said, _ROWS * 1100, facts={"runs on": executor.description})


def _add(runner: Runner) -> Found:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(_ROWS, 128, generator=generator) for _ in "xy")
    wrong = (add(runner, x, y) != x + y).nonzero()  # NaN is not equal to itself
    facts = {"runs on": _device_name(runner)}
    if len(wrong):
        first = tuple(wrong[0].tolist())
        return Found(
            False, f"x + y is wrong in {len(wrong):,} of {x.numel():,} numbers", x.numel(), where=f"{first}", facts=facts
        )
    return Found(True, f"x + y: {x.numel():,} numbers equal bit for bit", x.numel(), facts=facts)


def _device_name(runner: Runner) -> str:
    """What the device calls itself, where torch's module for it can tell."""
    module: Any = getattr(torch, runner.device.type, None)
    named = getattr(module, "get_device_name", None)
    return f"{runner.description} ({named(runner.device)})" if named else runner.description


def store(bench: Workbench) -> Found:
    """K and V of awkward lengths into an untouched cache: levels, lengths, and slots of no token."""
    table, device = _storing(bench)
    if table is None:
        return Found(None, _NOTHING)
    said, compared = [], 0
    # K and V of a cache may have different formats; a store takes one at a time.
    for kv in dict.fromkeys(kv_format.name for plan in bench.plans.values() for kv_format in plan.formats):
        case = Store(CacheCase(kv, bench.config.heads.head_dim, 1, _HEADS, _BLOCK, _STORED, _NEW))
        finding = case.check(table, device)
        compared += 2 * sum(_NEW) * _HEADS * bench.config.heads.head_dim
        if not finding.passed:
            problem = finding.fault or f"a vector's length is off by {finding.error:.1e}, bound {finding.bound:.1e}"
            return Found(False, f"{kv}: {problem}", compared, "levels", where=kv)
        said.append(f"{kv}: no level unexplained, lengths within {finding.error:.1e} (bound {finding.bound:.1e})")
    return Found(True, f"{'; '.join(said)}; no other slot changed", compared, "levels")


def _storing(bench: Workbench) -> tuple[OpTable | None, torch.device]:
    """A table whose `store_kv` is the executor's own."""
    if bench.programs is not None:
        ops = with_ops(cast(OpTable, reference), {"store_kv": StoreByProgram(bench.programs)})
        return ops, bench.programs.device
    executor = bench.executor(bench.first_layer, next(iter(bench.plans.values())))
    return executor.ops, executor.device
