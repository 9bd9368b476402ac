"""Faults that bringing up a new machine meets: tables of another precision, kernels that are off by a row, a head or a block,
numbers cut off where they are to be rounded, and what goes wrong around the layers, between one forward and the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import Rope
from haarkv.models.rope import RopeTable
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import dense
from haarkv.validation.layers.faults import Asked, Attend, Fault, K, Layer, Mistaken, V, Whole, other
from haarkv.validation.layers.parts import read_as
from haarkv.validation.layers.slips import last_positions, with_bases, with_tables

LONGEST = 262
"""Tokens of a prompt in which every fault of `long_faults` shows: positions of nine bits, and three blocks."""


def cut_off(x: Tensor) -> Tensor:
    """The BF16 number next to each number [...] towards zero, as FP32: what is left if the lower half is dropped."""
    return (x.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


# -- In a layer ------------------------------------------------------------------------------------------------------------
def layer_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Those that a hundred tokens show; two sequences of them.

    Args:
        layer: the one that they are put into, but for tables of the whole model, which show first in layer 0.
    """
    at = Layer(model, layer)
    return [*_tables(model, layer), *_kernels(at), *_cut_off(at)]


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


def _tables(model: DecoderModel, layer: int) -> Iterator[Fault]:
    for name, how in {
        "RoPE's cos and sin rounded to BF16": {"made": _rounded},
        "RoPE's frequencies rounded to BF16": {"frequencies": _rounded},
        "positions count on to the next sequence": {"positions": lambda positions: torch.arange(len(positions))},
    }.items():
        yield Fault(name, 0, K, model=with_tables(model, **how))
    for words, factor in (("half", 0.5), ("1 % off", 1.01)):
        other = with_bases(model, factor)
        one = _OneRope(model.config, model.weights, model.ropes, model.ranks, layer, other.ropes)
        yield Fault(f"RoPE's base {words} in one layer", layer, K, model=one)


_STEP = 16
"""Products that a matrix unit adds before its sum goes back to the accumulator."""


def _kernels(at: Layer) -> Iterator[Fault]:
    heads = at.model.config.heads

    def a_thread_idle(asked: Asked) -> Tensor:
        out = asked.again().clone()
        out[len(out) // 2 : 3 * len(out) // 4] = 0
        return out

    def by_dim(y: Tensor) -> Tensor:
        return y.view(len(y), heads.head_dim, heads.num_kv_heads).transpose(1, 2).flatten(1)

    def in_bf16(x: Tensor, weight: Tensor) -> Tensor:
        sums = torch.zeros(len(x), len(weight))
        for some, part in zip(torch.split(x, _STEP, -1), torch.split(weight, _STEP, -1), strict=True):
            sums = _rounded(sums + reference.linear(some.contiguous(), part.contiguous()))
        return sums

    if heads.num_kv_heads > 1:
        yield at.attending(
            "query heads one off their KV head", lambda asked: asked.again(q=asked.q.roll(-1, 1).contiguous()).roll(1, 1)
        )
        yield from at.projecting("V's heads and coordinates exchanged", "v_proj", by_dim)
    yield at.attending("a quarter of the rows is left to a thread that never runs", a_thread_idle)
    yield at.attending("softmax scale of half the head_dim", lambda asked: asked.again(scale=(asked.q.shape[2] / 2) ** -0.5))
    yield from at.weighing("o_proj's sums kept in BF16", "o_proj", in_bf16)


def _cut_off(at: Layer) -> Iterator[Fault]:
    """Rounded towards zero, where BF16 is rounded to the nearest; of an FP32 model, where it is not rounded at all."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return cut_off(reference.rms_norm(x.float(), weight, eps)).to(x.dtype)

    def product(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        return cut_off(reference.silu_mul(gate, up, torch.float32)).to(dtype)

    def attend(asked: Asked) -> Tensor:
        return cut_off(asked.again(q=asked.q.float())).to(asked.q.dtype)

    def direction(x: Tensor) -> Tensor:
        length: Tensor = x.norm(dim=-1, keepdim=True)
        return cut_off(x / length) * length

    # K is normed again, so the length that this takes away shows in V.
    yield from at.weighing("input_norm cut off, not rounded", "input_norm", norm, also=(V,))
    yield from at.weighing("post_norm cut off, not rounded", "post_norm", norm)
    yield Fault("SwiGLU's product cut off, not rounded", 0, "silu_mul", {"silu_mul": product})
    yield at.attending("attention's output cut off, not rounded", attend)
    yield at.keeping("K and V's directions cut off, not rounded", K, other(lambda k, v: (direction(k), direction(v))))


# -- In a long prompt ------------------------------------------------------------------------------------------------------
def long_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Those that a prompt of `LONGEST` tokens shows, in a cache of a scale a vector; arguments as of `layer_faults`."""
    rounded = with_tables(model, lambda positions: positions.bfloat16().long())  # exact up to 256
    return [
        Fault("positions rounded to BF16", 0, K, model=rounded),
        Layer(model, layer).attending("K's scales are read from the block before", _neighbours(0)),
        Layer(model, layer).attending("V's scales are read from the block before", _neighbours(1)),
    ]


def _neighbours(side: int) -> Attend:
    """Attention that reads the scales of each block but the first from the one before it."""

    def attend(asked: Asked) -> Tensor:
        cache, layer = asked.cache, asked.layer
        pair = [cache.k_fields(layer), cache.v_fields(layer)]
        scales = pair[side]["scale"].clone()
        for blocks in cache.placed(layer, asked.batch).block_table.long():
            owned = blocks[blocks >= 0]
            scales[owned[1:]] = pair[side]["scale"][owned[:-1]]
        pair[side] = pair[side] | {"scale": scales}
        return asked.again(cache=read_as(cache, layer, fields=(pair[0], pair[1])))

    return attend


# -- Around the layers -----------------------------------------------------------------------------------------------------
def forward_faults(model: DecoderModel) -> list[Fault]:
    """Those of whole forwards, whose layers are right one by one; they show with a decode step and without teacher."""
    final = model.weights.final_norm

    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, torch.ones_like(weight) if weight is final else weight, eps)

    whole: dict[str, Whole] = {
        "embeddings times the root of their size": _scaled,
        "a prompt's logits are those of the token before its last": _token_before,
        "a verify's logits are those after its last token": _last_of_all,
        "drafted tokens see those behind them": _sees_drafts,
        "a step counts on behind tokens that were taken back": _counts_on,
    }
    return [
        Fault("the last norm without its weight", None, "final_norm", {"rms_norm": plain}),
        *(Fault(name, None, "forward", whole=forward) for name, forward in whole.items()),
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
    def unmasked(q: Tensor, held: PagedKVCache, layer: int, given: Batch, scale: float) -> Tensor:
        return reference.paged_attention(q, held, layer, replace(given, positions=last_positions(batch)), scale)

    if _begins(batch):
        return ReferenceExecutor.forward(faulty, token_ids, batch, cache)
    ops = with_ops(faulty.ops, {"paged_attention": unmasked})
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
