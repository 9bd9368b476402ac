"""The rungs of a model's layers: `validation.layers`, on one layer and on all of them, in one mode at a time."""

from __future__ import annotations

import math
from dataclasses import replace

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.validation.bringup.result import Drift, Found, Table
from haarkv.validation.bringup.workbench import Workbench
from haarkv.validation.layers.judge import bounds_of
from haarkv.validation.layers.report import LayerRow, Mode, Report
from haarkv.validation.layers.runner import count_rows, validate

_HEAD = ("head", "forward")


def one_layer(bench: Workbench) -> Found:
    """The first layer, fed the embedding of the prompts."""
    return _held(bench, bench.first_layer, "teacher-forced")


def head(bench: Workbench) -> Found:
    """Norm and LM head behind that layer: whole forwards against the head on the executor's own layer."""
    return _held(bench, bench.first_layer, "free-running", needs_head=True)


def teacher_forced(bench: Workbench) -> Found:
    """Every layer, fed the reference's input and cache: who is wrong."""
    return _held(bench, bench.model, "teacher-forced")


def free_running(bench: Workbench) -> Found:
    """Every layer, fed what the executor made of the layer before: how errors grow; and whole forwards."""
    return _held(bench, bench.model, "free-running", needs_head=True)


def _held(bench: Workbench, model: DecoderModel, mode: Mode, *, needs_head: bool = False) -> Found:
    """Each format's validation in one mode, up to the first that fails."""
    lines: dict[str, dict[int, float]] = {}
    rows: list[tuple[str, ...]] = []
    compared = 0
    for kv in bench.plans:
        report = _report(bench, model, kv, mode)
        compared += len(report.rows)
        lines[kv] = {layer: row.hidden_cos for layer, row in report.worst(mode).items()}
        rows.append(_row(kv, report))
        tables = (Table("The worst of all forwards", _COLUMNS, tuple(rows)),)
        drifts = (_drift(mode, lines, bench),) if model.config.num_layers > 1 else ()
        if not report.passed or (needs_head and not any(stage.stage in _HEAD for stage in report.stages)):
            where, said = _fault(report)
            return Found(False, f"{kv}: {said}", compared, "rows", f"{kv}, {where}", tables=tables, drifts=drifts)
    worst = min(value for line in lines.values() for value in line.values())
    said = f"{', '.join(lines)}: {compared} rows within their bounds, lowest cosine {worst:.7f}"
    return Found(True, said, compared, "rows", tables=tables, drifts=drifts)


def _report(bench: Workbench, model: DecoderModel, kv: str, mode: Mode) -> Report:
    plan = replace(bench.plans[kv], layers=bench.plans[kv].layers[: model.config.num_layers])
    executor, token_ids = bench.executor(model, plan), bench.token_ids()
    total, done = count_rows(token_ids, bench.steps, plan, 1), 0

    def on_row(row: LayerRow) -> None:
        nonlocal done
        done += 1
        bench.tell(f"{kv}, {row.phase} {row.step}, layer {row.layer}: {done} of {total}")

    return validate(ReferenceExecutor(model), executor, model, token_ids, bench.steps, plan, on_row, [mode])


def _fault(report: Report) -> tuple[str, str]:
    """Where a report fails, and why."""
    found = report.first_divergence
    if found is None or found.reason != "fault":
        return "the whole forward", "not every row lies within its bounds, or the head was not reached"
    where = f"layer {found.layer}, {found.stage}" if found.layer is not None else found.stage
    return where, f"{where} in {found.phase} {found.step}: {found.detail}"


_COLUMNS = (
    "format", "rows", "K levels equal", "V levels equal", "unexplained", "lowest cosine", "rel. L2", "same next token",
)  # fmt: skip


def _row(kv: str, report: Report) -> tuple[str, ...]:
    rows = report.rows
    same, predictions = (sum(getattr(row, name) for row in report.logits) for name in ("same_token", "predictions"))
    return (
        kv, str(len(rows)), f"{100 * min(r.k_match for r in rows):.3f} %", f"{100 * min(r.v_match for r in rows):.3f} %",
        str(sum(r.unexplained for r in rows)), f"{min(r.hidden_cos for r in rows):.7f}", f"{max(r.rel_l2 for r in rows):.2e}",
        f"{same} of {predictions}" if predictions else "–",
    )  # fmt: skip


def _drift(mode: Mode, lines: dict[str, dict[int, float]], bench: Workbench) -> Drift:
    """1 - cosine by layer; JSON has no NaN, so one becomes the largest."""
    distance = {kv: {at: 1 - cos if math.isfinite(cos) else 2.0 for at, cos in line.items()} for kv, line in lines.items()}
    bound = 1 - bounds_of(bench.model.dtype).cosine if mode == "teacher-forced" else None
    return Drift(f"1 − lowest cosine of a token's hidden state, {mode}", distance, bound)
