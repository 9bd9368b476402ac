"""Does the validator find planted faults? It must name the right layer and stage of each, op by op and in whole layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice

from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import DRIVES, Fault, Layer, reordered_sum_ops
from haarkv.validation.faults.layer import LEARNED_KV, LONGEST, common_bugs, coordinate_faults, long_faults, published_faults
from haarkv.validation.faults.model import BlockFault, block_faults, forward_faults, runner_of_blocks
from haarkv.validation.faults.states import delta_faults, delta_layers
from haarkv.validation.faults.windows import (
    WINDOW_SPEC,
    Parts,
    merging,
    sliding_faults,
    window_faults,
    with_sliding_window,
)
from haarkv.validation.layers.honest_runs import HonestCache
from haarkv.validation.layers.report import Mode, Report
from haarkv.validation.layers.runner import validate


@dataclass(frozen=True)
class SelfTestRow:
    """One validation of a planted fault, of single "ops" or whole "layers"; `caught` if it was found where it was planted."""

    dtype: str
    driven: str
    fault: str
    planted: str
    found: str
    how: str
    caught: bool


def first_layers(model: DecoderModel, count: int) -> DecoderModel:
    """A model of the first layers of another."""
    weights = replace(model.weights, layers=model.weights.layers[:count])
    return replace(model, config=model.config.with_layers(count), weights=weights)


@dataclass(frozen=True)
class Setting:
    """The cache, prompts and decode steps of some validations, and the name of their controls."""

    spec: KVSpec
    prompts: Sequence[Sequence[int]]
    steps: int
    control: str
    modes: tuple[Mode, ...] = ("teacher-forced",)
    honest_cache: HonestCache = field(default_factory=dict)

    def report(self, model: DecoderModel, candidate: Executor) -> Report:
        plan = self.spec.plan(model.config.num_layers)
        return validate(
            ReferenceExecutor(model),
            candidate,
            model,
            self.prompts,
            self.steps,
            plan,
            modes=self.modes,
            honest_cache=self.honest_cache,
        )


_WINDOWED_TOKENS, _WINDOWED_STEPS = (90, 40), 2
"""Lengths of prompts with a tail: the first is longer than the ring, and decode reads tokens of earlier forwards."""
_STATE_TOKENS, _STATE_STEPS = (9, 4), 1
"""Lengths of prompts with recurrent states: decode continues from these states, and drafted tokens are taken back."""
_WHOLE_TOKENS = (40, 30)
"""Lengths of prompts for faults in whole forwards."""


def self_test(
    models: Sequence[DecoderModel],
    prompts: Sequence[Sequence[int]],
    on_row: Callable[[SelfTestRow], None] | None = None,
) -> list[SelfTestRow]:
    """Plant each fault of `validation.faults` in the middle layer of each model (of 3 or more layers), and validate.

    A model with recurrent states gets only `delta_faults`, in its last layer with a state; one with weight blocks that an
    executor multiplies with directly gets only `block_faults`, in that executor.

    Args:
        prompts: token ids. The smallest faults need a hundred tokens.
    """
    rows = []
    for right, setting, faults in chain.from_iterable(_planted(model, prompts) for model in models):
        for drive in DRIVES:
            for fault in faults:
                rows.append(_row(setting.report(right, fault.executor(right, drive)), drive, fault))
                if on_row:
                    on_row(rows[-1])
    return rows


def _planted(model: DecoderModel, prompts: Sequence[Sequence[int]]) -> list[tuple[DecoderModel, Setting, Sequence[Fault]]]:
    """Right models, and the controls and faults that are run in each setting."""

    def cut(lengths: Sequence[int]) -> list[Sequence[int]]:
        return [prompt[:count] for prompt, count in zip(prompts, lengths, strict=False)]

    layer, config = model.config.num_layers // 2, model.config
    if (runner := runner_of_blocks(model)) is not None:
        control = BlockFault("none (control, blocks)", None, _NOTHING, runner=runner)
        return [(model, Setting(KVSpec("tq4"), prompts, 1, ""), [control, *block_faults(model, layer, runner)])]
    if state_layers := delta_layers(model):
        states = Setting(KVSpec("tq4"), cut(_STATE_TOKENS), _STATE_STEPS, "control, states")
        return [(model, states, [*_controls(states), *delta_faults(model, state_layers[-1])])]
    learned_calibration = calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
    longer = [list(islice(cycle(prompts[0]), LONGEST)), *prompts[1:]]
    both: tuple[Mode, ...] = ("teacher-forced", "free-running")
    merge_ops = Layer(model, layer).instead("paged_attention", merging(Parts.merge))
    window_runs = [_control("none, in two parts (control, a window)", ops=merge_ops), *window_faults(model, layer)]
    sliding = with_sliding_window(model, layer)
    every: list[tuple[DecoderModel, Setting, list[Fault]]] = [
        (
            model,
            Setting(KVSpec("tq4"), prompts, 0, "control"),
            [*published_faults(model, layer), *common_bugs(model, layer)],
        ),
        (
            model,
            Setting(KVSpec(LEARNED_KV, calibration=learned_calibration), prompts, 0, "control, learned"),
            coordinate_faults(model, layer),
        ),
        (model, Setting(WINDOW_SPEC, cut(_WINDOWED_TOKENS), _WINDOWED_STEPS, "control, a window"), window_runs),
        (model, Setting(KVSpec("tq4"), longer, 0, "control, long"), long_faults(model, layer)),
        (sliding, Setting(WINDOW_SPEC, longer, 1, "control, a sliding window"), sliding_faults(sliding, layer)),
        (model, Setting(KVSpec("tq4"), cut(_WHOLE_TOKENS), 1, "control, whole forwards", both), forward_faults(model)),
    ]
    return [(right, setting, [*_controls(setting), *faults]) for right, setting, faults in every]


def _controls(setting: Setting) -> list[Fault]:
    names = f"none ({setting.control})", f"none, sums in another order ({setting.control})"
    return [_control(names[0]), _control(names[1], ops=vars(reordered_sum_ops()))]


_NOTHING = "–"


def _control(name: str, **how: object) -> Fault:
    return Fault(name, None, _NOTHING, **how)  # type: ignore[arg-type]


def _row(report: Report, drive: str, fault: Fault) -> SelfTestRow:
    first, stages = report.first_divergence, fault.stages(drive)
    wrong = first if first and first.fails else None
    fault_place = _place(wrong.layer, wrong.stage, wrong.head) if wrong else _NOTHING
    if fault.stage == _NOTHING:
        is_caught = wrong is None and report.passed
    else:
        place = wrong is not None and (wrong.layer, wrong.reason) == (fault.layer, "fault") and wrong.stage in stages
        # For hidden states of a whole layer the verdict may name no head, but not another head than the planted one.
        heads = (fault.head, None) if drive == "layers" and wrong and wrong.stage == "attention_mlp" else (fault.head,)
        is_caught = place and not report.passed and (fault.head is None or (wrong is not None and wrong.head in heads))
    how = f"{first.reason}, {first.phase} {first.step}: {first.detail}" if first else "not a bit of difference"
    return SelfTestRow(
        report.dtype, drive, fault.name, _place(fault.layer, stages[0], fault.head), fault_place, how, is_caught
    )


def _place(layer: int | None, stage: str, head: int | None) -> str:
    return (stage if layer is None else f"layer {layer} {stage}") + (f" head {head}" if head is not None else "")
