"""Sequences of one layer of Gated DeltaNet on an op table: prompts, steps, drafts that are taken back."""

from __future__ import annotations

import torch
from op_contract.caches import LAYER

VERSIONS = 5


class Run:
    """A cache with room for some sequences of one layer's states, and what each of them is told."""

    def __init__(self, ops, case, sequences=1, length=90, device="cpu"):
        self.ops, self.case = ops, case
        self.cache, self.paging = case.new_cache(sequences, VERSIONS, device)
        self.ids = [self.paging.add() for _ in range(sequences)]
        self.told = [tuple(x.to(device) for x in case.inputs((length,), seed)) for seed in range(sequences)]
        self.weights = [weight.to(device) for weight in case.weights]

    def batch(self, rows, counts):
        return self.paging.batch([self.ids[row] for row in rows], counts)

    def run(self, rows, counts, batch=None):
        batch = (batch or self.batch(rows, counts)).to(self.cache.device)
        begins = batch.positions[batch.query_start_loc[:-1].long()].tolist()
        parts = [
            [x[begin : begin + count] for x in self.told[row]] for row, begin, count in zip(rows, begins, counts, strict=True)
        ]
        x, a, b = map(torch.cat, zip(*parts, strict=True))
        return self.ops.gated_delta(x, a, b, *self.weights, self.cache.view(LAYER, batch)).split(counts)

    def state(self, row=0):
        """The newest version of a sequence's state."""
        place, length = self.paging.places(self.ids[row]), self.paging.length(self.ids[row])
        return {name: tensor[-1] for name, tensor in self.cache.states[LAYER].take(place, length).items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("conv", "delta", "seen"))


def whole(ops, case, seed=0, length=90, total=90, device="cpu"):
    """What the first `length` of `total` tokens give at once, and the state that they leave."""
    run = Run(ops, case, sequences=seed + 1, length=total, device=device)
    (out,) = run.run([seed], [length])
    return out, run.state(seed)
