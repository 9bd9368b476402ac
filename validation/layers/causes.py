"""Why is a layer wrong that is one program? Likely causes are put into the reference until one gives the same output.

A cause is a slip of `validation.faults`, or a part of the layer that is too large, by as much as fits best. With it the
reference runs the layer again and is then what the executor is held against, by the same bounds. What passes explains the
output; several may, and then it cannot be told which of their stages is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.validation import bounds
from haarkv.validation.faults.base import OF_DELTA, OUT, SEEN_AS, Fault, Layer
from haarkv.validation.faults.layer import slips
from haarkv.validation.faults.ops import larger, steeper
from haarkv.validation.faults.windows import window_faults
from haarkv.validation.layers import slack
from haarkv.validation.layers.compare import compare_vectors
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.parts import Stored, parts_of
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import Verdict
from haarkv.validation.layers.three_way import errors_of_layer
from haarkv.validation.layers.trial import Run

_ALONE = ("q_proj", "q_norm", "q_rope", "paged_attention")
_CONFIG = {
    "RoPE": ("q_rope", "k_rope"), "norms'": ("input_norm", "q_norm", "k_norm", "post_norm"), "positions": ("q_rope", "k_rope"),
}  # fmt: skip
_MOST_NAMED = 3


Far = Callable[[Reference, MadeLayer], float | None]
"""How far a run is from what an altered reference made; None if one of them is at fault beside the other."""


def explain(reference: Reference, made: MadeLayer, run: Run, verdict: Verdict, far: Far) -> Verdict:
    """The verdict on a run of a layer that is wrong, with what explains it.

    Args:
        made, run: what the reference and the executor made of the layer.
        verdict: the layer's first fault.
    Returns:
        the verdict with `causes`, the nearest first, none if none explains it; and `stages` that may be wrong: those of the
        causes, else all that the wrong output depends on.
    """
    found: list[tuple[float, Fault]] = []
    for fault in _candidates(reference, made, run):
        # What is stored is wrong, or is not: a slip in the other half of the layer explains neither.
        if fault.model is None and (fault.seen_as == OUT) != (verdict.stage == OUT):
            continue
        altered = reference.altered(fault.model, fault.table())
        try:
            other = altered.again(made)
        except InputError:  # it makes nothing that could be compared
            continue
        distance = None if _same(made, other) else far(altered, other)
        if distance is not None:
            found.append((distance, fault))
    if not found:
        return replace(verdict, stages=_narrowed(verdict.stage, made, run))
    found.sort(key=lambda one: one[0])
    nearest = [fault for distance, fault in found if distance <= 2 * found[0][0]]
    stages = tuple(dict.fromkeys(stage for fault in nearest for stage in _stages_of(fault)))
    return replace(verdict, stages=stages, causes=tuple(fault.name for fault in nearest[:_MOST_NAMED]))


def explain_attention(reference: Reference, call: Call, result: Tensor, stored: Stored, verdict: Verdict) -> Verdict:
    """The verdict on attention that is wrong by itself, with the slips of it that give the same output, the nearest first.

    Args:
        call: as the reference ran it.
        result: the executor's [T, Hq, D].
        stored: the layer's cache as both were given it.
    """
    index, right = call.args[2], call.result
    allowed = slack.of_op(call, reference.ops)
    found = []
    for fault in _slips(reference, index):
        if fault.stage != "paged_attention":
            continue
        other = reference.attended(fault.table(), call, stored)
        error = compare_vectors(other, result, allowed=allowed).rel_l2
        if error <= verdict.bound and not torch.equal(other, right):
            found.append((error, fault.name))
    found.sort()
    nearest = [name for error, name in found if error <= 2 * found[0][0]]
    return replace(verdict, causes=tuple(nearest[:_MOST_NAMED]))


def _slips(reference: Reference, index: int) -> Iterator[Fault]:
    """Those of the model, and those of windows where K and V have them."""
    yield from slips(reference.model, index)
    names = {part.name.split(".")[0] for part in parts_of(reference.cache, index)}
    if all(reference.cache.kept(index)):
        yield from window_faults(reference.model, index, ("window" in names, "sink" in names))


def _candidates(reference: Reference, made: MadeLayer, run: Run) -> Iterator[Fault]:
    """Slips, and parts that are too large by as much as fits best."""
    index, ops, heads = made.index, reference.ops, reference.cache.shape(made.index).num_kv_heads
    yield from _slips(reference, index)
    if not any(call.op == "paged_attention" for call in made.calls) or not torch.isfinite(run.outcome.result).all():
        return
    found = errors_of_layer(made, made.hidden_out, run.outcome.result, None, ops, heads)
    at = Layer(reference.model, index)
    for name, parts in found.items():
        for head, part in enumerate(parts):
            factor = float(f"{1 + part.gain:.4g}")
            if factor == 1 or not 0.01 < factor < 100:
                continue
            if name == "softmax scale":
                yield at.attending(f"softmax scale times {factor:g}", steeper(factor))
            elif name == "MLP":
                yield from at.projecting(f"the MLP times {factor:g}", "down_proj", partial(torch.mul, other=factor))
            elif name == "attention":
                yield at.attending(f"attention times {factor:g}", larger(factor))
            elif name == "attention of a head":
                yield at.attending(f"attention of KV head {head} times {factor:g}", larger(factor, head))


def _same(made: MadeLayer, other: MadeLayer) -> bool:
    """Whether a slip changes nothing here."""
    return torch.equal(made.hidden_out, other.hidden_out) and all(
        torch.equal(field, other.stored[side][name]) for side, fields in made.stored.items() for name, field in fields.items()
    )


def _stages_of(fault: Fault) -> tuple[str, ...]:
    if fault.model is None:
        return (fault.stage,)
    return next((stages for word, stages in _CONFIG.items() if fault.name.startswith(word)), (fault.stage,))


def _narrowed(stage: str, made: MadeLayer, run: Run) -> tuple[str, ...]:
    """The stages that a wrong output depends on.

    The first token of a sequence attends to nothing but itself: its attention is its own V, whatever its query and the softmax
    are. If these tokens are right and others are not, the fault lies before attention's sum.
    """
    # Causes are looked for in layers that have K and V.
    every = tuple(name for name in SEEN_AS.get(stage, (stage,)) if name not in OF_DELTA)
    if stage != "attention_mlp":
        return every
    first = made.batch.positions == 0
    error = (run.outcome.result.double() - made.hidden_out.double()).norm(dim=-1) / made.hidden_out.double().norm(dim=-1)
    if not first.any() or first.all():
        return every
    of_first, of_others = float(error[first].max()), float(error[~first].max())
    return _ALONE if of_first <= bounds.LAYER_BF16.rel_l2 / 4 and of_others > 4 * of_first else every
