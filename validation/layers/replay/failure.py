"""From a validation that failed to the smallest replay file that fails alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from haarkv.models.base import DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.validation.layers.replay.case import Make, capture, expected
from haarkv.validation.layers.replay.file import ReplayFile
from haarkv.validation.layers.replay.shrink import fails_alike, shrink
from haarkv.validation.layers.report import Finding, Report

_MOST_FORWARDS = 8
"""In which a layer is tried that does not fail alone where it was found."""


@dataclass(frozen=True)
class OneRun:
    """One validation, and what it takes to run any of its layers again.

    Attributes:
        make: the reference and the executor on trial.
    """

    report: Report
    model: DecoderModel
    prompts: Sequence[Sequence[int]]
    steps: int
    plan: KVPlan
    calibration: Calibration | None
    make: tuple[Make, Make]


def replay_of(
    runs: Sequence[OneRun], versions: Mapping[str, str], seconds: float, on_try: Callable[[], object] = lambda: None
) -> ReplayFile:
    """The first failure of some runs, cut out and shrunk.

    Args:
        versions: of what runs, by name.
        seconds: to shrink it in.
        on_try: called before each attempt to make it smaller.
    Raises:
        InputError: none failed, or what failed shows in no single layer.
    """
    run = next((run for run in runs if not run.report.passed and run.report.first_divergence), None)
    finding = run.report.first_divergence if run else None
    if run is None or finding is None:
        raise InputError("no layer failed")
    reference, candidate = run.make
    fails = fails_alike(reference, candidate, finding.stage, finding.reason)
    for place in _places(run, finding):
        trusted = reference(run.model, run.plan)
        case = capture(trusted, run.model, run.prompts, run.steps, run.plan, place, run.calibration)
        if fails(case):
            small = shrink(case, reference, fails, seconds, on_try)
            made = expected(small, reference)
            names = run.report.reference, run.report.candidate
            return ReplayFile(small, made, asdict(finding), *names, versions)
    raise InputError(f"what was found at {finding.stage} of layer {finding.layer} does not show when that layer runs alone")


def _places(run: OneRun, finding: Finding) -> Iterator[Finding]:
    """Where the layer may fail alone: in the forward of the finding, or in another if it was found over all of them."""
    yield finding
    forwards = dict.fromkeys((row.phase, row.step) for row in run.report.rows if row.layer == finding.layer)
    for phase, step in list(forwards)[:_MOST_FORWARDS]:
        if (phase, step) != (finding.phase, finding.step):
            yield replace(finding, phase=phase, step=step)
