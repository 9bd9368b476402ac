"""The result of a validation as rows, for a table, JSON or CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

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
"""JSON keys of a stage and of a tensor."""


@dataclass(frozen=True)
class Verdict:
    """The finding at one stage; of several forwards, the worst.

    Attributes:
        stage: the op; of a fused layer, the output that can be seen.
        reason: "tie": levels differ, no more than in honest runs; "rounding": other bits, as in honest runs; "fault": more
            than that; "unstable": the executor differs from itself on the same inputs; None: every bit is equal.
        error, bound: worst figure and what honest runs allow.
        head: the KV head that alone is wrong.
        layer: None for the head and the whole forward.
    """

    stage: str
    reason: Reason | None
    error: float
    bound: float
    detail: str = ""
    head: int | None = None
    phase: str = ""
    step: int = 0
    layer: int | None = None

    @classmethod
    def violation(cls, stage: str, detail: str, reason: Reason = "fault") -> Verdict:
        """What is wrong whatever the figures are."""
        return cls(stage, reason, math.inf, 0.0, detail)

    @property
    def where(self) -> str:
        return self.stage if self.layer is None else f"layer {self.layer}, {self.stage}"

    @property
    def fails(self) -> bool:
        """Whether it fails a run."""
        return self.reason in FAILS

    @property
    def share(self) -> float:
        """The error divided by its bound; infinite if it is NaN."""
        if self.reason is None and not self.error:
            return 0.0
        return self.error / self.bound if self.bound and not math.isnan(self.error) else math.inf

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


def worst(verdicts: Iterable[Verdict], by_layer: bool) -> tuple[Verdict, ...]:
    """The worst of each stage, or of each stage of each layer, in the order of a forward."""
    worst_by_key: dict[tuple[str, int | None], Verdict] = {}
    for verdict in verdicts:
        key = verdict.stage, verdict.layer if by_layer else None
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
        stages, tensors: teacher-forced, by stage; by layer and stage.
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
    stages: tuple[Verdict, ...]
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
    findings = [finding for finding in (report.first_divergence, theirs) if finding]
    return replace(
        report,
        prompt_tokens=(*report.prompt_tokens, *other.prompt_tokens),
        passed=report.passed and other.passed,
        first_divergence=next((finding for finding in findings if finding.fails), next(iter(findings), None)),
        rows=(*report.rows, *map(with_prefix, other.rows)),
        logits=(*report.logits, *map(with_prefix, other.logits)),
        stages=worst((*report.stages, *map(with_prefix, other.stages)), by_layer=False),
        tensors=worst((*report.tensors, *map(with_prefix, other.tensors)), by_layer=True),
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
    for name in ("stages", "tensors"):
        plain[name] = [verdict.as_dict(_TENSOR_KEYS) for verdict in getattr(report, name)]
    document: dict[str, Any] = finite(plain)
    return document


def finite(value: Any) -> Any:
    """A value for JSON: null in place of what is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_rows(report: Report) -> Iterable[list[str]]:
    """Header and rows of a CSV file."""
    yield [field.name for field in fields(LayerRow)]
    for row in report.rows:
        yield ["" if value is None else str(value) for value in vars(row).values()]
