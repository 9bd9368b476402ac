"""Faults in Gated DeltaNet: gates, the convolution's state, and the state at the beginning of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import Attention, Dense, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.models.tensors import LayerWeights
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.recurrent import Recurrent
from haarkv.tq_ops.weight import dense
from haarkv.validation.faults.base import Call, Fault, Wrong, instead
from haarkv.validation.layers.states import CONV, MEMORY, Fields, begins

Read = Callable[[Recurrent, int, int], Fields | None]
"""The state from which a row goes on after a number of tokens; None for the right one."""


def delta_layers(model: DecoderModel) -> list[int]:
    """Layers that keep such a state."""
    return [layer for layer, shape in model.config.state_shapes.items() if MEMORY in {name for name, *_ in shape.tensors}]


def delta_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Every one, in one layer that keeps a state."""
    # Behind so few tokens that it still holds some of the beginning, what the convolution keeps shows it first.
    also = {"state_read": ("conv_state", "delta_state", "state_read")}
    last = len(model.weights.layers[layer]["a_log"]) - 1
    rows: dict[str, tuple[str, Wrong]] = DELTA | {"a stale state after prefix reuse": ("state_read", _Stale())}
    return [
        Fault(
            name, layer, stage, instead("gated_delta", wrong, lambda call: call.layer == layer),
            head=last if "the last head" in name else None, also=also.get(stage, ()),
        )
        for name, (stage, wrong) in rows.items()
    ]  # fmt: skip


# -- The state before the first new token ------------------------------------------------------------------------------------
class _Misread(Recurrent):
    """A state of which some rows are read otherwise."""

    def __init__(self, right: Recurrent, read_row: Read) -> None:
        vars(self).update(vars(right))
        self._read_row = read_row

    def read(self, batch: Batch) -> Fields:
        fields = super().read(batch)
        for index, (row, begin) in enumerate(zip(batch.rows.tolist(), begins(batch), strict=True)):
            for name, tensor in (self._read_row(self, row, begin) or {}).items():
                fields[name][index] = tensor
        return fields


def _version(state: Recurrent, row: int, place: int) -> Fields:
    return {name: tensor[row, place].clone() for name, tensor in state.tensors.items()}


def _reading(read_row: Read) -> Wrong:
    """An op that goes on from other states."""

    def run(call: Call) -> Tensor:
        state = call.at.state
        call.cache.states[call.layer] = _Misread(state, read_row)
        try:
            return call.again()
        finally:
            call.cache.states[call.layer] = state

    return run


def _not_reset(state: Recurrent, row: int, begin: int) -> Fields | None:
    return _version(state, row, 0) if begin == 0 and state.counts[row, 0] > 0 else None


def _too_few(state: Recurrent, row: int, begin: int) -> Fields | None:
    places = (state.counts[row] == begin + 1).nonzero().flatten().tolist()
    return _version(state, row, places[0]) if begin and places else None


def _cut(state: Recurrent, row: int, begin: int) -> Fields | None:
    return {name: torch.zeros_like(tensor[row, 0]) for name, tensor in state.tensors.items()} if begin else None


class _Stale:
    """Goes on from the state that it left itself after as many tokens in a row, whatever lies there now."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], Fields] = {}

    def __call__(self, call: Call) -> Tensor:
        state, batch = call.at.state, call.batch
        new = [row for row, begin in zip(batch.rows.tolist(), begins(batch), strict=True) if begin == 0]
        self._left = {key: fields for key, fields in self._left.items() if key[0] not in new}
        out: Tensor = _reading(lambda _, row, begin: self._left.get((row, begin)))(call)
        for row, end in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
            self._left.setdefault((row, end), _version(state, row, int((state.counts[row] == end).nonzero()[0])))
        return out


# -- The state that is left --------------------------------------------------------------------------------------------------
def _leaving(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
    """An op whose new versions of a tensor [versions, *] are changed; `change` also gets what lay there before."""

    def run(call: Call) -> Tensor:
        tensor, token_counts = call.at.state.tensors[name], call.at.state.counts
        before, out = tensor.clone(), call.again()
        for row, begin in zip(call.batch.rows.tolist(), begins(call.batch), strict=True):
            new = token_counts[row] > begin
            tensor[row, new] = change(tensor[row, new], before[row, new])
        return out

    return run


# -- The op itself -----------------------------------------------------------------------------------------------------------
def _last_keeps_all(call: Call) -> Tensor:
    a_log = call.a_log.clone()
    a_log[-1] = -30.0
    return call.again(a_log=a_log)


def _not_scaled(call: Call) -> Tensor:
    root: float = call.at.state.tensors[MEMORY].shape[-2] ** 0.5
    return call.again() * root


DELTA: dict[str, tuple[str, Wrong]] = {
    "decay of another head": (
        "delta_state",
        lambda call: call.again(a=call.a.roll(1, -1), a_log=call.a_log.roll(1, -1), dt_bias=call.dt_bias.roll(1, -1)),
    ),
    "decay of the last head left out": ("delta_state", _last_keeps_all),
    "beta of another head": ("delta_state", lambda call: call.again(b=call.b.roll(1, -1))),
    "the convolution's taps in the other order": ("delta_state", lambda call: call.again(conv=call.conv.flip(-1))),
    "a convolution state one token late": ("conv_state", _leaving(CONV, lambda now, _: now.roll(1, 1))),
    "a state not reset between sequences": ("state_read", _reading(_not_reset)),
    "rolled back one step too few": ("state_read", _reading(_too_few)),
    "a state cut between chunks": ("state_read", _reading(_cut)),
    "a state that is not left": ("delta_state", _leaving(MEMORY, lambda _, before: before)),
    "q not divided by the root of its length": ("gated_delta", _not_scaled),
}
"""What `gated_delta` may do wrong, and the stage that shows it."""


# -- A model to plant them in ------------------------------------------------------------------------------------------------
def small_hybrid(dtype: torch.dtype, vocab_size: int) -> DecoderModel:
    """Three layers with random weights, of which the second attends; heads forget at different rates."""
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

        return weights.map(of_size_one)

    layer_weights = tuple(layer(index, weights) for index, weights in enumerate(raw.layers))
    return DecoderModel.from_weights(config, replace(raw, embedding=dense(raw.embedding) / 0.02, layers=layer_weights))
