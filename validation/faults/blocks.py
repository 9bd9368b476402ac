"""Faults in the quantised blocks of one projection of one layer, as an executor that multiplies with them would read them.

Each is small: of every row one block is wrong, the rest is right. It is planted in the executor itself, whose own kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Blocks, Weight
from haarkv.validation.faults.base import DRIVES, Fault

Wrong = Callable[[Tensor], None]
"""Spoils the blocks [rows, blocks, bytes] of a weight in place."""
_AT = 1
"""The block of each row that is wrong; of those of 256 numbers, the part of the first one."""


def _neighbours(begin: int, end: int | None, blocks: Tensor) -> None:
    """Some bytes of one block are those of the next."""
    here, there = _AT % blocks.shape[1], (_AT + 1) % blocks.shape[1]
    blocks[:, here, begin:end] = blocks[:, there, begin:end].clone()


def _six_bits(first: int, blocks: Tensor) -> None:
    """Of the eight scales or minima of six bits, that of one part is that of the next; both lie in bytes of their own."""
    here, there = first + _AT, first + _AT + 1
    blocks[:, 0, here] = (blocks[:, 0, here] & 0xC0) | (blocks[:, 0, there] & 0x3F)


def _next_byte(at: int, blocks: Tensor) -> None:
    """One byte of the first block is that behind it."""
    blocks[:, 0, at] = blocks[:, 0, at + 1].clone()


_FP16 = partial(_neighbours, 0, 2)
_SCALES: dict[str, Wrong] = {
    "Q8_0": _FP16, "Q4_0": _FP16, "Q4_1": _FP16, "Q5_0": _FP16, "Q5_1": _FP16, "IQ4_NL": _FP16,
    "MXFP4": partial(_neighbours, 0, 1), "Q4_K": partial(_six_bits, 4), "Q5_K": partial(_six_bits, 4),
    "Q6_K": partial(_next_byte, 192 + 2 * _AT),
}  # fmt: skip
_MINIMA: dict[str, Wrong] = {
    "Q4_1": partial(_neighbours, 2, 4), "Q5_1": partial(_neighbours, 2, 4), "Q4_K": partial(_six_bits, 8),
    "Q5_K": partial(_six_bits, 8),
}  # fmt: skip


@dataclass(frozen=True)
class BlockFault(Fault):
    """A fault in a weight.

    Attributes:
        right, wrong: the weight, and what stands in its place; None of a control.
    """

    right: Blocks | None = None
    wrong: Blocks | None = None
    runner: str = "cpu"

    def executor(self, model: DecoderModel, drive: str = "ops") -> Executor:
        """The executor of the model with this fault. Driven op by op it is given the right weights, and takes the wrong one
        where this one comes."""
        plan = KVSpec("tq4").plan(model.config.num_layers)
        if drive == "ops":
            executor = catalog.create(self.runner, model, plan)
            return executor.over(self._instead) or executor
        return DRIVES[drive](catalog.create(self.runner, self.model or model, plan))

    def _instead(self, ops: OpTable) -> OpTable:
        def linear(x: Tensor, weight: Weight) -> Tensor:
            return ops.linear(x, self.wrong if self.wrong is not None and weight is self.right else weight)

        return with_ops(ops, {"linear": linear})


def block_faults(model: DecoderModel, layer: int, runner: str) -> Iterator[BlockFault]:
    """Faults of the projections of a layer that lie in blocks which an executor multiplies with: each projection has one, and
    each type every one of its own."""
    types, weights = catalog.info(runner).block_types(), model.weights.layers[layer]
    by_type: dict[str, list[tuple[str, Blocks]]] = {}
    for field, _, weight in weights.named():
        if isinstance(weight, Blocks) and weight.type.name in types:
            by_type.setdefault(weight.type.name, []).append((field, weight))
    for kind, places in by_type.items():
        wrongs = {"a scale": _SCALES.get(kind), "a minimum": _MINIMA.get(kind), "a block": partial(_neighbours, 0, None)}
        spoils = [(what, spoil) for what, spoil in wrongs.items() if spoil]
        for number in range(max(len(places), len(spoils))):
            (field, weight), (what, spoil) = places[number % len(places)], spoils[number % len(spoils)]
            wrong = _spoilt(weight, spoil)
            if torch.equal(wrong.data, weight.data):  # of rows of a single block
                continue
            yield BlockFault(
                f"{kind}, {what} is the neighbour's", layer, field.split(".")[-1], model=_with(model, layer, field, wrong),
                right=weight, wrong=wrong, runner=runner,
            )  # fmt: skip


def _with(model: DecoderModel, layer: int, field: str, wrong: Blocks) -> DecoderModel:
    """A model with another weight in one place."""
    layers = list(model.weights.layers)
    layers[layer] = layers[layer].changed(lambda name, weight: wrong if name == field else weight)
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def _spoilt(weight: Blocks, spoil: Wrong) -> Blocks:
    data = weight.data.clone().view(len(weight), -1, weight.type.nbytes)
    spoil(data)
    return replace(weight, data=data.view(len(weight), -1))


def runner_of_blocks(model: DecoderModel) -> str | None:
    """The executor that multiplies with some of a model's blocks as they are; None if there is none."""
    kinds = {weight.type.name for _, weight in model.weights.named() if isinstance(weight, Blocks)}
    return next((name for name in catalog.NAMES if kinds & set(catalog.info(name).block_types())), None)
