"""Faults in learned coordinates: other matrices, means and steps, where vectors are stored and where they are read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.formats.learned import LearnedFormat
from haarkv.tq_ops.formats.made_up import calibration
from haarkv.tq_ops.formats.rotated import Coordinates
from haarkv.validation.layers.faults import Fault, Given, Layer
from haarkv.validation.layers.parts import Stored, read_as

_K_NIBBLES, _V_NIBBLES = 208, 128
LEARNED = f"k=lr{_K_NIBBLES},v=lr{_V_NIBBLES}"
"""Formats for faults in learned coordinates: K's have third levels, and V's as many levels as numbers."""


def planted_learned(model: DecoderModel, layer: int) -> list[Fault]:
    """Faults in what was learned, in one layer each, for a cache in `LEARNED` of made-up coordinates.

    Args:
        model, layer: as in `planted`.
    """
    assert model.config.heads.num_kv_heads > 1, "heads can be exchanged where there are two"
    config, at, exchanged = model.config, Layer(model, layer), "two heads' matrices exchanged"
    learned = calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
    k, v = learned.format("k", _K_NIBBLES), learned.format("v", _V_NIBBLES)

    def storing(name: str, side: str, wrong: LearnedFormat) -> Fault:
        def keep(given: Given) -> Stored:
            x: Tensor = getattr(given, side)
            return {side: by_token(wrong.quantize(x.transpose(0, 1), given.layer))}

        return at.keeping(name, f"store_kv.{side}", keep)

    def reading(name: str, k: KVFormat, v: KVFormat) -> Fault:
        return at.attending(name, lambda asked: asked.again(cache=read_as(asked.cache, asked.layer, formats=(k, v))))

    return [
        storing(exchanged, "k", k.altered(_exchanged)),
        storing("a mean left out of K", "k", k.altered(_without_mean)),
        storing("a mean left out of V", "v", v.altered(_without_mean)),
        storing("steps of the stages swapped", "k", k.altered(_swapped_steps)),
        storing("coordinates transposed", "v", v.altered(_transposed)),
        reading(f"{exchanged} in attention", k.altered(_exchanged), v),
        reading("V's mean left out of the output", k, v.altered(_without_mean)),
        reading("steps of the stages swapped in attention", k.altered(_swapped_steps), v),
        reading("V's rows transposed", k, v.altered(_transposed)),
    ]


def _exchanged(right: Coordinates) -> Coordinates:
    return replace(right, forward=right.forward.roll(1, 0), rows=right.rows.roll(1, 0))


def _without_mean(right: Coordinates) -> Coordinates:
    return replace(right, mean=torch.zeros_like(right.mean))


def _swapped_steps(right: Coordinates) -> Coordinates:
    first, second, third = right.steps
    factor = torch.tensor([1.0, third / second, second / third])[right.owners // right.mean.shape[1]]
    return replace(right, steps=(first, third, second), rows=right.rows * factor.unsqueeze(-1))


def _transposed(right: Coordinates) -> Coordinates:
    return replace(right, forward=right.forward.mT.contiguous(), rows=right.rows.mT.contiguous())
