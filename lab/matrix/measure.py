"""Every cache on every model and text: one row each, at equal tails and sinks.

The baseline's predictions of a text are computed once, and every cache is scored against them. A row stands in the results
file as soon as it is measured; a row that stands there is not measured again.

Where no token stays in BF16, groups of tokens are quantized as they come in: not even those that wait for their group are seen
in BF16. Bytes count everything, as a cache allocates them for one window.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity.evaluation import (
    MAX_LOGIT_BYTES,
    Exact,
    FidelityRow,
    Workload,
    fidelity_row,
    logits_after,
    score_window,
)
from haarkv.validation.fidelity.scores import join
from lab.matrix.entries import Entry
from lab.matrix.models import ModelInfo, ResidualSizes, Subject, Task, Text

BENCHMARK = "fidelity_matrix"
_KEY = ("weights", "dtype", "text_sha256", "tokens", "window", "tail", "sink", "kv", "learned_sha256")
"""What tells one row from another."""
_FIGURES = tuple(key for key in FidelityRow.__dataclass_fields__ if key != "kv")

Row = dict[str, Any]
Key = tuple[Any, ...]


def row_key(row: Mapping[str, Any]) -> Key:
    """What two rows have in common only if they measure the same."""
    return tuple(row[name] for name in _KEY)


# -- The results file ------------------------------------------------------------------------------------------------------


class Results:
    """Rows of a file, one JSON object a line. A line is written whole, so that several processes may add to one file.

    Raises:
        InputError: what the file holds is no such row.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: list[Row] = []
        try:
            text = file.read_text(encoding="utf-8") if file.exists() else ""
        except (OSError, UnicodeDecodeError):
            raise InputError(f"{file} cannot be read as rows of a matrix; name another file") from None
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = parse_json(line)
                row_key(row), [float(row[name]) for name in _FIGURES], row["label"], row["model"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"line {number} of {file} is no row of a matrix; name another file") from None
            self.rows.append(row)
        self._line_feed = "\n" * (text[-1:] not in ("", "\n"))
        self._keys = {row_key(row) for row in self.rows}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, row: Row) -> None:
        """Write one more row.

        Raises:
            InputError: the system refuses.
        """
        try:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(self._line_feed + json.dumps(row) + "\n")  # in one call of the system: it is shorter than a buffer
        except OSError as error:
            raise InputError(f"{self._file} cannot be written: {error.strerror}") from None
        self._line_feed = ""
        self.rows.append(row)
        self._keys.add(row_key(row))


# -- Measuring -------------------------------------------------------------------------------------------------------------


def entries_for(model_info: ModelInfo, task: Task, residual: ResidualSizes) -> list[Entry]:
    """The entries that have a layout for a model, and whose tail is long enough."""
    fitting = []
    for entry in task.entries:
        if entry.needs_learning or entry.is_chosen:
            if task.learn is not None if entry.needs_learning else entry.budget is not None or residual.tail:
                fitting.append(entry)
            continue
        try:
            plan_for(KVSpec(entry.kv, residual.tail or None, residual.sink), model_info.config)
        except InputError:
            continue
        fitting.append(entry)
    return fitting


def scored_tokens(model_info: ModelInfo, task: Task) -> int:
    """How many tokens all rows of a model score."""
    rows = sum(len(entries_for(model_info, task, residual)) for residual in task.residuals)
    return rows * sum(plan.scored_tokens for plan in model_info.workloads.values())


def measure(
    subject: Subject,
    model_info: ModelInfo,
    task: Task,
    results: Results,
    about: Mapping[str, Any],
    on_step: Callable[[str, int], None] = lambda *_: None,
) -> None:
    """Add to the results every row of a model that is not among them.

    Args:
        about: machine and versions, which every row carries.
        on_step: told what has been done, and how many tokens it took.
    """
    for text in task.texts:
        for size in task.windows:
            plan = model_info.workloads[text.kind, size]
            exact: list[Exact] = []
            for residual in task.residuals:
                for entry in entries_for(model_info, task, residual):
                    what = f"{model_info.short}, {text.kind}, windows of {size:,}, tail {residual.tail}, {entry.label}"
                    head = _head(subject, model_info, task, text, plan, residual, entry)
                    if row_key(head) in results:
                        on_step(what, plan.scored_tokens)
                        continue
                    exact = exact or _exact(subject, plan)
                    figures = _figures(subject, plan, subject.side(entry, residual), exact, partial(on_step, what))
                    results.add({**head, **figures, **about})


def _head(
    subject: Subject, model_info: ModelInfo, task: Task, text: Text, plan: Workload, residual: ResidualSizes, entry: Entry
) -> Row:
    learning_digest = task.learn.digest if entry.needs_learning and task.learn else None
    return {
        "benchmark": BENCHMARK, "model": model_info.short, "weights": subject.weights, "dtype": task.dtype, "text": text.kind,
        "text_sha256": text.digest, "tokens": plan.scored_tokens, "window": len(plan.windows[0]), **asdict(residual),
        "label": entry.label, "kv": entry.kv, "whose": entry.whose, "learned_sha256": learning_digest,
        "balanced": entry.balanced,
    }  # fmt: skip


def _exact(subject: Subject, plan: Workload) -> list[Exact]:
    """The baseline's predictions of every window; as many logits are kept as `MAX_LOGIT_BYTES` allows."""
    exact_windows: list[Exact] = []
    for window in plan.windows:
        left = MAX_LOGIT_BYTES - sum(exact.nbytes for exact in exact_windows)
        exact_windows.append(Exact(subject.model, subject.base, plan.fed(window), left))
    return exact_windows


def _figures(subject: Subject, plan: Workload, side: Session, exact: Sequence[Exact], on_window: Callable[[int], None]) -> Row:
    begin, scores = time.perf_counter(), []
    for window, base in zip(plan.windows, exact, strict=True):
        logits = logits_after(subject.model, side, subject.model.embed(plan.fed(window)))
        scores.append(score_window(side.plan.describe(), plan, window, base, logits))
        on_window(len(window))
    row = asdict(fidelity_row("", side, len(plan.windows[0]), join(scores)))
    seconds = round(time.perf_counter() - begin, 1)
    return {name: row[name] for name in _FIGURES} | {"executor": side.executor.name, "seconds": seconds}
