"""The result of a validation as rows, for a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json

Mode = Literal["teacher-forced", "free-running"]
Reason = Literal["tie", "rounding", "fault", "unstable"]
FAILS = frozenset({"fault", "unstable"})
"""Reasons that fail a run."""

STAGES = (
    "input_norm", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "untouched_state",
    "state_read", "conv_state", "delta_state", "gated_delta", "delta_norm", "delta_gate",
    "out_proj", "q_proj", "k_proj", "v_proj", "q_norm", "q_rope", "k_norm", "k_rope", "untouched_slots",
    "untouched_window", "store_kv.k", "store_kv.v", "window.k", "window.v", "sink.k", "sink.v", "paged_attention", "o_proj",
    "post_norm", "gate_proj", "up_proj", "silu_mul", "down_proj", "attention_mlp", "final_norm", "head", "forward",
)  # fmt: skip
"""Every stage in the order of a forward."""
_ORDER = {stage: place for place, stage in enumerate(STAGES)}
_MLP = _ORDER["silu_mul"]
"""Place of a stage that only some families have, such as a router."""


@dataclass(frozen=True)
class LayerRow:
    """One layer of one forward, in one mode. Only `share` and `passed` are a judgment.

    Attributes:
        phase: "prefill", "decode" or "verify".
        step: of the phase, from 0; a long prompt takes several.
        k_match, v_match: share of new levels (numbers, without levels) that are equal; None of a layer that keeps a state.
        share: worst figure as a multiple of what honest runs allow; above 1 is a fault.
        hidden_cos, rel_l2, max_abs: of hidden states, the worst token: cosine; distance relative to its length; difference.
    """

    phase: str
    step: int
    layer: int
    mode: Mode
    k_match: float | None
    v_match: float | None
    share: float
    hidden_cos: float
    rel_l2: float
    max_abs: float
    passed: bool


@dataclass(frozen=True)
class LogitRow:
    """Free-running logits of one forward against the reference's, the worst of `predictions`; `same_token` of these agree."""

    phase: str
    step: int
    cos: float
    rel_l2: float
    max_abs: float
    same_token: int
    predictions: int


DIVERGENCE_KEYS = ("phase", "step", "layer", "stage", "reason", "detail", "head")
"""JSON keys of a first divergence."""
_TENSOR_KEYS = ("stage", "share", "phase", "step", "layer", "reason")
"""JSON keys of a tensor."""


@dataclass(frozen=True)
class Verdict:
    """The finding at one stage; of several forwards, the worst.

    Attributes:
        stage: the op; of a fused layer, the output that can be seen.
        reason: "tie": packed levels or scales differ; "rounding": other bits differ, both within the limits; "fault":
            beyond a limit; "unstable": the executor differs from itself on the same inputs; None: every bit is equal.
        share: worst figure as a multiple of what honest runs allow; infinite for what is wrong whatever the figures are.
        head: the KV head that alone is wrong.
        layer: None for the head and the whole forward.
    """

    stage: str
    reason: Reason | None
    share: float
    detail: str = ""
    head: int | None = None
    phase: str = ""
    step: int = 0
    layer: int | None = None

    @classmethod
    def violation(cls, stage: str, detail: str, reason: Reason = "fault") -> Verdict:
        """What is wrong whatever the figures are."""
        return cls(stage, reason, math.inf, detail)

    @property
    def where(self) -> str:
        return self.stage if self.layer is None else f"layer {self.layer}, {self.stage}"

    @property
    def fails(self) -> bool:
        """Whether it fails a run."""
        return self.reason in FAILS

    def as_dict(self, names: Sequence[str] = DIVERGENCE_KEYS) -> dict[str, Any]:
        """Some fields, for JSON."""
        return {name: getattr(self, name) for name in names}


def first(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The first fault; without one, the first difference."""
    different = [verdict for verdict in verdicts if verdict.reason]
    return next((verdict for verdict in different if verdict.fails), different[0] if different else None)


@dataclass(frozen=True)
class Measurement:
    """One teacher-forced figure over all forwards, as a multiple of what honest runs allow; head -1 is all of them."""

    drive: str
    layer: int
    stage: str
    head: int
    figure: str
    share: float


_SEVERITY = {None: 0, "rounding": 1, "tie": 2, "unstable": 3, "fault": 4}


def _worse(one: Verdict, other: Verdict) -> Verdict:
    """The verdict nearer to its bound, with the worse reason of both."""
    reason = max((one.reason, other.reason), key=_SEVERITY.__getitem__)
    failing = [verdict for verdict in (one, other) if verdict.fails]
    return replace(failing[0] if len(failing) == 1 else max(one, other, key=lambda verdict: verdict.share), reason=reason)


def worst(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """The worst of each stage of each layer, in the order of a forward."""
    worst_by_key: dict[tuple[str, int | None], Verdict] = {}
    for verdict in verdicts:
        key = verdict.stage, verdict.layer
        worst_by_key[key] = _worse(worst_by_key[key], verdict) if key in worst_by_key else verdict

    def place(key: tuple[str, int | None]) -> tuple[bool, int, int]:
        return key[1] is None, key[1] or 0, _ORDER.get(key[0], _MLP)

    return tuple(worst_by_key[key] for key in sorted(worst_by_key, key=place))


@dataclass(frozen=True)
class Report:
    """The result of a validation.

    Attributes:
        passed: everything was compared, and nothing lies outside what honest runs give.
        first_divergence: the first fault; without one, the first difference; None if every bit is equal.
        tensors: the worst by layer and stage, of teacher-forced layers, the head and the whole forward.
        blocks: weight-block types that the executor multiplied with directly and the reference restored.
    """

    reference: str
    candidate: str
    kv: str
    dtype: str
    prompt_tokens: tuple[int, ...]
    steps: int
    passed: bool
    first_divergence: Verdict | None
    rows: tuple[LayerRow, ...]
    logits: tuple[LogitRow, ...]
    tensors: tuple[Verdict, ...] = ()
    tests: tuple[Measurement, ...] = ()
    blocks: tuple[str, ...] = ()
    exercised: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()

    @property
    def beyond(self) -> tuple[str, ...]:
        """`not_exercised`, and contexts beyond those of these prompts."""
        longest = max(self.prompt_tokens, default=0) + self.steps
        alone = (f"another executor: both sides are {self.candidate}",) if self.candidate == self.reference else ()
        return *alone, *self.not_exercised, f"contexts beyond {longest:,} tokens"


def join_reports(report: Report, other: Report, prefix: str) -> Report:
    """Two reports of one executor as one; `prefix` tells the other's phases apart."""

    def with_prefix(finding: Any) -> Any:
        return replace(finding, phase=f"{prefix} {finding.phase}")

    theirs = with_prefix(other.first_divergence) if other.first_divergence else None
    return replace(
        report,
        prompt_tokens=(*report.prompt_tokens, *other.prompt_tokens),
        passed=report.passed and other.passed,
        first_divergence=first([finding for finding in (report.first_divergence, theirs) if finding]),
        rows=(*report.rows, *map(with_prefix, other.rows)),
        logits=(*report.logits, *map(with_prefix, other.logits)),
        tensors=worst((*report.tensors, *map(with_prefix, other.tensors))),
        tests=(*report.tests, *other.tests),
        exercised=tuple(dict.fromkeys((*report.exercised, *other.exercised))),
        not_exercised=tuple(what for what in report.not_exercised if what not in other.exercised),
    )


def row_cells(row: LayerRow) -> dict[str, str]:
    """A row by its columns, for a table."""
    return {
        "forward": f"{row.phase} {row.step}", "mode": row.mode, "layer": str(row.layer),
        "K %": _percent(row.k_match), "V %": _percent(row.v_match), "of the limit": f"{row.share:.2f}",
        "cosine": f"{row.hidden_cos:.9f}", "rel. L2": f"{row.rel_l2:.2e}", "max abs": f"{row.max_abs:.2e}",
    }  # fmt: skip


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3f}"


def as_json(report: Report) -> dict[str, Any]:
    """For JSON."""
    plain = asdict(report)
    plain["first_divergence"] = report.first_divergence.as_dict() if report.first_divergence else None
    plain["tensors"] = [verdict.as_dict(_TENSOR_KEYS) for verdict in report.tensors]
    document: dict[str, Any] = finite(plain)
    return document


def finite(value: Any) -> Any:
    """A value for JSON: null in place of what is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_csv(report: Report) -> str:
    """A CSV file: a header, and every row."""
    text = io.StringIO()
    rows = csv.DictWriter(text, [field.name for field in fields(LayerRow)], lineterminator="\n")
    rows.writeheader()
    rows.writerows(map(vars, report.rows))
    return text.getvalue()


# -- Two reports -------------------------------------------------------------------------------------------------------
FACTOR = 2.0
"""Shares that differ by less count as alike: another order of sums does as much."""
_LEAST = 0.01
"""Smaller shares are not reported."""
_ABOUT = ("candidate", "reference", "kv", "dtype", "prompt_tokens", "steps")
_Tensors = dict[tuple[int | None, str], tuple[float, str]]
"""By layer and stage: worst figure as a multiple of what honest runs allow, and what was found."""


def compare_files(before: Path, after: Path) -> dict[str, Any]:
    """Compare two files, as a JSON object: `changes` wrong now first, then worse, then better; `worse` if a right one is wrong
    now.

    Raises:
        InputError: no report of `tq validate --json`, or two models.
    """
    (a, ours), (b, theirs) = _read(before), _read(after)
    layers = [len({layer for layer, _ in tensors if layer is not None}) for tensors in (ours, theirs)]
    if a["model"] != b["model"] or layers[0] != layers[1]:
        raise InputError(
            f"the runs are of different models: {before} of {a['model']} with {layers[0]} layers, {after} of {b['model']} "
            f"with {layers[1]}"
        )
    changes = [change for key in ours if key in theirs and (change := _change(key, ours[key], theirs[key]))]
    changes.sort(
        key=lambda c: (not is_new_fault(c), c["direction"] == "better", math.inf if c["layer"] is None else c["layer"])
    )
    return {
        "worse": (a["passed"] and not b["passed"]) or any(map(is_new_fault, changes)),
        "differences": [f"{name} {a[name]} before, {b[name]} after" for name in _ABOUT if a[name] != b[name]],
        "verdicts": [a["passed"], b["passed"]], "changes": changes,
        "compared": len(ours.keys() & theirs.keys()), "missing": len(ours.keys() ^ theirs.keys()),
    }  # fmt: skip


def is_new_fault(change: Mapping[str, Any]) -> bool:
    """Wrong now and right before."""
    return change["found_after"] in FAILS and change["found_before"] not in FAILS


def _read(path: Path) -> tuple[Mapping[str, Any], _Tensors]:
    raw, tensors = read_json(path), _Tensors()
    required_types = {"model": str, "passed": bool, "tensors": list}
    if not isinstance(raw, dict) or not all(type(raw.get(name)) is kind for name, kind in required_types.items()):
        raise InputError(f"{path} is no report of `tq validate --json`, or one of an older version; write it again")
    if missing := [name for name in _ABOUT if name not in raw]:
        raise InputError(f"{path} is no report of `tq validate --json`: it lacks {missing[0]}")
    for entry in raw["tensors"]:
        match entry:
            case {
                "stage": str(stage), "layer": int() | None as layer, "reason": reason,
                "share": int() | float() | None as share,
            } if reason in (None, *get_args(Reason)):  # fmt: skip
                # What JSON cannot write was not finite.
                tensors[layer, stage] = math.inf if share is None else share, reason or "equal"
            case _:
                raise InputError(f"{path} is no report of `tq validate --json`: it has a tensor that is none")
    return raw, tensors


def _change(
    key: tuple[int | None, str], before: tuple[float, str], after: tuple[float, str]
) -> dict[str, Any] | None:  # fmt: skip
    fails = [found in FAILS for _, found in (before, after)]
    low, high = sorted((before[0], after[0]))
    if fails[0] == fails[1] and (high < _LEAST or not high > FACTOR * low):
        return None
    worse = fails[1] if fails[0] != fails[1] else after[0] > before[0]
    return {
        "layer": key[0], "stage": key[1], "direction": "worse" if worse else "better", "before": before[0],
        "after": after[0], "found_before": before[1], "found_after": after[1],
    }  # fmt: skip
