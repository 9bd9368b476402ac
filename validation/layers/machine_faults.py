"""Faults that bringing up a new machine meets: tables of another precision, kernels that are off by a row, a head or a block,
numbers cut off where they are to be rounded, and what goes wrong around the layers, between one forward and the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.rope import RopeTable
from haarkv.tq_ops import reference
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.layers.faults import Fault, Table
from haarkv.validation.layers.mistaken import Mistaken
from haarkv.validation.layers.parts import Stored, load, new_cache_like, tensors_of
from haarkv.validation.layers.slips import OUT, Attend, K, Layer, V

LONGEST = 262
"""Tokens of a prompt in which every fault of `long_faults` shows: positions of nine bits, and three blocks."""


def cut_off(x: Tensor) -> Tensor:
    """The BF16 number next to each number [...] towards zero, as FP32: what is left if the lower half is dropped."""
    return (x.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


# -- In a layer ------------------------------------------------------------------------------------------------------------
def layer_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Those that a hundred tokens show; two sequences of them.

    Args:
        layer: the one that they are put into, but for tables of the whole model, which show first in layer 0.
    """
    at = Layer(model, layer)
    return [*_tables(model, layer), *_kernels(at), *_cut_off(at)]


class _Rounded(RopeTable):
    """cos and sin as BF16 numbers."""

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().at(positions)
        return cos.bfloat16().float(), sin.bfloat16().float()


class _Counting(RopeTable):
    """Positions count on from one sequence of a batch to the next."""

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().at(torch.arange(len(positions)))


class _RoundedFrequencies(RopeTable):
    """Frequencies as BF16 numbers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._inv_freq = self._inv_freq.bfloat16().float()


@dataclass(frozen=True)
class _OtherRope(DecoderModel):
    """A model one layer of which has other rotary tables."""

    layer: int = 0
    other: RopeTable | None = None

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        for index in span:
            rope = self.other if self.other and index == self.layer else self.rope
            hidden = DecoderModel.layers(replace(self, rope=rope), hidden, range(index, index + 1), batch, cache, ops)
        return hidden


def _tables(model: DecoderModel, layer: int) -> Iterator[Fault]:
    config = model.config
    tables: dict[str, RopeTable] = {
        "RoPE's cos and sin rounded to BF16": _Rounded(config),
        "RoPE's frequencies rounded to BF16": _RoundedFrequencies(config),
        "positions count on to the next sequence": _Counting(config),
    }
    for name, table in tables.items():
        yield Fault(name, 0, K, K, {}, model=replace(model, rope=table))
    for words, factor in (("half", 0.5), ("1 % off", 1.01)):
        other = RopeTable(replace(config, rope_theta=config.rope_theta * factor))
        one = _OtherRope(config, model.weights, model.rope, model.ranks, layer, other)
        yield Fault(f"RoPE's base {words} in one layer", layer, K, K, {}, model=one)


def _kernels(at: Layer) -> Iterator[Fault]:
    config = at.model.config

    def attending(name: str, attend: Attend) -> Fault:
        return Fault(name, at.index, "paged_attention", OUT, at.attended(attend))

    def one_head_on(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
        return reference.paged_attention(q.roll(-1, 1).contiguous(), cache, layer, batch, scale).roll(1, 1)

    def a_thread_idle(*given: object) -> Tensor:
        out = reference.paged_attention(*given).clone()  # type: ignore[arg-type]
        out[len(out) // 2 : 3 * len(out) // 4] = 0
        return out

    def by_dim(y: Tensor) -> Tensor:
        return y.view(len(y), config.heads.head_dim, config.heads.num_kv_heads).transpose(1, 2).flatten(1)

    def in_bf16(x: Tensor, weight: Tensor) -> Tensor:
        sums = torch.zeros(len(x), len(weight))
        for some, part in zip(torch.split(x, _STEP, -1), torch.split(weight, _STEP, -1), strict=True):
            sums = (sums + reference.linear(some.contiguous(), part.contiguous())).bfloat16().float()
        return sums

    if config.heads.num_kv_heads > 1:
        yield attending("query heads one off their KV head", one_head_on)
        yield Fault("V's heads and coordinates exchanged", at.index, "v_proj", V, at.projected("v_proj", spoil=by_dim))
    yield attending("a quarter of the rows is left to a thread that never runs", a_thread_idle)
    yield attending(
        "softmax scale of half the head_dim",
        lambda q, c, i, b, _: reference.paged_attention(q, c, i, b, 1 / math.sqrt(q.shape[2] / 2)),
    )
    if (own := at.weight("o_proj")) is not None:

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            return in_bf16(x, weight) if weight is own else reference.linear(x, weight)

        yield Fault("o_proj's sums kept in BF16", at.index, "o_proj", OUT, {"linear": linear})


_STEP = 16
"""Products that a matrix unit adds before its sum goes back to the accumulator."""


def _cut_off(at: Layer) -> Iterator[Fault]:
    """Rounded towards zero, where BF16 is rounded to the nearest; of an FP32 model, where it is not rounded at all."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return cut_off(reference.rms_norm(x.float(), weight, eps)).to(x.dtype)

    def product(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        return cut_off(reference.silu_mul(gate, up, torch.float32)).to(dtype)

    def attend(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
        return cut_off(reference.paged_attention(q.float(), cache, layer, batch, scale)).to(q.dtype)

    def directions(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int) -> Stored:
        stored = {}
        for side, of, x in (("k", cache.k_format(layer), k), ("v", cache.v_format(layer), v)):
            length = x.norm(dim=-1, keepdim=True)
            stored[side] = by_token(of.quantize((cut_off(x / length) * length).transpose(0, 1), layer))
        return stored

    for name, where in (("input_norm", K), ("post_norm", OUT)):
        if at.weight(name) is not None:
            # K is normed again, so the length that this takes away shows in V.
            also = (V,) if name == "input_norm" else ()
            yield Fault(f"{name} cut off, not rounded", at.index, name, where, at.norm(name, norm), also=also)
    yield Fault("SwiGLU's product cut off, not rounded", 0, "silu_mul", OUT, {"silu_mul": product})
    yield Fault("attention's output cut off, not rounded", at.index, "paged_attention", OUT, at.attended(attend))
    yield Fault("K and V's directions cut off, not rounded", at.index, K, K, at.storing(directions))


# -- In a long prompt ------------------------------------------------------------------------------------------------------
class _RoundedPositions(RopeTable):
    """Positions as BF16 numbers, which are exact up to 256."""

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().at(positions.bfloat16().long())


def long_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Those that a prompt of `LONGEST` tokens shows, in a cache of a scale a vector; arguments as of `layer_faults`."""
    at, rope = Layer(model, layer), _RoundedPositions(model.config)
    faults = [Fault("positions rounded to BF16", 0, K, K, {}, model=replace(model, rope=rope))]
    for side in "kv":
        name = f"{side.upper()}'s scales are read from the block before"
        faults.append(Fault(name, at.index, "paged_attention", OUT, at.attended(_neighbours(side))))
    return faults


def _neighbours(side: str) -> Attend:
    """Attention that reads the scales of each block but the first from the one before it."""

    def attend(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
        other = new_cache_like(cache, cache.device)
        load(other, layer, tensors_of(cache, layer))
        fields, right = (of.k_fields(layer) if side == "k" else of.v_fields(layer) for of in (other, cache))
        for blocks in batch.block_table.long():
            own = blocks[blocks >= 0]
            fields["scale"][own[1:]] = right["scale"][own[:-1]]
        return reference.paged_attention(q, other, layer, batch, scale)

    return attend


# -- Around the layers -----------------------------------------------------------------------------------------------------
def forward_faults(model: DecoderModel) -> list[Fault]:
    """Those of whole forwards, whose layers are right one by one; they show with a decode step and without teacher."""
    final = model.weights.final_norm

    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, torch.ones_like(weight) if weight is final else weight, eps)

    def whole(name: str, kind: type[Mistaken]) -> Fault:
        return Fault(name, None, "forward", "head", {}, executor=kind)

    return [
        Fault("the last norm without its weight", None, "final_norm", "head", {"rms_norm": plain}),
        whole("embeddings times the root of their size", _Scaled),
        whole("a prompt's logits are those of the token before its last", _TokenBefore),
        whole("a verify's logits are those after its last token", _LastOfAll),
        whole("drafted tokens see those behind them", _SeesDrafts),
        whole("a step counts on behind tokens that were taken back", _CountsOn),
    ]


class _Scaled(Mistaken):
    def prefill(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        weights, factor = self._model.weights, math.sqrt(self.config.hidden_size)
        scaled = replace(weights, embedding=(weights.embedding * factor).to(weights.embedding.dtype))
        return ReferenceExecutor(replace(self._model, weights=scaled), self.ops).prefill(token_ids, batch, cache)


class _TokenBefore(Mistaken):
    def prefill(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        return super().verify(token_ids, batch, cache)[(batch.query_start_loc[1:].long() - 2).clamp(min=0)]


class _LastOfAll(Mistaken):
    def verify(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        last, counts = batch.query_start_loc[1:].long() - 1, batch.query_start_loc.diff()
        return super().verify(token_ids, batch, cache)[torch.repeat_interleave(last, counts)]


class _SeesDrafts(Mistaken):
    def verify(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        last = torch.repeat_interleave(batch.seq_lens - 1, batch.query_start_loc.diff()).to(batch.positions.dtype)

        def unmasked(q: Tensor, held: PagedKVCache, layer: int, given: Batch, scale: float) -> Tensor:
            return reference.paged_attention(q, held, layer, replace(given, positions=last), scale)

        table: Table = {"paged_attention": unmasked}
        return ReferenceExecutor(self._model, with_ops(self.ops, table)).verify(token_ids, batch, cache)


class _CountsOn(Mistaken):
    """Its steps take their positions from a count of its own, which never goes back."""

    _most: dict[int, int]

    def _counted(
        self, run: Callable[[Tensor, Batch, PagedKVCache], Tensor], token_ids: Tensor, batch: Batch, cache: PagedKVCache
    ) -> Tensor:
        self._most = getattr(self, "_most", {})
        for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
            self._most[row] = max(self._most.get(row, 0), length)
        return run(token_ids, batch, cache)

    def prefill(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        return self._counted(super().prefill, token_ids, batch, cache)

    def verify(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        return self._counted(super().verify, token_ids, batch, cache)

    def decode(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        def step(ids: Tensor, given: Batch, held: PagedKVCache) -> Tensor:
            positions = torch.tensor([self._most[row] - 1 for row in given.rows.tolist()])
            return ReferenceExecutor.decode(self, ids, replace(given, positions=positions), held)

        return self._counted(step, token_ids, batch, cache)
