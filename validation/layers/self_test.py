"""Does the validator see what is wrong? Every fault is planted, run op by op and as whole layers, and must be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.formats.made_up import calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OpTable
from haarkv.validation.layers.faults import LEARNED, Fault, planted, planted_learned, reordered, table_with
from haarkv.validation.layers.report import Report
from haarkv.validation.layers.runner import validate


@dataclass(frozen=True)
class SelfTestRow:
    """One fault in one way of driving.

    Attributes:
        dtype: of the model.
        driven: "ops" if the table is recorded, "layers" if layers are run as wholes.
        fault: in words; a control has none.
        planted, found: layer and stage, "–" if there is none.
        how: what the validator says.
        caught: found where it was planted; of a control, nothing was found that is no rounding.
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
        self.prefill, self.decode = executor.prefill, executor.decode

    def over(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None


def self_test(
    models: Sequence[DecoderModel], prompts: Sequence[Sequence[int]], on_row: Callable[[SelfTestRow], None] | None = None
) -> list[SelfTestRow]:
    """Plant every fault of `validation.layers.faults` in the middle layer of each model, and validate.

    Faults in learned coordinates are planted in made-up ones.

    Args:
        models: of at least 4 layers.
        prompts: token ids.
        on_row: called with each row as it comes.
    """
    rows = []
    for model in models:
        layer, config = model.config.num_layers // 2, model.config
        learned = calibration(config.num_layers, config.num_kv_heads, config.head_dim)
        for spec, faults in ((KVSpec("tq4"), planted), (KVSpec(LEARNED, calibration=learned), planted_learned)):
            control = "control, learned" if spec.calibration else "control"
            for driven in ("ops", "layers"):
                for name, fault, table in _trials(faults(model, layer), control):
                    report = _report(model, table, driven, prompts, spec)
                    where = f"layer {fault.layer} {fault.stage if driven == 'ops' else fault.seen_as}" if fault else "–"
                    rows.append(_row(report, driven, name, where))
                    if on_row:
                        on_row(rows[-1])
    return rows


def _trials(faults: Sequence[Fault], control: str) -> list[tuple[str, Fault | None, OpTable]]:
    return [
        (f"none ({control})", None, table_with({})),
        (f"none, sums in another order ({control})", None, reordered()),
        *((fault.name, fault, fault.table()) for fault in faults),
    ]


def _report(model: DecoderModel, table: OpTable, driven: str, prompts: Sequence[Sequence[int]], spec: KVSpec) -> Report:
    candidate: Executor = ReferenceExecutor(model, table)
    if driven == "layers":
        candidate = WholeLayers(candidate)
    return validate(ReferenceExecutor(model), candidate, model, prompts, 0, spec.plan(model.config.num_layers))


def _row(report: Report, driven: str, name: str, planted_at: str) -> SelfTestRow:
    first = report.first_divergence
    fault = first if first and first.reason == "fault" else None
    found = f"layer {fault.layer} {fault.stage}" if fault else "–"
    caught = found == planted_at and report.passed == (fault is None)
    how = f"{first.phase} {first.step}: {first.detail}" if first else "not a bit of difference"
    return SelfTestRow(report.dtype, driven, name, planted_at, found, f"{first.reason}, {how}" if first else how, caught)
