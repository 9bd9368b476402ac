"""Learned keys by loops in float64: the slow path that the formats are compared with, and that wrote their golden bytes."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops.formats.learned import Calibration
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

GAINS = (1, 7 / 8, 19 / 16)
# Bits of a level in each eighth, and the eighths in a unit of each column from its lowest bits on: said again here, and not
# taken from the format.
WIDTHS = {2: "43222111", 3: "54333222", 4: "65444333", 5: "66555544"}
COLUMNS = {2: ("015", "23467"), 3: ("02", "156", "347"), 4: ("0256", "17", "34"), 5: ("023", "145", "67")}
CUBICS = {
    1: (0.797885, 0.0), 2: (0.446480, 6.33520e-3), 3: (0.235725, 1.44807e-3), 4: (0.120259, 2.62162e-4),
    5: (0.0609004, 4.21128e-5), 6: (0.0308382, 6.35835e-6),
}  # fmt: skip
GOLDEN_BITS = (2, 3, 4, 5)


@dataclass
class Slow:
    """One vector.

    levels: of each coordinate.
    scale: before it is rounded to FP16.
    restored: [D] float64, with that scale.
    """

    levels: list
    scale: float
    restored: torch.Tensor


def centroid(level, bits):
    a, b = CUBICS[bits]
    m = 2 * level + 1 - 2**bits
    return m * (a + b * m * m)


def codes(levels, bits):
    """A vector's bytes."""
    units, octets = len(levels) // 8, []
    for eighths in COLUMNS[bits]:
        for j in range(units):
            unit = shift = 0
            for eighth in map(int, eighths):
                unit += levels[eighth * units + j] << shift
                shift += int(WIDTHS[bits][eighth])
            octets += [unit % 256, unit // 256][: shift // 8]
    return octets


def slow(x, coordinates, head, bits):
    """Quantize one vector [D] fp32 of a KV head."""
    dim = len(x)
    weights = coordinates.weights[head].double()
    centered_x = (x - coordinates.mean[head]).double()
    gamma = centered_x.norm()
    y = (centered_x.float() / gamma.float()).bfloat16().double() @ coordinates.forward[head].double()
    t = y / (y.square().sum() / dim).sqrt()
    _, levels, values = max((_at_gain(gain, t, weights, bits) for gain in GAINS), key=lambda candidate: candidate[0])
    scale = float(gamma * (y.square() * weights).sum().sqrt() / (values.square() * weights).sum().sqrt())
    return Slow(levels, scale, values @ coordinates.back[head].double() * scale + coordinates.mean[head].double())


def _at_gain(gain, t, weights, bits):
    """(fit, levels, what they restore)."""
    levels, values = [], torch.zeros_like(t)
    for i, value in enumerate((gain * t).tolist()):
        width = int(WIDTHS[bits][i * 8 // len(t)])
        table = [centroid(level, width) for level in range(2**width)]
        levels.append(sum(value >= (a + b) / 2 for a, b in itertools.pairwise(table)))
        values[i] = table[levels[-1]]
    fit = float((values * t * weights).sum() ** 2 / (values.square() * weights).sum())
    return fit, levels, values


def golden_basis(data):
    """The coordinates of a golden file."""
    bits = {name: torch.from_numpy(data[name].astype(np.int32) << 16).view(torch.float32) for name in ("forward", "back")}
    return Basis(torch.from_numpy(data["mean"]), bits["forward"], bits["back"], torch.from_numpy(data["weights"]))


def other_than_golden(ops, data, bits, device="cpu"):
    """Names of the fields in which an op table stores other bytes than those of a golden file."""
    coordinates = golden_basis(data)
    plan = KVSpec(f"k=lr{bits},v=tq4", calibration=Calibration((coordinates,), "golden")).plan(1)
    x = torch.from_numpy(data[f"x{bits}"]).transpose(0, 1).contiguous().to(device)
    tokens, heads, dim = x.shape
    cache = PagedKVCache(plan, KVShape(heads, dim), num_blocks=tokens // 8, block_size=8, device=device)
    paging = PagedSequences(tokens // 8, 8)
    ops.store_kv(x, x, cache.view(0, paging.batch([paging.add()], [tokens]).to(device)))
    wrong_fields = []
    for name, tensor in cache.kv[0].k.fields.items():
        golden = torch.from_numpy(data[f"{name}{bits}"]).transpose(0, 1)
        if not torch.equal(tensor.transpose(1, 2).flatten(0, 1)[:tokens].cpu(), golden):
            wrong_fields.append(name)
    return wrong_fields
