"""Faults in Gated DeltaNet: gates, the convolution's state, and the wrong state at the beginning of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import Attention, Dense, Layer, ModelConfig, Norm, Rope
from haarkv.models.delta_net import DeltaNet
from haarkv.models.tensors import LayerWeights
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.recurrent import Recurrent
from haarkv.tq_ops.weight import dense
from haarkv.validation.layers.faults import Fault, Table
from haarkv.validation.layers.states import CONV, MEMORY, SEEN, begins, state_of, tensors_of_state


@dataclass(frozen=True)
class Told:
    """What `gated_delta` is given."""

    x: Tensor
    a: Tensor
    b: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    cache: PagedKVCache
    layer: int
    batch: Batch

    def again(self, **other: Any) -> Tensor:
        """What the reference answers where some of it is other."""
        return reference.gated_delta(*vars(replace(self, **other)).values())

    @property
    def state(self) -> Recurrent:
        """The layer's."""
        state = state_of(self.cache, self.layer)
        assert state is not None
        return state


def delta_layers(model: DecoderModel) -> list[int]:
    """The layers that keep such a state."""
    return [layer for layer, shape in model.config.state_shapes.items() if MEMORY in {name for name, *_ in shape.tensors}]


def delta_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Every one, in one layer that keeps a state."""

    def at(name: str, stage: str, wrong: Callable[[Told], Tensor], head: int | None = None) -> Fault:
        # Where layers run whole, the first part that shows a wrong beginning is what the convolution keeps of it.
        also = ("conv_state", "state_read") if stage == "state_read" else ("delta_state",) if stage == "convolution" else ()
        return Fault(name, layer, stage, _in_layer(layer, wrong), head=head, also=also)

    return [
        at("decay of another head", "decay", lambda told: told.again(**{n: getattr(told, n).roll(1, -1) for n in _GATES})),
        at(
            "decay of the last head left out",
            "decay",
            _last_keeps_all,
            head=len(model.weights.layers[layer]["a_log"]) - 1,
        ),
        at("beta of another head", "beta", lambda told: told.again(b=told.b.roll(1, -1))),
        at("the convolution's taps in the other order", "convolution", lambda told: told.again(conv=told.conv.flip(-1))),
        at("a convolution state one token late", "conv_state", _late),
        at("a state not reset between sequences", "state_read", lambda told: _reading(told, _not_reset)),
        at("rolled back one step too few", "state_read", lambda told: _reading(told, _too_few)),
        at("a stale state after prefix reuse", "state_read", _Stale()),
        at("a state cut between chunks", "state_read", lambda told: _reading(told, _cut)),
        at("a state that is not left", "delta_state", _not_left),
        at("q not divided by the root of its length", "gated_delta", _not_scaled),
    ]


_GATES = ("a", "a_log", "dt_bias")


def _in_layer(layer: int, wrong: Callable[[Told], Tensor]) -> Table:
    def run(*args: Any) -> Tensor:
        told = Told(*args)
        return wrong(told) if told.layer == layer else reference.gated_delta(*args)

    return {"gated_delta": run}


def _last_keeps_all(told: Told) -> Tensor:
    a_log = told.a_log.clone()
    a_log[-1] = -30.0
    return told.again(a_log=a_log)


def _late(told: Told) -> Tensor:
    """The newest token is missing in what the convolution keeps."""
    out, windows, seen = told.again(), told.state.tensors[CONV], told.state.seen
    for row, begin in zip(told.batch.rows.tolist(), begins(told.batch), strict=True):
        new = seen[row] > begin
        windows[row, new] = windows[row, new].roll(1, 1)
    return out


def _reading(told: Told, change: Callable[[Tensor, int, int], int | None]) -> Tensor:
    """Go on from another version of the state where `change`, given what a row's versions have seen, what they should have and
    the number of new tokens, names one; from zeros where it names -1."""
    state, counts = told.state, told.batch.query_start_loc.diff().tolist()
    saved: list[tuple[int, int, dict[str, Tensor]]] = []
    batch = told.batch
    for row, begin, new in zip(batch.rows.tolist(), begins(batch), counts, strict=True):
        place = change(state.seen[row], begin, new)
        if place is None:
            continue
        # The version that should be read is lent the numbers of the other, and has its own back afterwards.
        right = int((state.seen[row] == begin).nonzero()[0]) if begin else place
        saved.append((row, right, {name: tensor[row, right].clone() for name, tensor in state.tensors.items()}))
        for tensor in state.tensors.values():
            tensor[row, right] = tensor[row, place] if place >= 0 else 0
    fresh = [row for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True) if not begin]
    out = _from_what_lies_there(told, {row: right for row, right, _ in saved if row in fresh})
    for row, right, tensors in saved:
        if row not in fresh:
            for name, tensor in tensors.items():
                state.tensors[name][row, right] = tensor
    return out


def _from_what_lies_there(told: Told, versions: dict[int, int]) -> Tensor:
    """The op, whose new sequences in some rows do not begin with zeros but with a version that lies there."""
    if not versions:
        return told.again()
    state = told.state
    begun = {
        row: {name: tensor[row, place].clone() for name, tensor in state.tensors.items()} for row, place in versions.items()
    }

    class Lying(Recurrent):
        def read(self, batch: Batch) -> dict[str, Tensor]:
            found = state.read(batch)
            for index, row in enumerate(batch.rows.tolist()):
                for name, tensor in begun.get(row, {}).items():
                    found[name][index] = tensor
            return found

    lying = object.__new__(Lying)
    lying.__dict__.update(state.__dict__)
    told.cache.states[told.layer] = lying
    try:
        return told.again()
    finally:
        told.cache.states[told.layer] = state


def _not_reset(seen: Tensor, begin: int, new: int) -> int | None:  # noqa: ARG001
    return 0 if begin == 0 and int(seen[0]) > 0 else None


def _too_few(seen: Tensor, begin: int, new: int) -> int | None:  # noqa: ARG001
    places = (seen == begin + 1).nonzero().flatten().tolist()
    return places[0] if begin and places else None


def _cut(seen: Tensor, begin: int, new: int) -> int | None:  # noqa: ARG001
    return -1 if begin else None


class _Stale:
    """Goes on from the state that it left itself after as many tokens in a row, whatever lies there now."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], dict[str, Tensor]] = {}

    def __call__(self, told: Told) -> Tensor:
        state = told.state
        lent: list[tuple[int, int, dict[str, Tensor]]] = []
        for row, begin in zip(told.batch.rows.tolist(), begins(told.batch), strict=True):
            if begin == 0:
                self._left = {key: kept for key, kept in self._left.items() if key[0] != row}
            elif (row, begin) in self._left:
                place = int((state.seen[row] == begin).nonzero()[0])
                lent.append((row, place, {name: tensor[row, place].clone() for name, tensor in state.tensors.items()}))
                for name, tensor in self._left[row, begin].items():
                    state.tensors[name][row, place] = tensor
        out = told.again()
        for row, place, tensors in lent:
            for name, tensor in tensors.items():
                state.tensors[name][row, place] = tensor
        for row, end in zip(told.batch.rows.tolist(), told.batch.seq_lens.tolist(), strict=True):
            place = int((state.seen[row] == end).nonzero()[0])
            self._left.setdefault((row, end), {name: tensor[row, place].clone() for name, tensor in state.tensors.items()})
        return out


def _not_left(told: Told) -> Tensor:
    """All is computed, and the states stay what they were."""
    before = {name: tensor.clone() for name, tensor in tensors_of_state(told.state).items()}
    out = told.again()
    for row, begin in zip(told.batch.rows.tolist(), begins(told.batch), strict=True):
        new = told.state.seen[row] > begin
        told.state.tensors[MEMORY][row, new] = before[MEMORY][row, new]
    assert SEEN in before
    return out


def _not_scaled(told: Told) -> Tensor:
    root: float = told.state.tensors[MEMORY].shape[-2] ** 0.5
    return told.again() * root


# -- A model to plant them in ------------------------------------------------------------------------------------------------
def small_hybrid(dtype: torch.dtype, vocab_size: int) -> DecoderModel:
    """Three layers with random weights, of which the second attends. Heads forget at rates that differ, none at once."""
    norm = Norm(1e-6, plus_one=True)
    attention = Attention(4, 2, 64, Rope(1e4, 16), 64**-0.5, head_norms=True, gated=True)
    delta = DeltaNet(2, 4, 16, 24)
    layers = tuple(Layer(attention if index == 1 else delta, Dense(80), norm) for index in range(3))
    config = ModelConfig("hybrid", layers, 48, vocab_size, norm, max_position_embeddings=512)
    raw = random_weights(config, dtype, seed=0)

    def layer(index: int, weights: LayerWeights) -> LayerWeights:
        rates = torch.linspace(-4.0, 0.5, delta.num_value_heads).roll(index)

        def of_size_one(field: str, tensor: Tensor) -> Tensor:
            if field == "a_log":
                return rates
            # Drawn with a deviation of 0.02; what is summed should have one of 1.
            return tensor * (tensor[0].numel() ** -0.5 / 0.02) if tensor.ndim > 1 else tensor

        return weights.changed(of_size_one)

    layers_made = tuple(layer(index, weights) for index, weights in enumerate(raw.layers))
    return DecoderModel.of(config, replace(raw, embedding=dense(raw.embedding) / 0.02, layers=layers_made))
