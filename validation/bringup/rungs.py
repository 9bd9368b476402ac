"""The rungs, each against the host: the smallest kernel, storing K and V, layers in one mode at a time, greedy text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.npu.device import Runner
from haarkv.tq_ops.npu.first_programs import StoreByProgram, add, look_up, product
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.bringup.result import Drift, Found, Table
from haarkv.validation.bringup.workbench import Workbench
from haarkv.validation.fidelity.evaluation import common_prefix
from haarkv.validation.fidelity.greedy_diff import GreedyDiff, greedy_diff
from haarkv.validation.layers.forward import Forward, Schedule
from haarkv.validation.layers.parts import snapshot
from haarkv.validation.layers.report import LayerRow, Mode, Report
from haarkv.validation.layers.runner import count_rows, validate, validate_layer
from haarkv.validation.ops.caches import CacheCase
from haarkv.validation.ops.cases import BF16, Plain, Store

# -- The smallest kernel, and storing K and V --------------------------------------------------------------------------
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
    said = finding.fault or f"silu_mul: {100 * finding.share:.3g} % of what honest runs allow"
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


def smallest_product(bench: Workbench) -> Found:
    """A product by a cube core, bit for bit: its sums are exact in any order."""
    if bench.programs is None:
        return Found(None, _NOTHING)
    ours, expected = product(bench.programs)
    wrong = (ours != expected).nonzero()  # NaN is not equal to itself
    if len(wrong):
        row, column = wrong[0].tolist()
        said = (
            f"x @ y.T is wrong in {len(wrong):,} of {ours.numel():,} numbers: the first is {ours[row, column].item():g} "
            f"and not {expected[row, column].item():g}"
        )
        return Found(False, said, ours.numel(), where=f"({row}, {column})")
    return Found(True, f"x @ y.T: {ours.numel():,} numbers equal bit for bit", ours.numel())


def every_byte(bench: Workbench) -> Found:
    """Each byte of `tq4` in each column, restored to its two centroids bit for bit: FP16 has to round as IEEE's does."""
    if bench.programs is None:
        return Found(None, _NOTHING)
    codes, ours, expected = look_up(bench.programs)
    wrong = (ours != expected).nonzero()  # NaN is not equal to itself
    if len(wrong):
        row, column = wrong[0].tolist()
        byte = int(codes[row, column % codes.shape[1]])
        said = (
            f"byte 0x{byte:02x} became {ours[row, column].item():g} and not {expected[row, column].item():g}; "
            f"{len(wrong):,} of {ours.numel():,} centroids are wrong"
        )
        return Found(False, said, ours.numel(), "centroids", where=f"row {row}, column {column}")
    different = len(set(codes.flatten().tolist()))
    return Found(True, f"{different} bytes: {ours.numel():,} centroids equal bit for bit", ours.numel(), "centroids")


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
    # K and V of a cache may have different formats; a store takes one at a time, and learned ones are of keys alone.
    names = dict.fromkeys(kv_format.name for plan in bench.plans.values() for kv_format in plan.formats)
    for kv in (f"k={name},v=tq4" if formats.needs_calibration(name) else name for name in names):
        case = Store(CacheCase(kv, bench.config.heads.head_dim, 1, _HEADS, _BLOCK, _STORED, _NEW))
        finding = case.check(table, device)
        compared += 2 * sum(_NEW) * _HEADS * bench.config.heads.head_dim
        if not finding.passed:
            problem = finding.fault or f"{finding.share:.2g} times what honest runs allow"
            return Found(False, f"{kv}: {problem}", compared, "levels", where=kv)
        said.append(f"{kv}: levels and lengths at {100 * finding.share:.3g} % of what honest runs allow")
    return Found(True, f"{'; '.join(said)}; no other slot changed", compared, "levels")


def _storing(bench: Workbench) -> tuple[OpTable | None, torch.device]:
    """A table whose `store_kv` is the executor's own."""
    if bench.programs is not None:
        ops = with_ops(cast(OpTable, reference), {"store_kv": StoreByProgram(bench.programs)})
        return ops, bench.programs.device
    executor = bench.executor(bench.first_layer, next(iter(bench.plans.values())))
    return executor.ops, executor.device


# -- Layers ------------------------------------------------------------------------------------------------------------
_HEAD = ("head", "forward")


def held(bench: Workbench, model: DecoderModel, mode: Mode) -> Found:
    """Each format's validation in one mode, up to the first that fails.

    Args:
        model: the whole one, or its first layer alone.
        mode: teacher-forced, every layer is fed the reference's input and cache: who is wrong. Free-running, it is fed what
            the executor made of the layer before: how errors grow; and whole forwards run, with norm and LM head.
    """
    needs_head = mode == "free-running"
    lines: dict[str, dict[int, float]] = {}
    rows: list[tuple[str, ...]] = []
    compared = 0
    for kv in bench.plans:
        report = _report(bench, model, kv, mode)
        compared += len(report.rows)
        lines[kv] = {layer: row.hidden_cos for layer, row in report.worst(mode).items()}
        rows.append(_row(kv, report))
        tables = (Table("The worst of all forwards", _COLUMNS, tuple(rows)),)
        drifts = (_drift(mode, lines),) if model.config.num_layers > 1 else ()
        if not report.passed or (needs_head and not any(stage.stage in _HEAD for stage in report.stages)):
            where, said = _fault(report)
            return Found(False, f"{kv}: {said}", compared, "rows", f"{kv}, {where}", tables=tables, drifts=drifts)
    worst = min(value for line in lines.values() for value in line.values())
    said = f"{', '.join(lines)}: {compared} rows without a fault, lowest cosine {worst:.7f}"
    return Found(True, said, compared, "rows", tables=tables, drifts=drifts)


def _report(bench: Workbench, model: DecoderModel, kv: str, mode: Mode) -> Report:
    # Cores that race give another result now and then.
    repeats = bench.repeats if model is bench.first_layer and mode == "teacher-forced" else 0
    plan = _of_layers(bench.plans[kv], model.config.num_layers)
    executor, token_ids = bench.executor(model, plan), bench.token_ids()
    total, done = count_rows(token_ids, bench.steps, plan, 1), 0

    def on_row(row: LayerRow) -> None:
        nonlocal done
        done += 1
        bench.tell(f"{kv}, {row.phase} {row.step}, layer {row.layer}: {done} of {total}")

    return validate(ReferenceExecutor(model), executor, model, token_ids, bench.steps, plan, on_row, [mode], repeats)


def _fault(report: Report) -> tuple[str, str]:
    """Where a report fails, and why."""
    found = report.first_divergence
    if found is None or not found.fails:
        return "the whole forward", "some row was not compared, or the head was not reached"
    where = f"layer {found.layer}, {found.stage}" if found.layer is not None else found.stage
    return where, f"{where} in {found.phase} {found.step}: {found.detail}"


# Tokens of the longest sequence behind a whole step of keys, and of a short one beside it.
_BEYOND, _FEW = 53, 17
# Times which K and V behind the first step are as long: the maximum grows there, and what is read there decides.
_LOUDER = (2.0, 8.0)


def long_decode(bench: Workbench) -> Found:
    """One decode step of the first layer in each format, over so many random K and V that it takes a second step of keys."""
    step = bench.executor(bench.first_layer, _of_layers(next(iter(bench.plans.values())), 1)).decode_step
    if step is None:
        return Found(None, "its decode takes no steps of keys")
    if step + _BEYOND > bench.longest:
        return Found(None, f"this model has room for {bench.longest:,} tokens, and a step takes {step:,}", lacking="room")
    rows: list[tuple[str, ...]] = []
    for kv in bench.plans:
        bench.tell(f"{kv}, decode behind {step + _BEYOND:,} tokens")
        report = _over(bench, _of_layers(bench.plans[kv], 1), (step + _BEYOND, _FEW))
        rows.append(_row(kv, report))
        tables = (Table("The worst of all forwards", _COLUMNS, tuple(rows)),)
        if not report.passed:
            where, said = _fault(report)
            return Found(False, f"{kv}: {said}", len(rows), "rows", f"{kv}, {where}", tables=tables)
    said = f"{', '.join(bench.plans)}: a decode step behind {step + _BEYOND:,} and {_FEW} tokens, no fault"
    return Found(True, said, len(rows), "rows", tables=tables)


def _over(bench: Workbench, plan: KVPlan, lengths: Sequence[int]) -> Report:
    """A decode step of the first layer behind so many stored tokens of each sequence."""
    model, step = bench.first_layer, lengths[0] - _BEYOND
    schedule = Schedule([[0] * (length + 1) for length in lengths], 0, plan)
    cache, paging, generator = schedule.new_cache(model), schedule.paging(), torch.Generator().manual_seed(0)
    heads = model.config.heads
    for begin in range(0, max(lengths), piece := cache.most_new_tokens or schedule.chunk):
        counts = {row: min(piece, length - begin) for row, length in enumerate(lengths) if length > begin}
        batch = schedule.batch(paging, list(counts), list(counts.values()))
        louder = (batch.positions >= step).view(-1, 1, 1)
        k, v = (
            torch.randn(len(batch.positions), heads.num_kv_heads, heads.head_dim, generator=generator)
            * (1 + (by - 1) * louder)
            for by in _LOUDER
        )
        cache.write(0, k, v, batch)
    ids = torch.arange(len(lengths))
    forward = Forward("decode", 0, ids, schedule.batch(paging, ids.tolist(), [1] * len(lengths)))
    reference, executor = ReferenceExecutor(model), bench.executor(model, plan)
    return validate_layer(reference, executor, model, plan, 0, model.embed(ids), snapshot(cache, 0), forward)


def _of_layers(plan: KVPlan, count: int) -> KVPlan:
    """The plan of the first so many layers."""
    return replace(plan, layers=plan.layers[:count])


_COLUMNS = (
    "format", "rows", "K levels equal", "V levels equal", "of what is allowed", "lowest cosine", "rel. L2", "same next token",
)  # fmt: skip


def _row(kv: str, report: Report) -> tuple[str, ...]:
    rows = report.rows
    levels = [[share for row in rows if (share := getattr(row, name)) is not None] for name in ("k_match", "v_match")]
    same, predictions = (sum(getattr(row, name) for row in report.logits) for name in ("same_token", "predictions"))
    return (
        kv, str(len(rows)), *(f"{100 * min(of_side):.3f} %" for of_side in levels),
        f"{100 * max(r.share for r in rows):.3g} %", f"{min(r.hidden_cos for r in rows):.7f}", f"{max(r.rel_l2 for r in rows):.2e}",
        f"{same} of {predictions}" if predictions else "–",
    )  # fmt: skip


def _drift(mode: Mode, lines: dict[str, dict[int, float]]) -> Drift:
    """1 - cosine by layer; JSON has no NaN, so one becomes the largest."""
    distance = {kv: {at: 1 - cos if math.isfinite(cos) else 2.0 for at, cos in line.items()} for kv, line in lines.items()}
    return Drift(f"1 − lowest cosine of a token's hidden state, {mode}", distance, None)


# -- Greedy text -------------------------------------------------------------------------------------------------------
_SHOWN = 100
_TEXT_COLUMNS = ("format", "tokens like the reference's", "positions", "near ties", "KL from the reference", "text")


def greedy_text(bench: Workbench) -> Found:
    """The executor's text in each format against the reference's in the same; formats beside one another."""
    rows: list[tuple[str, ...]] = []
    texts: dict[str, list[int]] = {}
    compared = 0
    for kv, plan in bench.plans.items():
        executor = bench.executor(bench.model, plan)
        trusted, on_trial = (bench.session(one, plan) for one in (ReferenceExecutor(bench.model), executor))
        diff = greedy_diff(
            trusted, on_trial, bench.prompts, dtype=bench.dtype, max_new_tokens=bench.new_tokens,
            on_step=partial(_tell, bench, kv),
        )  # fmt: skip
        compared += diff.fidelity.positions
        texts[kv] = diff.prompts[0].b.token_ids
        rows.append(_text_row(kv, diff))
        tables = (Table("Texts of the executor", _TEXT_COLUMNS, tuple(rows)), *_beside(texts))
        if diff.faulty:
            prompt, position = diff.unexplained[0]
            where = f"{kv}, prompt {prompt + 1}, new token {position + 1}"
            said = f"{where}: another token than the reference's, and no near tie"
            return Found(False, said, compared, "positions", where, tables=tables)
    said = f"{', '.join(texts)}: the reference's tokens but for near ties, {compared} positions"
    return Found(True, said, compared, "positions", tables=tables)


def _tell(bench: Workbench, kv: str, what: str) -> None:
    bench.tell(f"{kv}: {what}")


def _text_row(kv: str, diff: GreedyDiff) -> tuple[str, ...]:
    same = sum(common_prefix(row.a.token_ids, row.b.token_ids) for row in diff.prompts)
    generated = sum(len(row.a.token_ids) for row in diff.prompts)
    measured = diff.fidelity
    return (
        kv, f"{same} of {generated}", str(measured.positions), str(diff.near_ties), f"{measured.kl_mean:.1e}",
        repr(diff.prompts[0].text_b[:_SHOWN]),
    )  # fmt: skip


def _beside(texts: dict[str, list[int]]) -> tuple[Table, ...]:
    """How far each format's text goes with the first one's; between formats a difference is no fault."""
    first, *others = texts
    if not others:
        return ()
    rows = tuple((kv, f"{common_prefix(texts[first], texts[kv])} of {len(texts[first])}") for kv in others)
    return (Table(f"New tokens before another one than {first}'s", ("format", "tokens"), rows),)
