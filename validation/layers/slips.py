"""Slips that people make when they write a decoder layer: each put into the reference, in one layer.

The self-test plants them and looks whether the validator finds them. Where a layer is one program and wrong, the validator
puts them into the reference, to see which gives that layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from haarkv.codebooks import haar_rotation
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.rope import RopeTable
from haarkv.tq_ops import reference
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation.layers.faults import Alter, Fault, Table
from haarkv.validation.layers.parts import Stored, put

K, V, OUT = "store_kv.k", "store_kv.v", "attention_mlp"
Spoil = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, PagedKVCache, int, Batch, float], Tensor]


@dataclass(frozen=True)
class Layer:
    """The layer that slips are put into; weights by the last part of their field's name."""

    model: DecoderModel
    index: int

    def weight(self, name: str) -> Tensor | None:
        """A weight; None where the family has none of that name."""
        return next((t for f, _, t in self.model.weights.layers[self.index].named() if f.split(".")[-1] == name), None)

    def norm(self, name: str, spoil: Callable[[Tensor, Tensor, float], Tensor]) -> Table:
        """`rms_norm` by one weight, otherwise."""
        own = self.weight(name)

        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return spoil(x, weight, eps) if weight is own else reference.rms_norm(x, weight, eps)

        return {"rms_norm": rms_norm}

    def projected(self, *names: str, spoil: Spoil) -> Table:
        """`linear` by some weights, its result spoilt."""
        own = [self.weight(name) for name in names]

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            y = reference.linear(x, weight)
            return spoil(y) if any(weight is one for one in own) else y

        return {"linear": linear}

    def attended(self, attend: Attend) -> Table:
        """`paged_attention` of this layer, otherwise."""

        def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
            return (attend if layer == self.index else reference.paged_attention)(q, cache, layer, batch, softmax_scale)

        return {"paged_attention": paged_attention}

    def storing(self, alter: Alter) -> Table:
        """`store_kv` of this layer, which packs what `alter` makes; what stays in BF16 is right."""

        def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
            reference.store_kv(k, v, cache, layer, batch)
            if layer == self.index:
                put(cache, layer, batch, alter(k, v, cache, layer))

        return {"store_kv": store_kv}


def slips(model: DecoderModel, layer: int) -> list[Fault]:
    """Every slip there is for a model's family.

    Args:
        layer: the one that they are put into; those of the model's config are in every layer, and show first in layer 0.
    """
    at = Layer(model, layer)
    every = (*_norms(at), *_projections(at), *_rope(at), *_attention(at), *_mlp(at), *_stored(at), *_config(model))
    return [fault for fault in every if fault is not None]


def _norms(at: Layer) -> Iterator[Fault]:
    seen = {"input_norm": K, "q_norm": OUT, "k_norm": K, "post_norm": OUT}
    for name, where in seen.items():
        if at.weight(name) is None:
            continue
        yield Fault(f"{name} left out", at.index, name, where, at.norm(name, lambda x, *_: x))
        # K is normed again, so a wrong length of its input shows in V alone.
        plain = at.norm(name, lambda x, w, eps: reference.rms_norm(x, torch.ones_like(w), eps))
        yield Fault(f"{name} without its weight", at.index, name, where, plain)
        gemma = at.norm(name, lambda x, w, eps: reference.rms_norm(x, w.float() + 1, eps))
        yield Fault(f"{name} with 1 + its weight", at.index, name, where, gemma)
    if at.weight("input_norm") is not None:
        centred = at.norm("input_norm", lambda x, w, eps: reference.rms_norm(x - x.float().mean(-1, True).to(x.dtype), w, eps))
        yield Fault("input_norm takes the mean away", at.index, "input_norm", K, centred)


def _projections(at: Layer) -> Iterator[Fault]:
    for name, where in (("q_proj", OUT), ("k_proj", K), ("v_proj", V), ("o_proj", OUT), ("up_proj", OUT), ("gate_proj", OUT)):
        if at.weight(name) is None:
            continue
        rounded = at.projected(name, spoil=lambda y: y.bfloat16().float())
        if name in ("k_proj", "v_proj"):
            yield Fault(f"{name}'s result rounded to BF16", at.index, name, where, rounded)
        yield Fault(f"{name} left out", at.index, name, where, at.projected(name, spoil=lambda y: y * 1e-3))
        # Where Q and K are normed, their length does not matter.
        if not (name in ("q_proj", "k_proj") and at.weight(f"{name[0]}_norm") is not None):
            yield Fault(f"{name} 1 % too large", at.index, name, where, at.projected(name, spoil=lambda y: y * 1.01))
    if (k := at.weight("k_proj")) is not None and (v := at.weight("v_proj")) is not None:

        def exchanged(x: Tensor, weight: Tensor) -> Tensor:
            return reference.linear(x, v if weight is k else k if weight is v else weight)

        yield Fault("k_proj and v_proj exchanged", at.index, "k_proj", K, {"linear": exchanged})
    heads = at.model.config.heads.num_kv_heads
    if heads > 1:
        for name, where in (("k_proj", K), ("v_proj", V)):
            rolled = at.projected(name, spoil=lambda y: y.view(len(y), heads, -1).roll(1, 1).flatten(1))
            yield Fault(f"{name}: KV heads in another order", at.index, name, where, rolled)


def _turned(at: Layer, of_k: bool, turn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Table:
    """`rope` of Q or of K, which differ by their heads, otherwise; in every layer."""
    heads = at.model.config.heads.num_kv_heads if of_k else at.model.config.heads.num_heads

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, cos, sin) if x.shape[1] == heads else reference.rope(x, cos, sin)

    return {"rope": rope}


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.view(*x.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
    return reference.rope(pairs, cos, sin).view(*x.shape[:2], 2, -1).transpose(-1, -2).flatten(-2)


def _rope(at: Layer) -> Iterator[Fault]:
    if at.model.config.heads.num_heads == at.model.config.heads.num_kv_heads:
        return
    for letter, of_k, where in (("Q", False, OUT), ("K", True, K)):
        stage = f"{letter.lower()}_rope"
        for name, turn in (
            ("RoPE left out", lambda x, *_: x),
            ("RoPE turns the other way", lambda x, cos, sin: reference.rope(x, cos, -sin)),
            ("RoPE of neighbours, not of halves", _interleaved),
        ):  # fmt: skip
            yield Fault(f"{name}, of {letter}", 0, stage, where, _turned(at, of_k, turn))


def _attention(at: Layer) -> Iterator[Fault]:
    config = at.model.config
    heads, group = config.heads.num_kv_heads, config.heads.num_heads // config.heads.num_kv_heads

    def attending(name: str, attend: Attend, head: int | None = None) -> Fault:
        return Fault(name, at.index, "paged_attention", OUT, at.attended(attend), head=head)

    yield attending("softmax scale left out", lambda q, c, i, b, _: reference.paged_attention(q, c, i, b, 1.0))
    yield attending("softmax scale 1/D", lambda q, c, i, b, s: reference.paged_attention(q, c, i, b, s * s))
    yield attending("softmax scale 0.1 % too large", steeper(1.001))
    yield attending("attention 1 % too large", lambda *a: reference.paged_attention(*a) * 1.01)
    yield attending("no causal mask", lambda q, c, i, b, s: reference.paged_attention(q, c, i, _seeing(b, 10**6), s))
    yield attending("one token too few is seen", lambda q, c, i, b, s: reference.paged_attention(q, c, i, _seeing(b, -1), s))
    yield attending("one token too many is seen", lambda q, c, i, b, s: reference.paged_attention(q, c, i, _seeing(b, 1), s))
    if heads > 1 and group > 1:

        def dealt(q: Tensor, c: PagedKVCache, i: int, b: Batch, s: float) -> Tensor:
            # Query head h is served by KV head h mod Hkv.
            grouped = q.view(len(q), group, heads, -1).transpose(1, 2).flatten(1, 2).contiguous()
            out = reference.paged_attention(grouped, c, i, b, s)
            return out.view(len(q), heads, group, -1).transpose(1, 2).flatten(1, 2).contiguous()

        yield attending("query heads dealt out to KV heads in turn", dealt)
    if heads > 1:
        yield attending("attention of the last KV head 1 % too large", one_kv_head(at, 1.01), head=heads - 1)
    rotation = haar_rotation(at.index, config.heads.head_dim).float()
    yield attending(
        "attention's output left rotated",
        lambda q, c, i, b, s: (reference.paged_attention(q, c, i, b, s).float() @ rotation).to(q.dtype),
    )


def one_kv_head(at: Layer, factor: float) -> Attend:
    """Attention in which the last KV head's part is so many times as large."""
    group = at.model.config.heads.num_heads // at.model.config.heads.num_kv_heads

    def attend(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        out = reference.paged_attention(q, cache, layer, batch, softmax_scale).float()
        out[:, -group:] *= factor
        return out.to(q.dtype)

    return attend


def steeper(factor: float) -> Attend:
    """Attention whose softmax scale is so many times as large."""
    return lambda q, cache, layer, batch, scale: reference.paged_attention(q, cache, layer, batch, scale * factor)


def _seeing(batch: Batch, more: int) -> Batch:
    """The same batch, each query `more` tokens further on; within its sequence."""
    last = torch.repeat_interleave(batch.seq_lens - 1, batch.query_start_loc.diff()).to(batch.positions.dtype)
    return replace(batch, positions=torch.minimum(batch.positions + more, last).clamp(min=0))


def _mlp(at: Layer) -> Iterator[Fault]:
    table: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
        "gate and up exchanged": lambda g, u, d: reference.silu_mul(u, g, d),
        "SiLU left out": lambda g, u, d: (g * u).to(d),
        "GELU in place of SiLU": lambda g, u, d: (functional.gelu(g) * u).to(d),
        "the MLP's product 1 % too large": lambda g, u, d: (functional.silu(g) * u * 1.01).to(d),
    }
    for name, op in table.items():
        yield Fault(name, 0, "silu_mul", OUT, {"silu_mul": op})
    for name, factor in (("the MLP left out, nearly", 1e-3), ("the MLP 1 % too large", 1.01)):
        yield Fault(name, at.index, "down_proj", OUT, at.projected("down_proj", spoil=lambda y, by=factor: y * by))  # type: ignore[misc]


def _stored(at: Layer) -> Iterator[Fault]:
    dim = at.model.config.heads.head_dim

    def other(side: str, alter: Spoil, head: int | None = None) -> Alter:
        def store(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int) -> Stored:
            pair = {"k": k.clone(), "v": v.clone()}
            part = slice(None) if head is None else slice(head, head + 1)
            pair[side][:, part] = alter(pair[side][:, part])
            formats = {"k": cache.k_format(layer), "v": cache.v_format(layer)}
            return {name: by_token(formats[name].quantize(x.transpose(0, 1), layer)) for name, x in pair.items()}

        return store

    rotation = haar_rotation(at.index, dim).float()
    last = at.model.config.heads.num_kv_heads - 1
    for side, where in (("k", K), ("v", V)):
        name = side.upper()
        for words, alter, head in (
            (f"{name} 0.1 % too long", lambda x: x * 1.001, None),
            (f"{name} rounded to BF16", lambda x: x.bfloat16().float(), None),
            (f"{name} not rotated", lambda x: x @ rotation.T, None),
            (f"{name} of the last KV head not rotated", lambda x: x @ rotation.T, last),
            (f"{name} of the last KV head negated", torch.neg, last),
        ):  # fmt: skip
            yield Fault(words, at.index, where, where, at.storing(other(side, alter, head)), head=head if last else None)
        for words, steps in (
            (f"every {name} scale one FP16 step too large", 1),
            (f"every {name} scale one FP16 step too small", -1),
        ):
            yield Fault(words, at.index, where, where, at.storing(_steps(side, steps)))


def _steps(side: str, steps: int) -> Alter:
    """Scales so many FP16 steps off; an FP32 norm by as much."""

    def store(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int) -> Stored:
        pair = {"k": (cache.k_format(layer), k), "v": (cache.v_format(layer), v)}
        stored = {name: by_token(of.quantize(x.transpose(0, 1), layer)) for name, (of, x) in pair.items()}
        for name, scale in stored[side].items():
            if scale.dtype == torch.float16:
                stored[side][name] = (scale.contiguous().view(torch.int16) + steps).view(torch.float16)
            elif name == "norm":
                stored[side][name] = (scale.contiguous().view(torch.int32) + (steps << 13)).view(torch.float32)
        return stored

    return store


class _Shifted(RopeTable):
    """Rotary tables whose positions are off."""

    def __init__(self, config: ModelConfig, by: int) -> None:
        super().__init__(config)
        self._by = by

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().at((positions + self._by).clamp(max=self.positions - 1))


def _config(model: DecoderModel) -> Iterator[Fault]:
    """What is wrong in the whole model; a table of ops has no part in it."""
    config = model.config

    def wrong(name: str, where: str, *also: str, **changed: Any) -> Fault:
        return Fault(name, 0, where, where, {}, model=replace(model, **changed), also=also)

    for theta in (1e4, 1e5, 5e5, 1e6, 1e7, config.rope_theta * 1.01, config.rope_theta * 0.99):
        if theta != config.rope_theta:
            table = RopeTable(replace(config, rope_theta=theta))
            yield wrong(f"RoPE base {theta:g} for {config.rope_theta:g}", K, rope=table)
    for eps in (1e-5, 1e-6, 1e-8):
        if eps != config.final_norm.eps:
            # V's length shows it; in BF16 it tips so many inputs to their other neighbours that K's levels do, too.
            yield wrong(f"norms' eps {eps:g} for {config.final_norm.eps:g}", V, K, config=replace(config, rms_norm_eps=eps))
    # Q and K turn alike: what they are to each other stays.
    yield wrong("positions off by one", K, rope=_Shifted(config, 1))
