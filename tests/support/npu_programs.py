"""Inputs and goldens of NPU programs, for the tests of the `npu` room."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import pad

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.npu.learned import learned_coordinates
from haarkv.tq_ops.npu.program import Argument
from haarkv.tq_ops.npu.sides import TQ4 as TQ4_SIDE
from haarkv.tq_ops.npu.sides import Side, format_side, key_turns, turns_of_tokens
from haarkv.tq_ops.npu.sim.simulator import unavailable

needs_pypto = [
    pytest.mark.npu,
    pytest.mark.skipif(unavailable() is not None, reason=f"NPU programs cannot be simulated here: {unavailable()}"),
]


def with_pypto(test):
    """Both marks, for a single test."""
    return needs_pypto[0](needs_pypto[1](test))


@dataclass(frozen=True)
class StoreProgram:
    """What a layer does between its projections and its attention, alone: K and V [n * rows, Hkv, D] FP32 into a cache."""

    num_kv_heads: int
    rows: int = 16
    name: str = "store_kv"
    k: Side = TQ4_SIDE
    v: Side = TQ4_SIDE

    @property
    def arguments(self):
        inputs = (Argument(name) for name in ("k", "v", "rotation", "slot"))
        back = Argument("back", unread=(torch.float32, (1, self.k.head_dim)))
        return (*inputs, back, *self.k.domain_arguments(), *self.k.arguments("k"), *self.v.arguments("v"))

    def build(self, **options):
        from look_up_kernel import build_store

        return build_store(self, options)


@dataclass
class Case:
    """A program, its tensors by name, and what its outputs should become."""

    program: object
    tensors: dict
    goldens: dict


CPU = torch.device("cpu")
TQ4 = formats.get("tq4")
MEAN_AT = 1
"""The token whose first key is the mean, where coordinates are learned."""


def _fields(kv_format, blocks, kv_heads):
    return {
        name: torch.zeros(blocks, kv_heads, 128, *field.shape, dtype=field.dtype)
        for name, field in kv_format.fields(128).items()
    }


def empty_cache(blocks, kv_heads, pair=(TQ4, TQ4), layer=0):
    """Cache arguments filled with other people's leftovers, and what leads into the domain of what is stored."""
    generator = torch.Generator().manual_seed(99)
    tensors = {}
    for prefix, kv_format in zip("kv", pair, strict=True):
        side, fields = format_side(kv_format, layer), _fields(kv_format, blocks, kv_heads)
        for tensor in fields.values():
            whole = torch.randint(0, 16 if tensor.shape[3:] == (128,) else 256, tensor.shape, generator=generator)
            fractions = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(fractions if tensor.is_floating_point() else whole)
        tensors |= side.tensors(prefix, fields)
    return tensors | format_side(pair[0], layer).domain_tensors(pair[0], layer, CPU)


def scatter(case_cache, x, prefix, slots, layer, kv_heads, kv_format=TQ4):
    """What a format stores of x [T, Hkv, 128], written into copies of the cache arguments by plain loops."""
    encoded_fields, side = kv_format.quantize(x.transpose(0, 1), layer), format_side(kv_format, layer)
    new_arguments = {}
    for argument, field in zip(side.arguments(prefix), (side.vectors, side.scales), strict=True):
        if field is None:
            continue
        # One vector a row of its own, whatever lies in a row of the argument.
        rows = case_cache[argument.name].clone().view(-1, 1 if field is side.scales else field.width)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, 128)
            for head in range(kv_heads):
                rows[(block * kv_heads + head) * 128 + offset] = encoded_fields[field.field][head, token].view(field.dtype)
        new_arguments[argument.name] = rows.view_as(case_cache[argument.name])
    return new_arguments


def rotation(layer):
    return haar_rotation(layer, 128).contiguous()


def awkward(tokens, kv_heads, seed):
    """Vectors [T, Hkv, 128] FP32 of very different lengths, one of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kv_heads, 128, generator=generator)
    x *= torch.logspace(-3, 3, tokens * kv_heads).view(tokens, kv_heads, 1)
    x[0, -1] = 0
    return x


def store_case(tokens, kv_heads=2, layer=1, rows=16, seed=0, blocks=3, pair=(TQ4, TQ4), make=StoreProgram):
    """A call of the store program, or of another that `make` makes, into a cache of other people's leftovers.

    Keys by stretches: the fifth token and those behind it are of the second stretch.
    """
    k, v = awkward(tokens, kv_heads, seed), awkward(tokens, kv_heads, seed + 1)
    for x, kv_format in zip((k, v), pair, strict=True):
        if coordinates := learned_coordinates(kv_format, 128, layer):
            x[MEAN_AT % tokens, 0] = coordinates.mean[0]
    slots = torch.randperm(blocks * 128, generator=torch.Generator().manual_seed(seed))[:tokens]
    cache = empty_cache(blocks, kv_heads, pair, layer)
    padded = -(-tokens // rows) * rows
    turns, positions, stored_k = key_turns(pair[0], layer, 128), STRETCH - 4 + torch.arange(tokens), k
    if turns:
        cache["back"] = pad(turns_of_tokens(turns, positions), (0, 0, 0, padded - tokens))
        stored_k = turns.undo(k.transpose(0, 1), positions).transpose(0, 1)

    def whole_tiles(x):
        out = torch.zeros(padded, kv_heads, 128)
        out[:tokens] = x
        return out

    goldens = {}
    for name, x, kv_format in (("k", stored_k, pair[0]), ("v", v, pair[1])):
        goldens |= scatter(cache, x, name, slots, layer, kv_heads, kv_format)
    tensors = {"k": whole_tiles(k), "v": whole_tiles(v), "rotation": rotation(layer), "slot": slots.int(), **cache}
    k_side, v_side = (format_side(kv_format, layer) for kv_format in pair)
    return Case(make(kv_heads, rows, k=k_side, v=v_side), tensors, goldens)


@dataclass(frozen=True)
class FailingProgram:
    """A program that fails while it is built, in the way it is told."""

    how: str
    name: str = "broken"
    arguments: tuple = ()

    def build(self, **options):
        if self.how == "dies":
            os._exit(3)
        if self.how == "hangs":
            time.sleep(60)
        raise RuntimeError("the compiler's own words")
