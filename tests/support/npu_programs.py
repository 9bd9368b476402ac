"""Inputs and goldens of NPU programs, for the tests of the `npu` room."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
from npu_layers import with_leftovers
from torch.nn.functional import pad

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape
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


def awkward(tokens, kv_heads, seed):
    """Vectors [T, Hkv, 128] FP32 of very different lengths, one of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kv_heads, 128, generator=generator)
    x *= torch.logspace(-3, 3, tokens * kv_heads).view(tokens, kv_heads, 1)
    x[0, -1] = 0
    return x


def store_case(tokens, kv_heads=2, pair=(TQ4, TQ4), make=StoreProgram):
    """A call of the store program, or of another that `make` makes, into a cache of leftovers; goldens are the reference's.

    Keys by stretches: the fifth token and those behind it are of the second stretch.
    """
    layer, blocks = 1, 3
    k, v = awkward(tokens, kv_heads, 0), awkward(tokens, kv_heads, 1)
    if coordinates := learned_coordinates(pair[0], 128, layer):
        k[MEAN_AT % tokens, 0] = coordinates.mean[0]
    slots = torch.randperm(blocks * 128, generator=torch.Generator().manual_seed(0))[:tokens]
    positions, one = STRETCH - 4 + torch.arange(tokens), torch.zeros(1, dtype=torch.int32)
    batch = Batch(positions, slots, one.view(1, 1), one + STRETCH + tokens, torch.tensor([0, tokens]).int(), one.long())
    plan, sides = KVPlan((pair,) * (layer + 1)), [format_side(kv_format, layer) for kv_format in pair]
    ours, theirs = (
        with_leftovers(PagedKVCache(plan, KVShape(kv_heads, 128), num_blocks=blocks)).view(layer, batch) for _ in range(2)
    )
    theirs.write(k, v)
    missing = -tokens % StoreProgram.rows
    tensors = {"k": pad(k, (0, 0, 0, 0, 0, missing)), "v": pad(v, (0, 0, 0, 0, 0, missing)), "slot": slots.int()}
    tensors |= {"rotation": haar_rotation(layer, 128).contiguous(), **sides[0].domain_tensors(pair[0], layer, CPU)}
    if turns := key_turns(pair[0], layer, 128):
        tensors["back"] = pad(turns_of_tokens(turns, positions), (0, 0, 0, missing))

    def fields(at):
        k_fields, v_fields = at.kv.fields
        return sides[0].tensors("k", k_fields) | sides[1].tensors("v", v_fields)

    return Case(make(kv_heads, k=sides[0], v=sides[1]), tensors | fields(ours), fields(theirs))


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
