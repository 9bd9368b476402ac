"""The judge: figures of stored vectors and hidden states, and a verdict for each stage: equal, tie, rounding or fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation import bounds
from haarkv.validation.layers.candidate import StrayWrites
from haarkv.validation.layers.forward import Call
from haarkv.validation.layers.null import Figure, number_figures, pad_counts
from haarkv.validation.layers.parts import KV, Snapshot, VectorPart, cache_parts, stage_of, vector_parts
from haarkv.validation.layers.report import Reason, Verdict
from haarkv.validation.layers.states import STATE, StatePart

Values = Iterator[tuple[Figure, Tensor]]


def stored_figures(
    cache: PagedKVCache,
    layer: int,
    batch: Batch,
    ours: Snapshot,
    theirs: Snapshot,
    kv: KV | None,
    reach: Mapping[str, Tensor] | None = None,
) -> Values:
    """Figures of the fields that a layer stored, by KV head.

    Args:
        ours, theirs: fields stored by the reference, and by the executor or an honest run.
        kv: the vectors K and V that the reference stored; None for a layer with a recurrent state.
        reach: as `Null.reach`; 0 unless given.
    """
    for part in cache_parts(cache, layer):
        pair = ours[part.name], theirs[part.name]
        if isinstance(part, StatePart):
            for stage, head, x, y in part.decoded(batch, *pair):
                yield from ((figure._replace(head=head), rows) for figure, rows in number_figures(stage, x, y))
        elif kv is not None and len(part.where(batch)[0]):
            yield from _part_figures(part, batch, *pair, kv, (reach or {}).get(part.name))


def _part_figures(
    part: VectorPart, batch: Batch, ours: dict[str, Tensor], theirs: dict[str, Tensor], kv: KV, reach: Tensor | None
) -> Values:
    """Figures of one part; fields [n, Hkv, *].

    A vector is suspect if a level differs by more than one, or its scale by more than a sixteenth. It is a fault ("leaps") if
    its distance from the vector to store exceeds a limit; else it counts as one changed level. The limit: the distance of the
    reference's stored vector (1.5 times that if the scale differs, since two scales may fit a learned key equally well), plus
    2 * 1.5 * `reach`: an executor's vector to store may be `reach` from the reference's, and what it stores as far again.
    """
    layer = part.layer
    pair = by_token(ours), by_token(theirs)
    levels = [part.kv_format.levels(fields) for fields in pair]
    if levels[0] is None or levels[1] is None:
        for name in ours:
            yield from number_figures(stage_of(part.name), ours[name], theirs[name], ours[name].shape[1])
        return
    level_distance = (levels[0].int() - levels[1].int()).abs()
    decoded_pair = [part.kv_format.dequantize(fields, layer) for fields in pair]
    changed_levels, resized = (level_distance > 0).sum(-1), _size_changes(*pair)
    far = (level_distance > 1).any(-1) | resized
    if bool(far.any()):
        x = part.vectors_to_store(*kv, batch).transpose(0, 1)
        near, off = (part.kv_format.length(vectors - x, layer) for vectors in decoded_pair)
        reach = torch.zeros_like(near) if reach is None else reach
        equal = far & (off <= torch.where(resized, bounds.FARTHER * near, near) + 2 * bounds.FARTHER * reach)
        far, changed_levels = far & ~equal, torch.where(equal, 1, changed_levels)
    longer = torch.where((level_distance > 0).any(-1), 0.0, _length_changes(*decoded_pair))
    for kind, numbers in (("changed", changed_levels), ("leaps", far), ("length", longer)):
        for head, each in enumerate(numbers):
            yield Figure(stage_of(part.name), head, kind), pad_counts(each)


_ANOTHER_SIZE = 1 / 16
"""Relative difference above which two scales count as different; rounding to FP16 changes a scale by 2**-11 of itself."""


def _size_changes(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """[Hkv, n] bool: which vectors are stored at another scale; fields [Hkv, n, *]."""
    scales = [(x.float(), theirs[name].float()) for name, x in ours.items() if x.is_floating_point()]
    same = [((y - x).abs() <= _ANOTHER_SIZE * x.abs()).unsqueeze(-1).flatten(2).all(-1) for x, y in scales]
    return ~torch.stack(same).all(0)


def _length_changes(ours: Tensor, theirs: Tensor) -> Tensor:
    """[...] fp64: |theirs / ours - 1| along ours, of vectors [..., D]; a negated vector gives 2. It has no sign, so errors of
    several vectors add up. Of a zero vector 0, or infinite if theirs is not zero.
    """
    x, y = ours.double(), theirs.double()
    squares = x.square().sum(-1)
    zero = torch.where(y.abs().sum(-1) == 0, 0.0, torch.inf)
    return torch.where(squares > 0, ((x * y).sum(-1) / squares - 1).abs(), zero)


def hidden_figures(before: Tensor, ours: Tensor, theirs: Tensor, slips: Mapping[str, Tensor]) -> Values:
    """Figures of the update that a layer adds to hidden states [T, hidden]. The step of a number: half a rounding step of the
    sum, plus one rounding step of the update's root mean square.
    """
    update = ours.float() - before.float()
    unit = bounds.STEP[ours.dtype]
    step = unit / 2 * ours.float().abs() + unit * update.square().mean(-1, keepdim=True).sqrt()
    return number_figures("attention_mlp", update, update + (theirs.float() - ours.float()), 0, slips, step)


def guilty_head(ours: Tensor, theirs: Tensor, slips: Mapping[str, Tensor]) -> int | None:
    """The KV head whose known mistakes explain the difference of hidden states [T, hidden]; None if no single head does."""
    off = (theirs.double() - ours.double()).flatten()
    spans: dict[int, list[Tensor]] = {}
    for name, direction in slips.items():
        if "@" in name:
            spans.setdefault(int(name.rpartition("@")[2]), []).append(direction.double().flatten())

    def left(by: Tensor, directions: list[Tensor]) -> Tensor:
        basis = torch.linalg.qr(torch.stack(directions, 1)).Q
        rest: Tensor = by - basis @ (basis.T @ by)
        return rest

    if len(spans) < 2 or not bool(torch.isfinite(off).all()):
        return None
    rests = {head: left(off, directions) for head, directions in spans.items()}
    best = min(rests, key=lambda head: float(rests[head].norm()))
    explained_energy = float(off.square().sum() - rests[best].square().sum())
    others = [
        float(rests[best].square().sum() - left(rests[best], spans[head]).square().sum()) for head in spans if head != best
    ]
    return best if explained_energy > 4 * max(others) else None


# -- For the eye -------------------------------------------------------------------------------------------------------------
def level_matches(cache: PagedKVCache, layer: int, batch: Batch, ours: Snapshot, theirs: Snapshot) -> dict[str, float]:
    """Share of packed levels (numbers, without levels) that are equal, by "k" and "v"; none of a layer that keeps a state."""
    matches = {}
    for part in vector_parts(cache, layer):
        if part.packed and len(part.where(batch)[0]):
            pair = ours[part.name], theirs[part.name]
            levels = [part.kv_format.levels(fields) for fields in map(by_token, pair)]
            first = [next(iter(fields.values())) if x is None else x for x, fields in zip(levels, pair, strict=True)]
            matches[part.side] = float(torch.eq(*first).double().mean())
    return matches


class VectorComparison(NamedTuple):
    """The worst of all vectors: cosine, distance relative to the first one's length, and largest difference of a number."""

    cosine: float
    rel_l2: float
    max_abs: float


def compare_vectors(ours: Tensor, theirs: Tensor) -> VectorComparison:
    """Compare vectors [..., N] one by one, so that a long one does not hide a short one. A NaN makes every figure NaN."""
    a, b = ours.double(), theirs.double()
    length, off = a.norm(dim=-1), b - a
    cosine = _ratio((a * b).sum(-1), length * b.norm(dim=-1), empty=1.0).clamp(max=1.0)
    rel_l2 = _ratio(off.norm(dim=-1), length)
    return VectorComparison(float(cosine.min()), float(rel_l2.max()), float(off.abs().max()))


def _ratio(part: Tensor, whole: Tensor, empty: float = 0.0) -> Tensor:
    """part / whole, where 0 / 0 is `empty`."""
    return torch.where((part == 0) & (whole == 0), empty, part / whole)


# -- Verdicts ----------------------------------------------------------------------------------------------------------------
_WORDS = {
    "energy": "farther from the reference", "gain": "too large or too small", "changed": "more other levels",
    "leaps": "levels or a scale far off", "length": "stored too long or too short",
}  # fmt: skip


def verdicts(excesses: Mapping[Figure, float], differing: Iterable[str], together: bool = False) -> list[Verdict]:
    """One verdict for each stage, in order. If exactly one of several heads has a fault, the verdict names the head.

    Args:
        excesses: figures divided by their limits (`null.excess`); above 1 is a fault.
        differing: stages in which a result differs, or anything stored that is read.
        together: whether the figures are sums over all forwards.
    """
    stage_verdicts, differ = [], set(differing)
    for stage in dict.fromkeys(figure.stage for figure in excesses):
        stage_excesses = {figure: excess for figure, excess in excesses.items() if figure.stage == stage}
        worst = max(stage_excesses, key=stage_excesses.__getitem__)
        error = stage_excesses[worst]
        ties = any(figure.kind == "changed" for figure in stage_excesses)
        reason: Reason | None = "fault" if error > 1 else None if stage not in differ else "tie" if ties else "rounding"
        wrong = sorted({figure.head for figure, excess in stage_excesses.items() if excess > 1 and figure.head >= 0})
        heads = len({figure.head for figure in stage_excesses if figure.head >= 0})
        alone = reason == "fault" and len(wrong) == 1 < heads and stage != "attention_mlp"
        words = worst.kind.replace("slip ", "as with ") if worst.kind.startswith("slip") else _WORDS[worst.kind]
        scope = " over all forwards" if together else ""
        detail = f"{words}{scope}: {error:.3g} times what honest runs allow" if reason else ""
        stage_verdicts.append(Verdict(stage, reason, error, detail, head=wrong[0] if alone else None))
    return stage_verdicts


def call_violation(call: Call, result: Any, intact: bool) -> Verdict | None:
    """A fault for changed inputs, a wrong shape or a wrong dtype; else None. `intact`: the op's inputs are unchanged."""
    if not intact:
        return Verdict.violation(call.stage, "changed the inputs that it was given")
    ours, is_tensor = call.result, isinstance(result, Tensor)
    if result is ours is None or (is_tensor and ours is not None and (result.shape, result.dtype) == (ours.shape, ours.dtype)):
        return None
    returned = f"{list(result.shape)} {result.dtype}" if is_tensor else repr(result)
    expected = "" if ours is None else f", not {list(ours.shape)} {ours.dtype}"
    return Verdict.violation(call.stage, f"returned {returned}{expected}")


def judge_stray_writes(stray_writes: StrayWrites, layer: int | None, who: str = "") -> list[Verdict]:
    """Verdicts on places that changed although no op had to write there: places in `layer` if any, else in all layers."""
    at = {layer: stray_writes[layer]} if layer in stray_writes else stray_writes
    places_by_stage: dict[str, list[str]] = {}
    for number, parts in at.items():
        for name, places in parts.items():
            stage = {"k": "untouched_slots", "v": "untouched_slots", STATE: "untouched_state"}.get(name, "untouched_window")
            places_by_stage.setdefault(stage, []).append(f"layer {number}, {name}: {_some(places)}")
    words = f"{who} wrote" if who else "wrote"
    return [
        Verdict.violation(stage, f"{words} where nothing was to be written: {'; '.join(places_by_stage[stage])}")
        for stage in sorted(places_by_stage)
    ]


def _some(places: list[str]) -> str:
    listing = ", ".join(places[:4])
    return f"{listing} and {len(places) - 4} more" if len(places) > 4 else listing
