"""What a layer keeps in place of K and V: one state a sequence, in versions, each after another number of tokens.

A forward must leave the state after each of its last tokens, and the one that it began with unchanged. Other versions are
spoilt before a run: an executor that reads one, for a new sequence or after tokens were taken back, goes far off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.recurrent import Recurrent

STATE = "state"
"""The name of a state among the parts of what a layer stores."""
SEEN, CONV, MEMORY = "seen", "conv", "delta"
"""Its tensors: tokens seen, the convolution's last inputs, the matrices."""
STATE_STAGES = {CONV: "conv_state", MEMORY: "delta_state"}

Fields = dict[str, Tensor]


def recurrent_state(cache: PagedKVCache, layer: int) -> Recurrent | None:
    """A layer's state; None if it keeps K and V."""
    state = cache.states.get(layer)
    return state if isinstance(state, Recurrent) else None


def tensors_of_state(state: Recurrent) -> Fields:
    """Its own tensors, [rows + 1, versions, *]."""
    return {**state.tensors, SEEN: state.counts}


def take_rows(state: Recurrent, batch: Batch) -> Fields:
    """Host copies of the rows [B, versions, *] of a batch's sequences."""
    rows = batch.rows.to(state.counts.device).long()
    return {name: tensor[rows].to("cpu", copy=True) for name, tensor in tensors_of_state(state).items()}


def put_rows(state: Recurrent, batch: Batch, fields: Fields) -> None:
    """The inverse of `take_rows`; `spoil` if there are no fields."""
    if not fields:
        spoil(state, batch)
        return
    rows = batch.rows.to(state.counts.device).long()
    for name, tensor in tensors_of_state(state).items():
        tensor[rows] = fields[name].to(tensor.device)


def begins(batch: Batch) -> list[int]:
    """Tokens of each sequence of a batch that are stored before it."""
    return (batch.seq_lens - batch.query_start_loc.diff()).tolist()


def spoil(state: Recurrent, batch: Batch) -> None:
    """Overwrite versions that a forward must not read: opposite states, of a token more or less than are stored."""
    for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True):
        right = (state.counts[row] == begin) & (begin > 0)
        others = (~right).nonzero().flatten().tolist()
        # Label the spoilt versions: one token more (as if taken back), one fewer (an older state), then more.
        counts = [begin + 1, begin - 1, *range(begin + 2, begin + 2 + len(others))]
        for tensor in state.tensors.values():
            like = tensor[row, int(right.nonzero()[0])] if bool(right.any()) else torch.zeros_like(tensor[row, 0])
            tensor[row, others] = torch.where(like == 0, 1.0, -like / 3).to(tensor.dtype)
        state.counts[row, others] = torch.tensor(
            [count for count in counts if count > 0][: len(others)], device=state.counts.device
        )


def with_others(state: Recurrent, batch: Batch) -> bool:
    """Replace the state of each continued sequence by another of as many tokens, as if a prefix were reused."""
    some = False
    for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True):
        if begin > 0:
            version = int((state.counts[row] == begin).nonzero()[0])
            for tensor in state.tensors.values():
                tensor[row, version] = tensor[row, version].roll(1, -1) / 2
            some = True
    return some


def changed_rows(now: Recurrent, before: Recurrent, batch: Batch | None) -> list[str]:
    """What a forward changed and must not: other sequences' rows, and its own versions of no more tokens than before it."""
    changes = []
    begin = dict(zip(batch.rows.tolist(), begins(batch), strict=True)) if batch is not None else {}
    ours, theirs = tensors_of_state(now), tensors_of_state(before)
    for row in range(len(now.counts) - 1):  # the last row belongs to no sequence
        same = torch.stack(
            [(ours[name][row] == theirs[name][row]).flatten(1).all(1) for name in ours if name != SEEN]
            + [ours[SEEN][row] == theirs[SEEN][row]]
        ).all(0)
        if row in begin:
            same |= (now.counts[row] < 0) | (now.counts[row] > begin[row])
        if not bool(same.all()):
            token_counts = now.counts[row][~same].tolist()
            changes.append(f"row {row} (states after {', '.join(map(str, token_counts))} tokens)")
    return changes


# -- Comparing ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StateComparison:
    """One tensor of a state as two executors left it.

    Attributes:
        heads: the reference's numbers and the other's by head (of the convolution: q's, k's, v's heads in order), [1, n].
        error: largest distance of a head's numbers, relative to their own length; NaN if one is not finite.
        problem: what is wrong whatever the numbers are; empty if nothing.
    """

    stage: str
    heads: tuple[tuple[Tensor, Tensor], ...]
    error: float
    problem: str = ""


def left_after(state: Recurrent, batch: Batch) -> list[list[int]]:
    """Numbers of tokens after which each sequence of a batch must leave a state."""
    most = state.shape.versions - 1
    pairs = zip(begins(batch), batch.seq_lens.tolist(), strict=True)
    return [list(range(max(begin, end - most) + 1, end + 1)) for begin, end in pairs]


def compare_states(state: Recurrent, batch: Batch, ours: Fields, theirs: Fields) -> tuple[StateComparison, ...]:
    """Compare rows of a batch's sequences, as `take_rows` gives them."""
    pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    problem = ""
    for index, (begin, end, counts) in enumerate(
        zip(begins(batch), batch.seq_lens.tolist(), left_after(state, batch), strict=True)
    ):
        for count in counts if begin == 0 else [begin, *counts]:
            matches = (theirs[SEEN][index] == count).nonzero().flatten().tolist()
            if len(matches) != 1:
                what = f"{len(matches)} states" if matches else "no state"
                problem = problem or f"sequence {index} has {what} after {count} tokens, and must have one"
            elif count != begin:
                pairs.append(((index, int((ours[SEEN][index] == count).nonzero()[0])), (index, matches[0])))
        if int(theirs[SEEN][index].max()) > end:
            problem = problem or f"sequence {index} of {end} tokens keeps a state that has seen more"
    comparisons = []
    names = list(state.tensors)
    for name in names if pairs else ():
        x, y = (torch.stack([fields[name][place] for place in places]) for fields, places in (
            (ours, [a for a, _ in pairs]), (theirs, [b for _, b in pairs])))  # fmt: skip
        heads = tuple(
            (a.reshape(1, -1), b.reshape(1, -1))
            for a, b in zip(state_heads(name, x, state), state_heads(name, y, state), strict=True)
        )
        errors = [(b.double() - a.double()).norm() / a.double().norm().clamp(min=1e-300) for a, b in heads]
        comparisons.append(StateComparison(STATE_STAGES.get(name, name), heads, float(torch.stack(errors).max())))
    if problem:
        comparisons = [
            *comparisons[:-1],
            replace(comparisons[-1], problem=problem) if comparisons else StateComparison("delta_state", (), 0.0, problem),
        ]
    return tuple(sorted(comparisons, key=lambda one: one.stage))


def state_heads(name: str, x: Tensor, state: Recurrent) -> list[Tensor]:
    """A state's tensor [n, *] by head: matrices [n, dk * dv]; of the convolution q's and k's [n, taps - 1, dk], v's
    [n, taps - 1, dv].
    """
    if MEMORY not in state.tensors or name not in (CONV, MEMORY):
        return [x.flatten(1)]
    heads, key_dim, value_dim = state.tensors[MEMORY].shape[2:]
    if name == MEMORY:
        return list(x.flatten(2).unbind(1))
    keys = (x.shape[-1] - heads * value_dim) // key_dim
    return list(torch.split(x, [*[key_dim] * keys, *[value_dim] * heads], dim=-1))
