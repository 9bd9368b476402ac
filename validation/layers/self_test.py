"""Does the validator see what is wrong? Every fault is planted, run op by op and as whole layers, and must be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.formats.made_up import calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OpTable
from haarkv.validation.layers.faults import LEARNED, Fault, planted, planted_learned, reordered, table_with
from haarkv.validation.layers.machine_faults import LONGEST, forward_faults, layer_faults, long_faults
from haarkv.validation.layers.mistaken import Mistaken
from haarkv.validation.layers.report import FAILS, Mode, Report
from haarkv.validation.layers.runner import validate
from haarkv.validation.layers.slips import Layer, slips
from haarkv.validation.layers.window_faults import WINDOWED, window_faults
from haarkv.validation.layers.window_merges import Parts, merging


@dataclass(frozen=True)
class SelfTestRow:
    """One fault in one way of driving.

    Attributes:
        dtype: of the model.
        driven: "ops" if the table is recorded, "layers" if layers are run as wholes.
        fault: in words; a control has none.
        planted, found: layer, stage, and the KV head if one is wrong; "–" if there is none.
        how: what the validator says.
        caught: found where it was planted, for the right reason; of a control, nothing was found that is no rounding.
    """

    dtype: str
    driven: str
    fault: str
    planted: str
    found: str
    how: str
    caught: bool


class WholeLayers:
    """An executor as a fused one: its layers run whole, nobody sees its ops."""

    ops = None

    def __init__(self, executor: Executor) -> None:
        self.name, self.config, self.device = executor.name, executor.config, executor.device
        self.description, self.simulated = f"{executor.description}, by whole layers", executor.simulated
        self.compiled = executor.compiled
        self.supports, self.layers = executor.supports, executor.layers
        self.prefill, self.decode, self.verify = executor.prefill, executor.decode, executor.verify
        self.batches_alike, self.weights = executor.batches_alike, executor.weights

    def over(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None


EVERY = slice(None)


def first_layers(model: DecoderModel, count: int) -> DecoderModel:
    """A model of the first layers of another."""
    weights = replace(model.weights, layers=model.weights.layers[:count])
    return replace(model, config=replace(model.config, num_layers=count), weights=weights)


def self_test(
    models: Sequence[DecoderModel],
    prompts: Sequence[Sequence[int]],
    on_row: Callable[[SelfTestRow], None] | None = None,
    part: slice = EVERY,
    kv: str = "tq4",
) -> list[SelfTestRow]:
    """Plant faults in the middle layer of each model, and validate: `faults`, `slips`, `machine_faults` and `window_faults`.

    Faults in learned coordinates are planted in made-up ones.

    Args:
        models: of at least 3 layers.
        prompts: token ids. The faintest slips show in a hundred tokens.
        on_row: called with each row as it comes.
        part: of the slips, of the faults of machines, and of those in windows.
        kv: format of 16 levels that faults of `faults` and `slips` are planted in; if it is another, they alone are.
    """
    rows = []
    for model in models:
        layer, config = model.config.num_layers // 2, model.config
        learned = calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
        plain = _Setting(KVSpec(kv), prompts, 0, "control" if kv == "tq4" else f"control, {kv}")
        of_learned = _Setting(KVSpec(LEARNED, calibration=learned), prompts, 0, "control, learned")
        shorter = [prompt[:count] for prompt, count in zip(prompts, _WINDOWED_TOKENS, strict=False)]
        windowed = _Setting(WINDOWED, shorter, _WINDOWED_STEPS, "control, a window")
        longer = [list(islice(cycle(prompts[0]), LONGEST)), *prompts[1:]]
        long = _Setting(KVSpec(kv), longer, 0, "control, long")
        brief = [prompt[:count] for prompt, count in zip(prompts, _WHOLE_TOKENS, strict=False)]
        whole = _Setting(KVSpec(kv), brief, 1, "control, whole forwards", ("teacher-forced", "free-running"))
        in_parts = _Trial(
            "none, in two parts (control, a window)", table_with(merging(Layer(model, layer), Parts.merged)), model
        )
        machines = layer_faults(model, layer)[part] if kv == "tq4" else []
        every: list[tuple[_Setting, list[Fault], list[_Trial]]] = [
            (plain, [*planted(model, layer), *slips(model, layer)[part], *machines], []),
            (of_learned, planted_learned(model, layer), []),
            (windowed, window_faults(model, layer)[part], [in_parts]),
            (long, long_faults(model, layer)[part], []),
            (whole, forward_faults(model)[part], []),
        ]
        for setting, faults, controls in every if kv == "tq4" else every[:1]:
            for driven in ("ops", "layers"):
                for trial in (*controls, *_trials(model, faults, setting.control)):
                    rows.append(_row(_report(model, trial, driven, setting), driven, trial))
                    if on_row:
                        on_row(rows[-1])
    return rows


_WINDOWED_TOKENS, _WINDOWED_STEPS = (90, 40), 2
"""Of prompts with a window: the ring starts over in the first, and decode reads what earlier forwards have left."""
_WHOLE_TOKENS = (40, 30)
"""Of prompts that run as whole forwards."""


@dataclass(frozen=True)
class _Setting:
    """What faults are planted in: a cache, prompts and decode steps; and what its controls are called."""

    spec: KVSpec
    prompts: Sequence[Sequence[int]]
    steps: int
    control: str
    modes: tuple[Mode, ...] = ("teacher-forced",)


@dataclass(frozen=True)
class _Trial:
    """What is run: its name, its table and model, and the fault in it, if there is one."""

    name: str
    table: OpTable
    model: DecoderModel
    fault: Fault | None = None


def _trials(model: DecoderModel, faults: Sequence[Fault], control: str) -> list[_Trial]:
    return [
        _Trial(f"none ({control})", table_with({}), model),
        _Trial(f"none, sums in another order ({control})", reordered(), model),
        *(_Trial(fault.name, fault.table(), fault.model or model, fault) for fault in faults),
    ]


def _report(model: DecoderModel, trial: _Trial, driven: str, given: _Setting) -> Report:
    make = (trial.fault and trial.fault.executor) or Mistaken
    candidate: Executor = make(model, trial.model, trial.table)
    if driven == "layers":
        candidate = WholeLayers(candidate)
    plan = given.spec.plan(model.config.num_layers)
    trusted = ReferenceExecutor(model)
    return validate(trusted, candidate, model, given.prompts, given.steps, plan, modes=given.modes)


def _row(report: Report, driven: str, trial: _Trial) -> SelfTestRow:
    first, fault = report.first_divergence, trial.fault
    wrong = first if first and first.reason in FAILS else None
    found = _place(wrong.layer, wrong.stage, wrong.head) if wrong else "–"
    planted_at, caught = "–", wrong is None and report.passed
    if fault is not None:
        stage = fault.stage if driven == "ops" else fault.seen_as
        planted_at = _place(fault.layer, stage, fault.head)
        place = (
            wrong is not None and (wrong.layer, wrong.reason) == (fault.layer, "fault") and wrong.stage in (stage, *fault.also)
        )
        caught = place and not report.passed and fault.head in (None, wrong.head if wrong else None)
    how = f"{first.reason}, {first.phase} {first.step}: {first.detail}" if first else "not a bit of difference"
    return SelfTestRow(report.dtype, driven, trial.name, planted_at, found, how, caught)


def _place(layer: int | None, stage: str, head: int | None) -> str:
    return (stage if layer is None else f"layer {layer} {stage}") + (f" head {head}" if head is not None else "")
