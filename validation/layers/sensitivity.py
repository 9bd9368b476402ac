"""How small an error of scale does the validator see? Each stage of one layer is made too large by less and less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.faults import Table, table_with
from haarkv.validation.layers.mistaken import Mistaken
from haarkv.validation.layers.runner import validate
from haarkv.validation.layers.self_test import WholeLayers
from haarkv.validation.layers.slips import Layer, one_kv_head, steeper

_COARSEST, _FINEST = 2, 20


@dataclass(frozen=True)
class Sensitivity:
    """The smallest error that is caught at one stage.

    Attributes:
        driven: "ops" or "layers".
        error: 2**-n, the smallest relative error of scale, of powers of two, that turns the validator red; None if none does.
        found: layer and stage that it names.
    """

    dtype: str
    driven: str
    stage: str
    error: float | None
    found: str


def sensitivity(
    model: DecoderModel, prompts: Sequence[Sequence[int]], on_row: Callable[[Sensitivity], None] | None = None
) -> list[Sensitivity]:
    """For each stage of the middle layer, in both ways of driving: the smallest error of scale that is caught.

    Args:
        prompts: token ids; more of them show smaller errors.
        on_row: called with each row as it comes.
    """
    rows, at = [], Layer(model, model.config.num_layers // 2)
    for driven in ("ops", "layers"):
        for stage, planted in _stages(at).items():
            rows.append(_smallest(model, prompts, driven, stage, planted))
            if on_row:
                on_row(rows[-1])
    return rows


Planted = Callable[[float], Table]


def _smallest(model: DecoderModel, prompts: Sequence[Sequence[int]], driven: str, stage: str, planted: Planted) -> Sensitivity:
    """Bisect over powers of two: what is caught is taken to be caught when it is larger."""
    dtype, found, seen = str(model.dtype).removeprefix("torch."), "–", None
    low, high = _COARSEST, _FINEST + 1  # caught at 2**-low, if at all; not at 2**-high
    while low < high:
        middle = (low + high) // 2
        candidate: Executor = Mistaken(model, model, table_with(planted(1 + 2.0**-middle)))
        if driven == "layers":
            candidate = WholeLayers(candidate)
        plan = KVSpec("tq4").plan(model.config.num_layers)
        trusted = Mistaken(model, model, table_with({}))
        report = validate(trusted, candidate, model, prompts, 0, plan, modes=("teacher-forced",))
        first = report.first_divergence
        if report.passed or first is None:
            high = middle
        else:
            low, seen, found = middle + 1, 2.0**-middle, f"layer {first.layer} {first.stage}"
    return Sensitivity(dtype, driven, stage, seen, found)


def _stages(at: Layer) -> dict[str, Planted]:
    """What makes a stage's result larger by a factor, by its name."""
    stages: dict[str, Planted] = {}
    for name in ("input_norm", "q_norm", "k_norm", "post_norm"):
        if at.weight(name) is not None:
            stages[name] = lambda by, n=name: at.norm(n, lambda x, w, eps: reference.rms_norm(x, w.float() * by, eps))  # type: ignore[misc]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        if at.weight(name) is not None:
            stages[name] = lambda by, n=name: at.projected(n, spoil=lambda y: y * by)  # type: ignore[misc]
    for side, name in enumerate(("store_kv.k", "store_kv.v")):
        stages[name] = lambda by, s=side: _longer(at.index, s, by)  # type: ignore[misc]
    stages["paged_attention"] = lambda by: at.attended(lambda *given: _times(reference.paged_attention(*given), by))
    stages["paged_attention, one KV head"] = lambda by: at.attended(one_kv_head(at, by))
    stages["softmax scale"] = lambda by: at.attended(steeper(by))
    return stages


def _times(x: Tensor, by: float) -> Tensor:
    return (x.float() * by).to(x.dtype)


def _longer(layer: int, side: int, by: float) -> Table:
    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, index: int, batch: Batch) -> None:
        pair = [k, v]
        if index == layer:
            pair[side] = pair[side] * by
        reference.store_kv(pair[0], pair[1], cache, index, batch)

    return {"store_kv": store_kv}
