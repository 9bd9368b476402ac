"""Slips that people make when they write a decoder layer: each put into the reference, in one layer.

The self-test plants them and looks whether the validator finds them. Where a layer is one program and wrong, the validator
puts them into the reference, to see which gives that layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from haarkv.models.base import DecoderModel
from haarkv.models.config import Rope
from haarkv.models.rope import RopeTable
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch
from haarkv.validation.layers.faults import Asked, Attend, Fault, Given, K, Keep, Layer, V, one_side, other
from haarkv.validation.layers.parts import Stored


def slips(model: DecoderModel, layer: int) -> list[Fault]:
    """Every slip there is for a model's family.

    Args:
        layer: the one that they are put into; those of the model's config are in every layer, and show first in layer 0.
    """
    at = Layer(model, layer)
    return [*_norms(at), *_projections(at), *_rope(at), *_attention(at), *_mlp(at), *_stored(at), *_config(model)]


def _norms(at: Layer) -> Iterator[Fault]:
    def centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x - x.float().mean(-1, True).to(x.dtype), weight, eps)

    for name in ("input_norm", "q_norm", "k_norm", "post_norm"):
        # K is normed again, so a wrong length of its input shows in V alone.
        yield from at.weighing(f"{name} left out", name, lambda x, *_: x)
        yield from at.weighing(
            f"{name} without its weight", name, lambda x, w, eps: reference.rms_norm(x, torch.ones_like(w), eps)
        )
        yield from at.weighing(
            f"{name} with 1 + its weight", name, lambda x, w, eps: reference.rms_norm(x, w.float() + 1, eps)
        )
    yield from at.weighing("input_norm takes the mean away", "input_norm", centred)


def _projections(at: Layer) -> Iterator[Fault]:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj"):
        if name in ("k_proj", "v_proj"):
            yield from at.projecting(f"{name}'s result rounded to BF16", name, lambda y: y.bfloat16().float())
        yield from at.projecting(f"{name} left out", name, lambda y: y * 1e-3)
        # Where Q and K are normed, their length does not matter.
        if not (name in ("q_proj", "k_proj") and at.weight(f"{name[0]}_norm") is not None):
            yield from at.projecting(f"{name} 1 % too large", name, lambda y: y * 1.01)
    if (k := at.weight("k_proj")) is not None and (v := at.weight("v_proj")) is not None:

        def exchanged(x: Tensor, weight: Tensor) -> Tensor:
            return reference.linear(x, v if weight is k else k if weight is v else weight)

        yield Fault("k_proj and v_proj exchanged", at.index, "k_proj", {"linear": exchanged})
    heads = at.model.config.heads.num_kv_heads
    if heads > 1:
        for name in ("k_proj", "v_proj"):
            yield from at.projecting(
                f"{name}: KV heads in another order", name, lambda y: y.view(len(y), heads, -1).roll(1, 1).flatten(1)
            )


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.view(*x.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
    return reference.rope(pairs, cos, sin).view(*x.shape[:2], 2, -1).transpose(-1, -2).flatten(-2)


def _rope(at: Layer) -> Iterator[Fault]:
    """RoPE of Q or of K, which differ by their heads, otherwise; in every layer."""
    config = at.model.config
    turns: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "RoPE left out": lambda x, *_: x,
        "RoPE turns the other way": lambda x, cos, sin: reference.rope(x, cos, -sin),
        "RoPE of neighbours, not of halves": _interleaved,
    }
    if config.heads.num_heads == config.heads.num_kv_heads:
        return
    for letter, heads in (("Q", config.heads.num_heads), ("K", config.heads.num_kv_heads)):
        for name, turn in turns.items():

            def rope(x: Tensor, cos: Tensor, sin: Tensor, turn: Any = turn, heads: int = heads) -> Tensor:
                turned: Tensor = (turn if x.shape[1] == heads else reference.rope)(x, cos, sin)
                return turned

            yield Fault(f"{name}, of {letter}", 0, f"{letter.lower()}_rope", {"rope": rope})


def _attention(at: Layer) -> Iterator[Fault]:
    heads, last = at.model.config.heads.num_kv_heads, at.last_head
    group = at.model.config.heads.num_heads // heads

    def dealt(asked: Asked) -> Tensor:
        # Query head h is served by KV head h mod Hkv.
        tokens = len(asked.q)
        out = asked.again(q=asked.q.view(tokens, group, heads, -1).transpose(1, 2).flatten(1, 2).contiguous())
        return out.view(tokens, heads, group, -1).transpose(1, 2).flatten(1, 2).contiguous()

    wrong: dict[str, Attend] = {
        "softmax scale left out": lambda asked: asked.again(scale=1.0),
        "softmax scale 1/D": lambda asked: asked.again(scale=asked.scale**2),
        "softmax scale 0.1 % too large": steeper(1.001),
        "attention 1 % too large": larger(1.01),
        "no causal mask": _seeing(10**6),
        "one token too few is seen": _seeing(-1),
        "one token too many is seen": _seeing(1),
        **({"query heads dealt out to KV heads in turn": dealt} if heads > 1 and group > 1 else {}),
    }
    for name, attend in wrong.items():
        yield at.attending(name, attend)
    if heads > 1:
        yield at.attending("attention of the last KV head 1 % too large", larger(1.01, last), head=last)
    yield at.attending(
        "attention's output left rotated", lambda asked: (asked.again().float() @ at.rotation).to(asked.q.dtype)
    )


def larger(factor: float, head: int | None = None) -> Attend:
    """Attention that is so many times as large: all of it, or one KV head's part."""

    def attend(asked: Asked) -> Tensor:
        parts = [part.float() for part in asked.by_head()]
        scaled = [part * factor if head in (None, place) else part for place, part in enumerate(parts)]
        return torch.cat(scaled, 1).to(asked.q.dtype)

    return attend


def steeper(factor: float) -> Attend:
    """Attention whose softmax scale is so many times as large."""
    return lambda asked: asked.again(scale=asked.scale * factor)


def last_positions(batch: Batch) -> Tensor:
    """[T]: the position of the last token of each token's sequence."""
    return torch.repeat_interleave(batch.seq_lens - 1, batch.query_start_loc.diff()).to(batch.positions.dtype)


def _seeing(more: int) -> Attend:
    """Attention whose queries stand `more` tokens further on; within their sequence."""

    def attend(asked: Asked) -> Tensor:
        batch = asked.batch
        positions = torch.minimum(batch.positions + more, last_positions(batch)).clamp(min=0)
        return asked.again(batch=replace(batch, positions=positions))

    return attend


def _mlp(at: Layer) -> Iterator[Fault]:
    table: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
        "gate and up exchanged": lambda g, u, d: reference.silu_mul(u, g, d),
        "SiLU left out": lambda g, u, d: (g * u).to(d),
        "GELU in place of SiLU": lambda g, u, d: (functional.gelu(g) * u).to(d),
        "the MLP's product 1 % too large": lambda g, u, d: (functional.silu(g) * u * 1.01).to(d),
    }
    for name, op in table.items():
        yield Fault(name, 0, "silu_mul", {"silu_mul": op})
    yield from at.projecting("the MLP left out, nearly", "down_proj", lambda y: y * 1e-3)
    yield from at.projecting("the MLP 1 % too large", "down_proj", lambda y: y * 1.01)


def _stored(at: Layer) -> Iterator[Fault]:
    back, last = at.rotation.T, at.last_head
    for side, where in (("k", K), ("v", V)):
        name = side.upper()
        for words, spoil, head in (
            (f"{name} 0.1 % too long", lambda x: x * 1.001, 0),
            (f"{name} rounded to BF16", lambda x: x.bfloat16().float(), 0),
            (f"{name} not rotated", lambda x: x @ back, 0),
            (f"{name} of the last KV head not rotated", lambda x: x @ back, last),
            (f"{name} of the last KV head negated", torch.neg, last),
        ):  # fmt: skip
            yield at.keeping(words, where, other(one_side(side, spoil, head)), head=head or None)
        yield at.keeping(f"every {name} scale one FP16 step too large", where, _steps(side, 1))
        yield at.keeping(f"every {name} scale one FP16 step too small", where, _steps(side, -1))


def _steps(side: str, steps: int) -> Keep:
    """Scales so many FP16 steps off; an FP32 norm by as much."""

    def keep(given: Given) -> Stored:
        fields = given.parts()[side]
        for name, scale in fields.items():
            if scale.dtype == torch.float16:
                fields[name] = (scale.contiguous().view(torch.int16) + steps).view(torch.float16)
            elif name == "norm":
                fields[name] = (scale.contiguous().view(torch.int32) + (steps << 13)).view(torch.float32)
        return {side: fields}

    return keep


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


def with_tables(model: DecoderModel, *args: Any, **how: Any) -> DecoderModel:
    """A model whose rotary tables are all made or read in another way; arguments as of `OtherRope`."""
    limit = model.config.max_position_embeddings
    return replace(model, ropes={rope: OtherRope(rope, limit, *args, **how) for rope in model.ropes})


def with_bases(model: DecoderModel, factor: float = 1.0, theta: float | None = None) -> DecoderModel:
    """A model whose RoPE has another base than its layers declare."""
    limit = model.config.max_position_embeddings
    ropes = {rope: RopeTable(replace(rope, theta=theta or rope.theta * factor), limit) for rope in model.ropes}
    return replace(model, ropes=ropes)


def _config(model: DecoderModel) -> Iterator[Fault]:
    """What is wrong in the whole model; a table of ops has no part in it."""
    config = model.config

    def wrong(name: str, where: str, other: DecoderModel, *also: str) -> Fault:
        return Fault(name, 0, where, model=other, also=also)

    base = next(iter(model.ropes)).theta
    for theta in (1e4, 1e5, 5e5, 1e6, 1e7, base * 1.01, base * 0.99):
        if theta != base:
            yield wrong(f"RoPE base {theta:g} for {base:g}", K, with_bases(model, theta=theta))
    for eps in (1e-5, 1e-6, 1e-8):
        if eps != config.final_norm.eps:
            # V's length shows it; in BF16 it tips so many inputs to their other neighbours that K's levels do, too.
            layers = tuple(replace(layer, norm=replace(layer.norm, eps=eps)) for layer in config.layers)
            other = replace(config, layers=layers, final_norm=replace(config.final_norm, eps=eps))
            yield wrong(f"norms' eps {eps:g} for {config.final_norm.eps:g}", V, replace(model, config=other), K)
    # Q and K turn alike: what they are to each other stays.
    yield wrong("positions off by one", K, with_tables(model, lambda positions: positions + 1))
