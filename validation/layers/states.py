"""What a layer keeps in place of K and V: one state a sequence, in versions, each after another number of tokens.

A forward must leave the state after each of its last tokens, and the one that it began with unchanged. Other versions are
spoilt before a run: an executor that reads one, for a new sequence or after tokens were taken back, goes far off.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def begins(batch: Batch) -> list[int]:
    """Tokens of each sequence of a batch that are stored before it."""
    return (batch.seq_lens - batch.query_start_loc.diff()).tolist()


class StatePart:
    """The state as a part of what a layer stores; `fields` are its own tensors, [rows + 1, versions, *]."""

    name = STATE

    def __init__(self, state: Recurrent) -> None:
        self.state, self.fields = state, {**state.tensors, SEEN: state.counts}

    def take(self, batch: Batch) -> Fields:
        """Host copies of the rows [B, versions, *] of a batch's sequences."""
        rows = batch.rows.to(self.state.counts.device).long()
        return {name: tensor[rows].to("cpu", copy=True) for name, tensor in self.fields.items()}

    def put(self, batch: Batch, fields: Fields) -> None:
        """The inverse of `take`; without fields, spoil all versions that a forward must not read."""
        if not fields:
            self._spoil(batch)
        rows = batch.rows.to(self.state.counts.device).long()
        for name, tensor in fields.items():
            self.fields[name][rows] = tensor.to(self.state.counts.device)

    def _spoil(self, batch: Batch) -> None:
        """Overwrite versions that a forward must not read with opposite states, of a token more or less than are stored."""
        for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True):
            right = (self.state.counts[row] == begin) & (begin > 0)
            others = (~right).nonzero().flatten().tolist()
            # Label the spoilt versions: one token more (as if taken back), one fewer (an older state), then more.
            counts = [begin + 1, begin - 1, *range(begin + 2, begin + 2 + len(others))]
            for tensor in self.state.tensors.values():
                like = tensor[row, int(right.nonzero()[0])] if bool(right.any()) else torch.zeros_like(tensor[row, 0])
                tensor[row, others] = torch.where(like == 0, 1.0, -like / 3).to(tensor.dtype)
            self.state.counts[row, others] = torch.tensor(
                [count for count in counts if count > 0][: len(others)], device=self.state.counts.device
            )

    def replace(self, batch: Batch) -> bool:
        """Replace the state of each continued sequence by another of as many tokens, as if a prefix were reused."""
        some = False
        for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True):
            if begin > 0:
                version = int((self.state.counts[row] == begin).nonzero()[0])
                for tensor in self.state.tensors.values():
                    tensor[row, version] = tensor[row, version].roll(1, -1) / 2
                some = True
        return some

    # -- Judging ---------------------------------------------------------------------------------------------------------
    def changes(self, before: Fields, batch: Batch | None) -> list[str]:
        """What a forward changed and must not: rows of other sequences, and versions of no more tokens than before it."""
        changes = []
        begin = dict(zip(batch.rows.tolist(), begins(batch), strict=True)) if batch is not None else {}
        counts = self.state.counts
        for row in range(len(counts) - 1):  # the last row belongs to no sequence
            equal = [tensor[row] == before[name][row] for name, tensor in self.fields.items()]
            same = torch.stack([each.view(len(counts[row]), -1).all(1) for each in equal]).all(0)
            if row in begin:
                same |= (counts[row] < 0) | (counts[row] > begin[row])
            if not bool(same.all()):
                changes.append(f"row {row} (states after {', '.join(map(str, counts[row][~same].tolist()))} tokens)")
        return changes

    def problem(self, batch: Batch, fields: Fields) -> str:
        """A state that rows of a batch's sequences lack, or one of other tokens; empty if there is none."""
        rows = zip(begins(batch), batch.seq_lens.tolist(), self._left_after(batch), strict=True)
        for index, (begin, end, counts) in enumerate(rows):
            for count in counts if begin == 0 else [begin, *counts]:
                if (number := len(_versions(fields, index, count))) != 1:
                    what = f"{number} states" if number else "no state"
                    return f"sequence {index} has {what} after {count} tokens, and must have one"
            if int(fields[SEEN][index].max()) > end:
                return f"sequence {index} of {end} tokens keeps a state that has seen more"
        return ""

    def decoded(self, batch: Batch, ours: Fields, theirs: Fields) -> Iterator[tuple[str, int, Tensor, Tensor]]:
        """Stage, head, and both sides' numbers [1, n] of the states that a batch leaves and both sides have."""
        pairs = [
            (index, int(_versions(ours, index, count)[0]), int(others[0]))
            for index, counts in enumerate(self._left_after(batch))
            for count in counts
            if len(others := _versions(theirs, index, count)) == 1
        ]
        for name in self.state.tensors if pairs else ():
            x = torch.stack([ours[name][index, version] for index, version, _ in pairs])
            y = torch.stack([theirs[name][index, version] for index, _, version in pairs])
            for head, both in enumerate(zip(self._heads(name, x), self._heads(name, y), strict=True)):
                yield STATE_STAGES.get(name, name), head, both[0].reshape(1, -1), both[1].reshape(1, -1)

    def newest(self, batch: Batch, fields: Fields) -> Iterator[tuple[str, Tensor]]:
        """The newest state of each sequence by tensor and head, [B, n]; of the convolution its last input."""
        for name in self.state.tensors:
            x = [fields[name][row, int(_versions(fields, row, end)[0])] for row, end in enumerate(batch.seq_lens.tolist())]
            for head, part in enumerate(self._heads(name, torch.stack(x))):
                # Before its first tokens a convolution is fed zeros.
                yield f"state ({name}, head {head})", (part[:, -1:] if name == CONV else part).flatten(1)

    def _left_after(self, batch: Batch) -> list[list[int]]:
        """Numbers of tokens after which each sequence of a batch must leave a state."""
        most = self.state.shape.versions - 1
        pairs = zip(begins(batch), batch.seq_lens.tolist(), strict=True)
        return [list(range(max(begin, end - most) + 1, end + 1)) for begin, end in pairs]

    def _heads(self, name: str, x: Tensor) -> list[Tensor]:
        """A tensor [n, *] by head: matrices [n, dk * dv]; of the convolution q's and k's [n, taps - 1, dk], then v's
        [n, taps - 1, dv].
        """
        if MEMORY not in self.state.tensors or name not in (CONV, MEMORY):
            return [x.flatten(1)]
        heads, key_dim, value_dim = self.state.tensors[MEMORY].shape[2:]
        if name == MEMORY:
            return list(x.flatten(2).unbind(1))
        keys = (x.shape[-1] - heads * value_dim) // key_dim
        return list(torch.split(x, [*[key_dim] * keys, *[value_dim] * heads], dim=-1))


def state_part(cache: PagedKVCache, layer: int) -> StatePart | None:
    """A layer's state; None if it keeps K and V."""
    state = cache.states.get(layer)
    return StatePart(state) if isinstance(state, Recurrent) else None


def _versions(fields: Fields, row: int, count: int) -> Tensor:
    """[n]: places of a row's versions that have seen this number of tokens."""
    return (fields[SEEN][row] == count).nonzero().flatten()
