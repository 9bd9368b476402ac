"""What a layer keeps in place of K and V: a state by sequence, in versions that have seen so many tokens.

A state cannot be told apart by places, so each row is taken and put whole. What a forward must leave is known: the state after
each of its last tokens, and, untouched, the one that it began with. What else lies in a row is unused. It is spoilt before a
run (`spoil`), so that an executor which reads it, for a new sequence, after tokens were taken back, or because it lies first,
goes on from something far off.
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
"""Names of its tensors: tokens seen, the convolution's last inputs, the matrices."""
STATE_STAGES = {CONV: "conv_state", MEMORY: "delta_state"}

Fields = dict[str, Tensor]


def recurrent_state(cache: PagedKVCache, layer: int) -> Recurrent | None:
    """A layer's state; None if it keeps K and V."""
    state = cache.states.get(layer)
    return state if isinstance(state, Recurrent) else None


def tensors_of_state(state: Recurrent) -> Fields:
    """The very tensors, [rows + 1, versions, *]."""
    return {**state.tensors, SEEN: state.counts}


def take_rows(state: Recurrent, batch: Batch) -> Fields:
    """Copies, on the host, of the rows [B, versions, *] of a batch's sequences."""
    rows = batch.rows.to(state.counts.device).long()
    return {name: tensor[rows].to("cpu", copy=True) for name, tensor in tensors_of_state(state).items()}


def put_rows(state: Recurrent, batch: Batch, fields: Fields) -> None:
    """The inverse of `take_rows`; of no fields, `spoil`."""
    if not fields:
        spoil(state, batch)
        return
    rows = batch.rows.to(state.counts.device).long()
    for name, tensor in tensors_of_state(state).items():
        tensor[rows] = fields[name].to(tensor.device)


def begins(batch: Batch) -> list[int]:
    """Tokens that each sequence of a batch has stored before it."""
    return (batch.seq_lens - batch.query_start_loc.diff()).tolist()


def spoil(state: Recurrent, batch: Batch) -> None:
    """Put something far off wherever a forward must not read: opposite states, of a token more or less than are stored."""
    for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True):
        right = (state.counts[row] == begin) & (begin > 0)
        others = (~right).nonzero().flatten().tolist()
        # As if tokens behind had been taken back, and tokens before were still there.
        counts = [begin + 1, begin - 1, *range(begin + 2, begin + 2 + len(others))]
        for tensor in state.tensors.values():
            like = tensor[row, int(right.nonzero()[0])] if bool(right.any()) else torch.zeros_like(tensor[row, 0])
            tensor[row, others] = torch.where(like == 0, 1.0, -like / 3).to(tensor.dtype)
        state.counts[row, others] = torch.tensor(
            [count for count in counts if count > 0][: len(others)], device=state.counts.device
        )


def with_others(state: Recurrent, batch: Batch) -> bool:
    """Give each sequence that goes on another state of as many tokens, as when a prefix is reused: half of it, its value
    coordinates turned; whether there was one."""
    some = False
    for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True):
        if begin > 0:
            version = int((state.counts[row] == begin).nonzero()[0])
            for tensor in state.tensors.values():
                tensor[row, version] = tensor[row, version].roll(1, -1) / 2
            some = True
    return some


def changed_rows(now: Recurrent, before: Recurrent, batch: Batch | None) -> list[str]:
    """What changed that a forward must leave as it is: rows of other sequences; and in its own, states that say that they have
    seen no more tokens than were stored before it.

    Args:
        before: the same state before the forward.
        batch: of the forward; None if nothing was to be written.
    """
    changes = []
    begin = dict(zip(batch.rows.tolist(), begins(batch), strict=True)) if batch is not None else {}
    ours, theirs = tensors_of_state(now), tensors_of_state(before)
    for row in range(len(now.counts) - 1):  # the last row is nobody's
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
        stage: "conv_state" or "delta_state".
        heads: of each head (of the convolution: of Q, K or V, counted in this order) the reference's numbers and the other's,
            [1, n]; all sequences and versions.
        error: largest distance of a head's numbers, relative to their own length; NaN if one is not finite.
        problem: what is wrong whatever the numbers are; empty if nothing is.
    """

    stage: str
    heads: tuple[tuple[Tensor, Tensor], ...]
    error: float
    problem: str = ""


def left_after(state: Recurrent, batch: Batch) -> list[list[int]]:
    """Of each sequence of a batch, the numbers of tokens after which it must leave a state."""
    most = state.shape.versions - 1
    pairs = zip(begins(batch), batch.seq_lens.tolist(), strict=True)
    return [list(range(max(begin, end - most) + 1, end + 1)) for begin, end in pairs]


def compare_states(state: Recurrent, batch: Batch, ours: Fields, theirs: Fields) -> tuple[StateComparison, ...]:
    """Compare what a forward left.

    Args:
        state: whose shapes count.
        ours, theirs: rows of the batch's sequences, as `take_rows` finds them.
    """
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
    """A state's tensor [n, *] head by head: of the matrices [n, dk * dv] each; of the convolution each token's part,
    [n, taps - 1, dk] of q's and of k's, [n, taps - 1, dv] of v's."""
    if MEMORY not in state.tensors or name not in (CONV, MEMORY):
        return [x.flatten(1)]
    heads, key_dim, value_dim = state.tensors[MEMORY].shape[2:]
    if name == MEMORY:
        return list(x.flatten(2).unbind(1))
    keys = (x.shape[-1] - heads * value_dim) // key_dim
    return list(torch.split(x, [*[key_dim] * keys, *[value_dim] * heads], dim=-1))
