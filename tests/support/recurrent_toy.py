"""A small recurrent mixer, `s = 0.75 s + y + last / 2`, and models in which it stands between layers of attention."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from small_models import SMALL, resize_config, small_model

from haarkv.models.layer import MIXERS, MixerKind
from haarkv.models.tensors import Axis, StoredTensor
from haarkv.tq_ops.kv.recurrent import StateShape

WIDTH = 24


@dataclass(frozen=True)
class Toy:
    """Declares the mixer; its state is the sum and the last number, as DeltaNet has a matrix and a short convolution."""

    versions: int = 6
    kv_shape: None = None

    @property
    def state_shape(self):
        return StateShape((("sum", (WIDTH,), torch.float32), ("last", (WIDTH,), torch.float32)), self.versions)


def _tensors(mixer, norm, hidden_size):
    return {
        "in_proj": StoredTensor("toy.in_proj.weight", (Axis(WIDTH), Axis(hidden_size))),
        "o_proj": StoredTensor("toy.o_proj.weight", (Axis(hidden_size), Axis(WIDTH))),
    }


def _mix(x, weights, mixer, norm, index, step):
    state, batch = step.cache.states[index], step.batch
    before, y = state.read(batch), step.ops.linear(x, weights["in_proj"])
    starts = batch.query_start_loc.tolist()
    sums, lasts = [], []
    for row, (begin, end) in enumerate(pairwise(starts)):
        total, last = before["sum"][row], before["last"][row]
        for token in range(begin, end):
            total, last = 0.75 * total + y[token] + last / 2, y[token]
            sums.append(total)
            lasts.append(last)
    state.write({"sum": torch.stack(sums), "last": torch.stack(lasts)}, torch.arange(len(x)), batch)
    return step.ops.linear(torch.stack(sums).to(x.dtype), weights["o_proj"])


@contextmanager
def toy_mixer():
    """While it is open, layers may mix tokens by `Toy`."""
    MIXERS[Toy] = MixerKind(_tensors, _mix)
    try:
        yield
    finally:
        del MIXERS[Toy]


def hybrid(versions=6, attention=True):
    """Four layers: attention, the toy, attention with a window of 20, the toy; or the toy alone, twice."""
    base = resize_config(SMALL, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64)
    layer = base.layers[0]
    toy = replace(layer, mixer=Toy(versions))
    local = replace(layer, mixer=replace(layer.attention, window=20))
    return small_model(replace(base, layers=(layer, toy, local, toy) if attention else (toy, toy)))
