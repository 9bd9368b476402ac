"""Faults of a whole model: rotary tables and constants, whole forwards around right layers, and weight blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import Rope
from haarkv.models.rope import RopeTable
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Blocks, Weight, dense
from haarkv.validation.faults.base import DRIVES, Fault, FaultyExecutor, K, V, Whole, instead
from haarkv.validation.faults.ops import NORM, last_positions, round_to_bf16


# -- Tables and constants ----------------------------------------------------------------------------------------------------
class OtherRope(RopeTable):
    """Rotary tables with other positions [T], cos and sin (`transform`), or frequencies."""

    def __init__(
        self, rope: Rope, limit: int, positions: Callable[[Tensor], Tensor] = torch.clone,
        transform: Callable[[Tensor], Tensor] = torch.clone, frequencies: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:  # fmt: skip
        super().__init__(rope, limit)
        self._read, self._transform, self._inv_freq = positions, transform, frequencies(self._inv_freq)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().at(self._read(positions).clamp(max=self.positions - 1))
        return self._transform(cos), self._transform(sin)


def _with_tables(model: DecoderModel, **how: Any) -> DecoderModel:
    """A model with `OtherRope` tables."""
    limit = model.config.max_position_embeddings
    return replace(model, ropes={rope: OtherRope(rope, limit, **how) for rope in model.ropes})


def _with_bases(model: DecoderModel, factor: float = 1.0, theta: float | None = None) -> DecoderModel:
    """A model whose RoPE has another base than its layers declare."""
    limit = model.config.max_position_embeddings
    ropes = {rope: RopeTable(replace(rope, theta=theta or rope.theta * factor), limit) for rope in model.ropes}
    return replace(model, ropes=ropes)


@dataclass(frozen=True)
class _OneRope(DecoderModel):
    """A model one layer of which has other rotary tables."""

    layer: int = 0
    other: Mapping[Rope, RopeTable] | None = None

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        for index in span:
            ropes = self.other if self.other and index == self.layer else self.ropes
            hidden = DecoderModel.layers(replace(self, ropes=ropes), hidden, range(index, index + 1), batch, cache, ops)
        return hidden


def wrong_models(model: DecoderModel, layer: int) -> Iterator[Fault]:
    """Models with other tables and constants, which show first in layer 0; and with other tables in one layer."""
    config, base = model.config, next(iter(model.ropes)).theta
    for theta in (1e4, 1e5, 5e5, 1e6, 1e7, base * 1.01, base * 0.99):
        if theta != base:
            yield Fault(f"RoPE base {theta:g} for {base:g}", 0, K, model=_with_bases(model, theta=theta))
    for eps in (1e-5, 1e-6, 1e-8):
        if eps != config.final_norm.eps:
            # V's length shows it; in BF16 it tips so many inputs to their other neighbours that K's levels do, too.
            layers = tuple(replace(layer, norm=replace(layer.norm, eps=eps)) for layer in config.layers)
            other = replace(config, layers=layers, final_norm=replace(config.final_norm, eps=eps))
            name = f"norms' eps {eps:g} for {config.final_norm.eps:g}"
            yield Fault(name, 0, V, model=replace(model, config=other), also=(K,))
    for name, how in _TABLES.items():
        yield Fault(name, 0, K, model=_with_tables(model, **how))
    for words, factor in (("half", 0.5), ("1 % off", 1.01)):
        ropes = _with_bases(model, factor).ropes
        one = _OneRope(model.config, model.weights, model.ropes, model.ranks, layer, ropes)
        yield Fault(f"RoPE's base {words} in one layer", layer, K, model=one)


_TABLES: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    # Q and K turn alike: what they are to each other stays.
    "positions off by one": {"positions": lambda positions: positions + 1},
    "positions count on to the next sequence": {"positions": lambda positions: torch.arange(len(positions))},
    "RoPE's cos and sin rounded to BF16": {"transform": round_to_bf16},
    "RoPE's frequencies rounded to BF16": {"frequencies": round_to_bf16},
}


def rounded_positions(model: DecoderModel) -> Fault:
    """Positions that are exact up to 256."""
    other = _with_tables(model, positions=lambda positions: positions.bfloat16().long())
    return Fault("positions rounded to BF16", 0, K, model=other)


# -- Around the layers -----------------------------------------------------------------------------------------------------
def forward_faults(model: DecoderModel) -> list[Fault]:
    """Faults of whole forwards with right layers; they show free-running with a decode step."""
    final = model.weights.final_norm
    plain = instead("rms_norm", NORM["without its weight"], lambda call: call.weight is final)
    return [
        Fault("the last norm without its weight", None, "final_norm", plain),
        *(Fault(name, None, "forward", whole=forward) for name, forward in _FORWARDS.items()),
    ]


def _scaled_embedding(faulty: FaultyExecutor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    weights, factor = faulty.model.weights, math.sqrt(faulty.config.hidden_size)
    scaled_weights = replace(weights, embedding=(dense(weights.embedding) * factor).to(faulty.model.dtype))
    return ReferenceExecutor(replace(faulty.model, weights=scaled_weights), faulty.ops).forward(token_ids, batch, cache)


def _token_before(faulty: FaultyExecutor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    hidden = ReferenceExecutor.forward(faulty, token_ids, batch, cache)
    if not _begins(batch):
        return hidden
    last = batch.query_start_loc[1:].long() - 1
    return hidden.index_copy(0, last, hidden[(last - 1).clamp(min=0)])


def _last_of_all(faulty: FaultyExecutor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    last = batch.of_tokens(batch.query_start_loc[1:].long() - 1)
    return ReferenceExecutor.forward(faulty, token_ids, batch, cache)[last]


def _sees_drafts(faulty: FaultyExecutor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    ops = faulty.ops
    if not _begins(batch):
        unmasked_table = instead(
            "paged_attention", lambda call: call.again(batch=replace(call.batch, positions=last_positions(batch)))
        )
        ops = with_ops(ops, unmasked_table)
    return ReferenceExecutor(faulty.model, ops).forward(token_ids, batch, cache)


def _begins(batch: Batch) -> bool:
    """Whether these are the beginnings of prompts."""
    return bool((batch.positions[batch.query_start_loc[:-1].long()] == 0).all())


def _counts_on(faulty: FaultyExecutor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """A step stands behind the longest that each sequence has been, tokens taken back included."""
    for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
        faulty.notes[row] = max(faulty.notes.get(row, 0), length)
    if len(token_ids) == len(batch.seq_lens):
        batch = replace(batch, positions=torch.tensor([faulty.notes[row] - 1 for row in batch.rows.tolist()]))
    return ReferenceExecutor.forward(faulty, token_ids, batch, cache)


_FORWARDS: dict[str, Whole] = {
    "embeddings times the root of their size": _scaled_embedding,
    "a prompt's logits are those of the token before its last": _token_before,
    "a verify's logits are those after its last token": _last_of_all,
    "drafted tokens see those behind them": _sees_drafts,
    "a step counts on behind tokens that were taken back": _counts_on,
}


# -- Quantised blocks ----------------------------------------------------------------------------------------------------
# Each is small: one block of every row is wrong. It is planted in the executor itself, whose own kernels run.
Spoil = Callable[[Tensor], None]
"""Spoils the blocks [rows, blocks, bytes] of a weight in place."""
_AT = 1
"""The block of each row that is wrong; of those of 256 numbers, the part of the first one."""


def _neighbours(begin: int, end: int | None, blocks: Tensor) -> None:
    """Some bytes of one block are those of the next."""
    target, source = _AT % blocks.shape[1], (_AT + 1) % blocks.shape[1]
    blocks[:, target, begin:end] = blocks[:, source, begin:end].clone()


def _six_bits(first: int, blocks: Tensor) -> None:
    """Of the eight six-bit scales or minima, that of one part is that of the next."""
    target, source = first + _AT, first + _AT + 1
    blocks[:, 0, target] = (blocks[:, 0, target] & 0xC0) | (blocks[:, 0, source] & 0x3F)


def _next_byte(at: int, blocks: Tensor) -> None:
    """One byte of the first block is that behind it."""
    blocks[:, 0, at] = blocks[:, 0, at + 1].clone()


_FP16 = partial(_neighbours, 0, 2)
_SCALES: dict[str, Spoil] = {
    "Q8_0": _FP16, "Q4_0": _FP16, "Q4_1": _FP16, "Q5_0": _FP16, "Q5_1": _FP16, "IQ4_NL": _FP16,
    "MXFP4": partial(_neighbours, 0, 1), "Q4_K": partial(_six_bits, 4), "Q5_K": partial(_six_bits, 4),
    "Q6_K": partial(_next_byte, 192 + 2 * _AT),
}  # fmt: skip
_MINIMA: dict[str, Spoil] = {
    "Q4_1": partial(_neighbours, 2, 4), "Q5_1": partial(_neighbours, 2, 4), "Q4_K": partial(_six_bits, 8),
    "Q5_K": partial(_six_bits, 8),
}  # fmt: skip


@dataclass(frozen=True)
class BlockFault(Fault):
    """A weight `right` that `wrong` replaces; both None in a control."""

    right: Blocks | None = None
    wrong: Blocks | None = None
    runner: str = "cpu"

    def executor(self, model: DecoderModel, drive: str = "ops") -> Executor:
        """The executor with this fault. Op by op it is given right weights, and takes the wrong one in place of `right`."""
        plan = KVSpec("tq4").plan(model.config.num_layers)
        if drive == "ops":
            executor = catalog.create(self.runner, model, plan)
            return executor.with_ops(self._instead) or executor
        return DRIVES[drive](catalog.create(self.runner, self.model or model, plan))

    def _instead(self, ops: OpTable) -> OpTable:
        def linear(x: Tensor, weight: Weight) -> Tensor:
            return ops.linear(x, self.wrong if self.wrong is not None and weight is self.right else weight)

        return with_ops(ops, {"linear": linear})


def block_faults(model: DecoderModel, layer: int, runner: str) -> Iterator[BlockFault]:
    """Faults in the weight blocks of a layer: each projection has one, and each type every one of its own."""
    types, weights = catalog.info(runner).block_types(), model.weights.layers[layer]
    by_type: dict[str, list[tuple[str, Blocks]]] = {}
    for field, _, weight in weights.named_tensors():
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
    layers[layer] = layers[layer].map(lambda name, weight: wrong if name == field else weight)
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def _spoilt(weight: Blocks, spoil: Spoil) -> Blocks:
    data = weight.data.clone().view(len(weight), -1, weight.type.nbytes)
    spoil(data)
    return replace(weight, data=data.view(len(weight), -1))


def runner_of_blocks(model: DecoderModel) -> str | None:
    """The executor that multiplies with some of a model's weight blocks directly; None if there is none."""
    kinds = {weight.type.name for _, weight in model.weights.named_tensors() if isinstance(weight, Blocks)}
    return next((name for name in catalog.NAMES if kinds & set(catalog.info(name).block_types())), None)
