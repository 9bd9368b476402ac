"""Learned nibbles by loops in float64: the slow path that the formats are compared with, and that wrote their golden bytes.

python tests/support/learned_slow.py tests/golden/learned/lr.npz
"""

import itertools
import sys
from dataclasses import dataclass

import numpy as np
import torch

from haarkv.codebooks import lloyd_max
from haarkv.codebooks.learned import Basis, refinements, stages
from haarkv.tq_ops.formats.learned import Calibration
from haarkv.tq_ops.formats.made_up import basis, vectors
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

GAINS = (1, 7 / 8, 19 / 16)
GOLDEN = {"heads": 2, "dim": 64, "seed": 3}
GOLDEN_NIBBLES = (32, 80, 160)
ROWS = 24
_CLEAR, _FIT_NOISE = 1e-4, 3e-6


@dataclass
class Slow:
    """One vector.

    levels: (stage, coordinate, level) of each nibble.
    scale: before it is rounded to FP16.
    restored: [D] float64, with that scale.
    margin: how far any choice is from the other one, relative: of u between two BF16 numbers, a level between two, a gain,
        the scale between two FP16 numbers.
    """

    levels: list
    scale: float
    restored: torch.Tensor
    margin: float

    def codes(self):
        """Packed as `tq4`."""
        half = len(self.levels) // 2
        return [self.levels[j][2] | self.levels[j + half][2] << 4 for j in range(half)]


def from_midpoint(x, dtype, digits):
    """How far numbers lie from the middle of two neighbours of a dtype, relative to the distance of those."""
    step = 2.0 ** (np.floor(np.log2(np.abs(x) + 1e-300)) - digits)
    return np.abs(np.abs(x) / step % 1 - 0.5).min()


def slow(x, of, head, nibbles):
    """Quantize one vector [D] fp32 of a KV head."""
    dim = len(x)
    book = lloyd_max(4, dim)
    centroids, boundaries = book.centroids.double().tolist(), book.boundaries.double().tolist()
    counts = stages(of.weights, nibbles)[head].tolist()
    weights = of.weights[head].double()
    shifted = (x - of.mean[head]).double()
    gamma = shifted.norm()
    exact = shifted / gamma
    y = (shifted.float() / gamma.float()).bfloat16().double() @ of.forward[head].double()
    y[counts[0] :] = 0
    t = y / (y.square().sum() / counts[0] * dim).sqrt()
    tried = [_at_gain(gain, t, weights, counts, centroids, boundaries) for gain in GAINS]
    order = sorted(range(len(GAINS)), key=lambda number: -tried[number][0])
    fit, levels, restored, near = tried[order[0]]
    # FP32 sums are good for 1e-6 of a fit.
    near = min(near, (fit - tried[order[1]][0]) / fit / _FIT_NOISE * _CLEAR, *(of_gain[3] for of_gain in tried))
    scale = float(gamma * (y.square() * weights).sum().sqrt() / (restored.square() * weights).sum().sqrt())
    margin = min(near, from_midpoint(exact.numpy(), "bf16", 7), from_midpoint(np.array(scale), "fp16", 10))
    return Slow(levels, scale, restored @ of.back[head].double() * scale + of.mean[head].double(), float(margin))


def _at_gain(gain, t, weights, counts, centroids, boundaries):
    """(fit, levels, what they restore, distance from the nearest boundary in widths of a level)."""
    levels, restored, near = [], torch.zeros_like(t), 1.0
    width = boundaries[8] - boundaries[7]
    for stage, (count, step) in enumerate(zip(counts, refinements(), strict=True)):
        for i in range(count):
            left = float(gain * t[i] - restored[i]) / step
            level = sum(left >= b for b in boundaries)
            near = min(near, *(abs(left - b) / width for b in boundaries))
            levels.append((stage, i, level))
            restored[i] += step * centroids[level]
    fit = float((restored * t * weights).sum() ** 2 / (restored.square() * weights).sum())
    return fit, levels, restored, near


def golden_basis(data):
    """The coordinates of a golden file."""
    bits = {name: torch.from_numpy(data[name].astype(np.int32) << 16).view(torch.float32) for name in ("forward", "back")}
    return Basis(torch.from_numpy(data["mean"]), bits["forward"], bits["back"], torch.from_numpy(data["weights"]))


def other_than_golden(ops, data, nibbles, device="cpu"):
    """Names of the fields in which an op table stores other bytes than those of a golden file."""
    of = golden_basis(data)
    plan = KVSpec(f"lr{nibbles}", calibration=Calibration((of,), (of,), "golden")).plan(1)
    x = torch.from_numpy(data[f"x{nibbles}"]).transpose(0, 1).contiguous().to(device)
    tokens, heads, dim = x.shape
    cache = PagedKVCache(plan, KVShape(heads, dim), num_blocks=tokens // 8, block_size=8, device=device)
    paging = PagedSequences(tokens // 8, 8)
    ops.store_kv(x, x, cache, 0, paging.batch([paging.add()], [tokens]).to(device))
    found = []
    for side in ("k", "v"):
        for name, stored in getattr(cache, f"{side}_fields")(0).items():
            wanted = torch.from_numpy(data[f"{name}{nibbles}"]).transpose(0, 1)
            if not torch.equal(stored.transpose(1, 2).flatten(0, 1)[:tokens].cpu(), wanted):
                found.append(f"{side} {name}")
    return found


def main(path):
    """Write vectors whose bytes no rounding can change, and those bytes."""
    of = basis(**GOLDEN)
    found = {"mean": of.mean.numpy(), "weights": of.weights.numpy()}
    for name in ("forward", "back"):
        found[name] = (getattr(of, name).view(torch.int32).numpy() >> 16).astype(np.uint16)
    candidates = vectors(of, 40 * ROWS, torch.Generator().manual_seed(4))
    for nibbles in GOLDEN_NIBBLES:
        kept = []
        for head in range(GOLDEN["heads"]):
            made = ((x, slow(x, of, head, nibbles)) for x in candidates[head])
            kept.append(list(itertools.islice((pair for pair in made if pair[1].margin > _CLEAR), ROWS)))
        found[f"x{nibbles}"] = np.stack([[x.numpy() for x, _ in rows] for rows in kept])
        found[f"codes{nibbles}"] = np.array([[made.codes() for _, made in rows] for rows in kept], np.uint8)
        found[f"scale{nibbles}"] = np.array([[made.scale for _, made in rows] for rows in kept]).astype(np.float16)
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
