"""Inputs, goldens and the full verification of NPU programs, for the tests of the `npu` room."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
from npu_verify import check_verified

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops import formats
from haarkv.tq_ops.npu.program import ordered
from haarkv.tq_ops.npu.sides import TQ4
from haarkv.tq_ops.npu.sim.simulator import Mode, unavailable

needs_pypto = [
    pytest.mark.npu,
    pytest.mark.skipif(unavailable() is not None, reason=f"NPU programs cannot be simulated here: {unavailable()}"),
]


@dataclass
class Case:
    """A program, its tensors by name, and what its outputs should become."""

    program: object
    tensors: dict
    goldens: dict
    atol: float = 0.0

    def indexed(self, named):
        position = {a.name: i for i, a in enumerate(self.program.arguments)}
        return {position[name]: tensor for name, tensor in named.items()}


def verify(simulator, case):
    """Every pass verified by PyPTO, then our own comparison. The largest difference of a float output."""
    goldens = case.indexed(case.goldens)
    tensors = ordered(case.program, case.tensors)
    run = simulator.run(case.program, tensors, Mode.VERIFY, goldens)
    return check_verified(case.program, run, {i: tensors[i] for i in goldens}, goldens, case.atol), run


def _fields(side, blocks, kv_heads):
    return {
        name: torch.zeros(blocks, kv_heads, 128, *field.shape, dtype=field.dtype)
        for name, field in formats.get(side.name).fields(128).items()
    }


def empty_cache(blocks, kv_heads, side=TQ4):
    """Cache arguments filled with other people's leftovers."""
    generator = torch.Generator().manual_seed(99)
    named = {}
    for prefix in "kv":
        fields = _fields(side, blocks, kv_heads)
        for tensor in fields.values():
            whole = torch.randint(0, 16 if tensor.shape[3:] == (128,) else 256, tensor.shape, generator=generator)
            fractions = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(fractions if tensor.is_floating_point() else whole)
        named |= side.tensors(prefix, fields)
    return named


def scatter(case_cache, x, prefix, slots, layer, kv_heads, side=TQ4):
    """What a format stores of x [T, Hkv, 128], written into copies of the cache arguments by plain loops."""
    stored = formats.get(side.name).quantize(x, layer)
    written = {}
    for argument, field in zip(side.arguments(prefix), (side.vectors, side.scales), strict=True):
        if field is None:
            continue
        # One vector a row of its own, whatever lies in a row of the argument.
        rows = case_cache[argument.name].clone().view(-1, 1 if field is side.scales else field.width)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, 128)
            for head in range(kv_heads):
                rows[(block * kv_heads + head) * 128 + offset] = stored[field.field][token, head].view(field.dtype)
        written[argument.name] = rows.view_as(case_cache[argument.name])
    return written


def rotation(layer):
    return haar_rotation(layer, 128).contiguous()


@dataclass(frozen=True)
class Broken:
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
