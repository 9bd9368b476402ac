"""What an op may do wrong, by op and in words: slips, published bugs, and what bringing up a machine meets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops.kv.batch import Batch
from haarkv.validation.faults.base import Call, K, V, Wrong
from haarkv.validation.layers.parts import Snapshot, put, quantized, read_as

PACKED = ("k", "v")
Spoil = Callable[[Tensor], Tensor]
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Wrong K and V [T, Hkv, D] fp32 of the right ones."""
Keep = Callable[[Call], Snapshot]
"""What a layer stores wrongly, by part; parts that are left out are right."""


# -- Numbers ---------------------------------------------------------------------------------------------------------------
def round_to_bf16(x: Tensor) -> Tensor:
    """To BF16, as FP32."""
    return x.bfloat16().float()


def cut_off(x: Tensor) -> Tensor:
    """The BF16 number next to each number [...] towards zero, as FP32: the lower half is dropped."""
    return (x.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


def layer_rotation(call: Call) -> Tensor:
    """[D, D] fp32, of the call's layer."""
    return haar_rotation(call.layer, call.at.kv.shape.head_dim).float()


def _heads(call: Call) -> int:
    """KV heads."""
    return int(call.at.kv.shape.num_kv_heads)


def _in_bf16(call: Call) -> Tensor:
    """Sums that return to a BF16 accumulator after every 16 products."""
    sums = torch.zeros(len(call.x), len(call.weight))
    for x, weight in zip(torch.split(call.x, 16, -1), torch.split(call.weight, 16, -1), strict=True):
        sums = round_to_bf16(sums + call.again(x=x.contiguous(), weight=weight.contiguous()))
    return sums


def _interleaved_rope(call: Call) -> Tensor:
    pairs = call.x.view(*call.x.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
    rotated_pairs = call.again(x=pairs).view(*call.x.shape[:2], 2, -1)
    return rotated_pairs.transpose(-1, -2).flatten(-2)


# -- Storing ---------------------------------------------------------------------------------------------------------------
def quantized_parts(call: Call, k: Tensor | None = None, v: Tensor | None = None, rotated_as: int | None = None) -> Snapshot:
    """What every part would hold, of other K and V or by another layer's rotation if given."""
    k, v = call.k if k is None else k, call.v if v is None else v
    return quantized(call.cache, call.layer, call.batch, k, v, rotated_as)


def keeping(keep: Keep) -> Wrong:
    """A `store_kv` that stores some parts wrongly."""

    def store(call: Call) -> None:
        parts = keep(call)
        call.again()
        put(call.cache, call.layer, call.batch, parts)

    return store


def other(change: Change, parts: str | tuple[str, ...] = PACKED) -> Keep:
    """Parts whose names begin so hold other K and V."""
    return lambda call: {
        name: fields for name, fields in quantized_parts(call, *change(call.k, call.v)).items() if name.startswith(parts)
    }


def one_side(side: str, spoil: Spoil, head: int = 0) -> Change:
    """K or V changed, from one of its heads on; -1 is the last."""

    def change(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pair = {"k": k.clone(), "v": v.clone()}
        pair[side][:, head:] = spoil(pair[side][:, head:])
        return pair["k"], pair["v"]

    return change


def _codes(spoil: Callable[[Tensor, bool], Tensor], sides: str) -> Keep:
    """Spoilt codes of K or V; `spoil` is told whether each level has a byte of its own."""

    def keep(call: Call) -> Snapshot:
        parts, dim = quantized_parts(call), call.k.shape[-1]
        return {
            side: parts[side] | {"codes": spoil(parts[side]["codes"], parts[side]["codes"].shape[-1] == dim)} for side in sides
        }

    return keep


def _swap_halves(codes: Tensor, byte_a_level: bool) -> Tensor:
    """Nibbles hold the vector's halves; levels with a byte of their own are exchanged by halves."""
    return codes.roll(codes.shape[-1] // 2, -1) if byte_a_level else codes >> 4 | codes << 4


def _random(codes: Tensor, byte_a_level: bool) -> Tensor:
    random_codes = torch.randint(256, codes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return random_codes & 15 if byte_a_level else random_codes


def _steps(side: str, steps: int) -> Keep:
    """Scales that are off by a number of FP16 steps; an FP32 norm by as much."""

    def keep(call: Call) -> Snapshot:
        fields = quantized_parts(call)[side]
        for name, scale in fields.items():
            if scale.dtype == torch.float16:
                fields[name] = (scale.contiguous().view(torch.int16) + steps).view(torch.float16)
            elif name == "norm":
                fields[name] = (scale.contiguous().view(torch.int32) + (steps << 13)).view(torch.float32)
        return {side: fields}

    return keep


def _unrotated_side(call: Call, side: str, head: int = 0) -> Snapshot:
    """One side rotated back before it is stored."""
    return other(one_side(side, lambda x: x @ layer_rotation(call).T, head))(call)


def _twice_back(call: Call) -> Snapshot:
    """As if rotated by the transposed rotation."""
    double_inverse = layer_rotation(call).T @ layer_rotation(call).T
    return other(lambda k, v: (k @ double_inverse, v @ double_inverse))(call)


def _direction(x: Tensor) -> Tensor:
    length: Tensor = x.norm(dim=-1, keepdim=True)
    return cut_off(x / length) * length


def _next_slot(call: Call) -> None:
    slots = (call.batch.slot_mapping + 1) % call.at.kv.num_slots
    call.again(batch=replace(call.batch, slot_mapping=slots))


def _side_faults(side: str, where: str) -> dict[str, tuple[str, Wrong]]:
    name = side.upper()
    keeps: dict[str, Keep] = {
        f"{name} 0.1 % too long": other(one_side(side, lambda x: x * 1.001)),
        f"{name} rounded to BF16": other(one_side(side, round_to_bf16)),
        f"{name} not rotated": lambda call: _unrotated_side(call, side),
        f"{name} of the last KV head not rotated": lambda call: _unrotated_side(call, side, -1),
        f"{name} of the last KV head negated": other(one_side(side, torch.neg, -1)),
        f"every {name} scale one FP16 step too large": _steps(side, 1),
        f"every {name} scale one FP16 step too small": _steps(side, -1),
    }
    return {words: (where, keeping(keep)) for words, keep in keeps.items()}


STORE: Mapping[str, tuple[str, Wrong]] = {
    "a transposed rotation": (K, keeping(_twice_back)),
    "swapped nibbles": (K, keeping(_codes(_swap_halves, "kv"))),
    "K stored as V": (V, keeping(other(lambda k, _: (k, k)))),
    "a slot off by one": ("untouched_slots", _next_slot),
    "random K codes": (K, keeping(_codes(_random, "k"))),
    "another layer's rotation": (K, keeping(lambda call: quantized_parts(call, rotated_as=call.layer + 1))),
    "K and V not written": (K, lambda _: None),
    "K and V's directions cut off, not rounded": (K, keeping(other(lambda k, v: (_direction(k), _direction(v))))),
    **_side_faults("k", K),
    **_side_faults("v", V),
}
"""What `store_kv` may do wrong, and the stage that shows it. Codes are of 16 levels."""


# -- Attention -------------------------------------------------------------------------------------------------------------
def by_head(call: Call, **other: Any) -> tuple[Tensor, ...]:
    """Attention with changed inputs, split by KV head."""
    return call.again(**other).chunk(_heads(call), 1)


def larger(factor: float, head: int | None = None) -> Wrong:
    """Attention multiplied by a factor; of one KV head if one is given, -1 being the last."""

    def attend(call: Call) -> Tensor:
        parts = [part.float() for part in by_head(call)]
        for place in range(len(parts)) if head is None else [head]:
            parts[place] = parts[place] * factor
        return torch.cat(parts, 1).to(call.q.dtype)

    return attend


def steeper(factor: float) -> Wrong:
    """Attention whose softmax scale is multiplied by a factor."""
    return lambda call: call.again(softmax_scale=call.softmax_scale * factor)


def last_positions(batch: Batch) -> Tensor:
    """[T]: the position of the last token of each token's sequence."""
    return batch.of_tokens(batch.seq_lens - 1).to(batch.positions.dtype)


def _seeing(more: int) -> Wrong:
    """Attention whose queries stand `more` tokens further on, within their sequence."""

    def attend(call: Call) -> Tensor:
        positions = torch.minimum(call.batch.positions + more, last_positions(call.batch)).clamp(min=0)
        return call.again(batch=replace(call.batch, positions=positions))

    return attend


def _dealt(call: Call) -> Tensor:
    """Query head h takes KV head h mod Hkv."""
    tokens, heads = len(call.q), _heads(call)
    q = call.q.view(tokens, -1, heads, call.q.shape[2]).transpose(1, 2).flatten(1, 2).contiguous()
    out = call.again(q=q).view(tokens, heads, -1, call.q.shape[2])
    return out.transpose(1, 2).flatten(1, 2).contiguous()


def _first_two_heads(call: Call) -> Tensor:
    out = call.again().clone()
    grouped = out.view(out.shape[0], _heads(call), -1, out.shape[2])
    grouped[:, :, :2] = grouped[:, :, :2].flip(-1)
    return out


def _one_nan(call: Call) -> Tensor:
    out = call.again().clone()
    out[-1, 0, 0] = torch.nan
    return out


def _a_thread_idle(call: Call) -> Tensor:
    out = call.again().clone()
    out[len(out) // 2 : 3 * len(out) // 4] = 0
    return out


def other_block(side: int) -> Wrong:
    """Attention that reads the scales of each block but the first, of K (0) or V (1), from the block before it."""

    def attend(call: Call) -> Tensor:
        pair = list(call.at.kv.fields)
        scales = pair[side]["scale"].clone()
        for blocks in call.batch.block_table.long():
            used_blocks = blocks[blocks >= 0]
            scales[used_blocks[1:]] = pair[side]["scale"][used_blocks[:-1]]
        pair[side] = pair[side] | {"scale": scales}
        return call.again(cache=read_as(call.cache, call.layer, fields=(pair[0], pair[1])))

    return attend


ATTENTION: Mapping[str, Wrong] = {
    "zero output": lambda call: torch.zeros_like(call.q),
    "the first two of five Q heads corrupted": _first_two_heads,
    "one NaN": _one_nan,
    "softmax scale left out": lambda call: call.again(softmax_scale=1.0),
    "softmax scale 1/D": lambda call: call.again(softmax_scale=call.softmax_scale**2),
    "softmax scale of half the head_dim": lambda call: call.again(softmax_scale=(call.q.shape[2] / 2) ** -0.5),
    "softmax scale 0.1 % too large": steeper(1.001),
    "attention 1 % too large": larger(1.01),
    "attention of the last KV head 1 % too large": larger(1.01, -1),
    "no causal mask": _seeing(10**6),
    "one token too few is seen": _seeing(-1),
    "one token too many is seen": _seeing(1),
    "query heads dealt out to KV heads in turn": _dealt,
    "query heads one off their KV head": lambda call: call.again(q=call.q.roll(-1, 1).contiguous()).roll(1, 1),
    "attention's output left rotated": lambda call: (call.again().float() @ layer_rotation(call)).to(call.q.dtype),
    "attention's output cut off, not rounded": lambda call: cut_off(call.again(q=call.q.float())).to(call.q.dtype),
    "a quarter of the rows is left to a thread that never runs": _a_thread_idle,
}

# -- Ops without a cache ---------------------------------------------------------------------------------------------------
NORM: Mapping[str, Wrong] = {
    "left out": lambda call: call.x,
    "without its weight": lambda call: call.again(weight=torch.ones_like(call.weight)),
    "with 1 + its weight": lambda call: call.again(weight=call.weight.float() + 1),
    "takes the mean away": lambda call: call.again(x=call.x - call.x.float().mean(-1, True).to(call.x.dtype)),
    "cut off, not rounded": lambda call: cut_off(call.again(x=call.x.float())).to(call.x.dtype),
}
LINEAR: Mapping[str, Wrong] = {
    "'s result rounded to BF16": lambda call: round_to_bf16(call.again()),
    " left out": lambda call: call.again() * 1e-3,
    " 1 % too large": lambda call: call.again() * 1.01,
    "'s sums kept in BF16": _in_bf16,
}
ROPE: Mapping[str, Wrong] = {
    "RoPE left out": lambda call: call.x,
    "RoPE turns the other way": lambda call: call.again(sin=-call.sin),
    "RoPE of neighbours, not of halves": _interleaved_rope,
}
SWIGLU: Mapping[str, Wrong] = {
    "gate and up exchanged": lambda call: call.again(gate=call.up, up=call.gate),
    "SiLU left out": lambda call: (call.gate * call.up).to(call.dtype),
    "GELU in place of SiLU": lambda call: (functional.gelu(call.gate) * call.up).to(call.dtype),
    "the MLP's product 1 % too large": lambda call: (functional.silu(call.gate) * call.up * 1.01).to(call.dtype),
    "SwiGLU's product cut off, not rounded": lambda call: cut_off(call.again(dtype=torch.float32)).to(call.dtype),
}
