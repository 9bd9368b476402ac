"""Faults of a whole model: its rotary tables and constants, and what goes wrong around right layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import Rope
from haarkv.models.rope import RopeTable
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import dense
from haarkv.validation.faults.base import Fault, K, Mistaken, V, Whole, instead
from haarkv.validation.faults.ops import NORM, last_positions, rounded


# -- Tables and constants ----------------------------------------------------------------------------------------------------
class OtherRope(RopeTable):
    """Rotary tables that are made or read in another way.

    Args:
        positions: what is read for positions [T].
        made: what becomes of cos and sin; frequencies: of these.
    """

    def __init__(
        self, rope: Rope, limit: int, positions: Callable[[Tensor], Tensor] = torch.clone,
        made: Callable[[Tensor], Tensor] = torch.clone, frequencies: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:  # fmt: skip
        super().__init__(rope, limit)
        self._read, self._made, self._inv_freq = positions, made, frequencies(self._inv_freq)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().at(self._read(positions).clamp(max=self.positions - 1))
        return self._made(cos), self._made(sin)


def _with_tables(model: DecoderModel, **how: Any) -> DecoderModel:
    """A model whose rotary tables are all made or read in another way; arguments as of `OtherRope`."""
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
    """Models with other tables and constants, which show first in layer 0; and such with other tables in one layer."""
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
    "RoPE's cos and sin rounded to BF16": {"made": rounded},
    "RoPE's frequencies rounded to BF16": {"frequencies": rounded},
}


def rounded_positions(model: DecoderModel) -> Fault:
    """Positions that are exact up to 256."""
    other = _with_tables(model, positions=lambda positions: positions.bfloat16().long())
    return Fault("positions rounded to BF16", 0, K, model=other)


# -- Around the layers -----------------------------------------------------------------------------------------------------
def forward_faults(model: DecoderModel) -> list[Fault]:
    """Those of whole forwards, whose layers are right one by one; they show with a decode step and without teacher."""
    final = model.weights.final_norm
    plain = instead("rms_norm", NORM["without its weight"], lambda call: call.weight is final)
    return [
        Fault("the last norm without its weight", None, "final_norm", plain),
        *(Fault(name, None, "forward", whole=forward) for name, forward in _FORWARDS.items()),
    ]


def _scaled(faulty: Mistaken, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    weights, factor = faulty.model.weights, math.sqrt(faulty.config.hidden_size)
    scaled = replace(weights, embedding=(dense(weights.embedding) * factor).to(faulty.model.dtype))
    return ReferenceExecutor(replace(faulty.model, weights=scaled), faulty.ops).forward(token_ids, batch, cache)


def _token_before(faulty: Mistaken, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    hidden = ReferenceExecutor.forward(faulty, token_ids, batch, cache)
    if not _begins(batch):
        return hidden
    last = batch.query_start_loc[1:].long() - 1
    return hidden.index_copy(0, last, hidden[(last - 1).clamp(min=0)])


def _last_of_all(faulty: Mistaken, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    last, counts = batch.query_start_loc[1:].long() - 1, batch.query_start_loc.diff()
    return ReferenceExecutor.forward(faulty, token_ids, batch, cache)[torch.repeat_interleave(last, counts)]


def _sees_drafts(faulty: Mistaken, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    ops = faulty.ops
    if not _begins(batch):
        unmasked = instead(
            "paged_attention", lambda call: call.again(batch=replace(call.batch, positions=last_positions(batch)))
        )
        ops = with_ops(ops, unmasked)
    return ReferenceExecutor(faulty.model, ops).forward(token_ids, batch, cache)


def _begins(batch: Batch) -> bool:
    """Whether these are the beginnings of prompts."""
    return bool((batch.positions[batch.query_start_loc[:-1].long()] == 0).all())


def _counts_on(faulty: Mistaken, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """Keeps a count of each sequence's tokens, which never goes back, and takes a step to be at its end."""
    for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
        faulty.notes[row] = max(faulty.notes.get(row, 0), length)
    if len(token_ids) == len(batch.seq_lens):
        batch = replace(batch, positions=torch.tensor([faulty.notes[row] - 1 for row in batch.rows.tolist()]))
    return ReferenceExecutor.forward(faulty, token_ids, batch, cache)


_FORWARDS: dict[str, Whole] = {
    "embeddings times the root of their size": _scaled,
    "a prompt's logits are those of the token before its last": _token_before,
    "a verify's logits are those after its last token": _last_of_all,
    "drafted tokens see those behind them": _sees_drafts,
    "a step counts on behind tokens that were taken back": _counts_on,
}
