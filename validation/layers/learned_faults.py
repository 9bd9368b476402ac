"""Faults in learned coordinates: other matrices, means and weights, where keys are stored and where they are read."""

from __future__ import annotations

from dataclasses import replace

import torch

from haarkv.codebooks.learned import EIGHTHS
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.formats.learned import LearnedFormat
from haarkv.tq_ops.formats.made_up import calibration
from haarkv.tq_ops.formats.rotated import Coordinates
from haarkv.validation.layers.faults import Fault, Given, Layer
from haarkv.validation.layers.parts import Stored, read_as

_BITS = 4
LEARNED = f"k=lr{_BITS},v=tq4"
"""Formats for faults in learned coordinates."""


def planted_learned(model: DecoderModel, layer: int) -> list[Fault]:
    """Faults in what was learned, in one layer each, for a cache in `LEARNED` of made-up coordinates.

    Args:
        model, layer: as in `planted`.
    """
    assert model.config.heads.num_kv_heads > 1, "heads can be exchanged where there are two"
    config, at, exchanged = model.config, Layer(model, layer), "two heads' matrices exchanged"
    learned = calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
    right, v = formats.parse(LEARNED, learned)
    assert isinstance(right, LearnedFormat), "its keys are learned"

    def storing(name: str, wrong: LearnedFormat) -> Fault:
        def keep(given: Given) -> Stored:
            k = wrong.as_stored(given.k.transpose(0, 1), given.layer, given.batch.positions)
            return {"k": by_token(wrong.quantize(k, given.layer))}

        return at.keeping(name, "store_kv.k", keep)

    def reading(name: str, wrong: LearnedFormat) -> Fault:
        return at.attending(name, lambda asked: asked.again(cache=read_as(asked.cache, asked.layer, formats=(wrong, v))))

    return [
        storing(exchanged, right.altered(_exchanged)),
        storing("the mean left out", right.altered(_without_mean)),
        storing("two eighths' coordinates swapped", right.altered(_swapped_eighths)),
        storing("coordinates transposed", right.altered(_transposed)),
        reading(f"{exchanged} in attention", right.altered(_exchanged)),
        reading("two eighths' coordinates swapped in attention", right.altered(_swapped_eighths)),
        reading("rows transposed", right.altered(_transposed)),
    ]


def _exchanged(right: Coordinates) -> Coordinates:
    return replace(right, forward=right.forward.roll(1, 0), rows=right.rows.roll(1, 0))


def _without_mean(right: Coordinates) -> Coordinates:
    return replace(right, mean=torch.zeros_like(right.mean))


def _swapped_eighths(right: Coordinates) -> Coordinates:
    """The first and the second: levels of 6 and 5 bits."""
    dim = right.mean.shape[1]
    places = torch.arange(dim).view(EIGHTHS, -1)[[1, 0, *range(2, EIGHTHS)]].flatten()
    return replace(right, forward=right.forward[..., places], rows=right.rows[:, places])


def _transposed(right: Coordinates) -> Coordinates:
    return replace(right, forward=right.forward.mT.contiguous(), rows=right.rows.mT.contiguous())
