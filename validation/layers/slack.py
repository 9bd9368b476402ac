"""What rounding nobody can see moves attention by, and what an executor may therefore differ by beside its bounds.

**Ties that no cache shows.** A vector that is restored to BF16 before it is attended to is rounded twice,
`bf16(bf16(c[level] * scale) @ back)`. A number that lies beside a rounding point falls to either side, as FP32 sums run, and
one of the first kind takes all numbers of its level along: attention to few tokens then is off by more than any FP32 sum, and
nothing is wrong. Which numbers lie so follows from what is stored. So the reference runs again with these on either side.

**Large scores.** A K bias of hundreds leaves few bits for what tells keys apart. A score is a sum of D products in FP32. In
whatever order they are added, it is off by about sqrt(D) * 2**-24 of them (Higham and Mary, 2019, doi:10.1137/18M1226312), and
so is each weight of the softmax: 1e-6 where scores are tens, 1e-4 where they are thousands. So the reference runs again over
keys that are off by that share, at random.

**Layers that take rounding apart.** Where what a layer adds is a small difference of large terms, rounding them to BF16 moves
it by percents: the reference's own result lies that far from one of the same weights in FP32 (layer 11 of Gemma 3 270M: 8 % of
one token of 512). Another executor rounds at other points, and lies as far off elsewhere. So the layer runs in FP32, and again
with each number that enters it moved by up to half a step of BF16, at random.

By what this moves a vector, and no more, an executor's may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.base import Restored
from haarkv.tq_ops.formats.rotated import centroids_at
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable
from haarkv.validation import bounds
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.report import Verdict

Attend = Callable[[PagedKVCache], Tensor]
"""Makes [..., N] of a cache, without rounding to BF16 on the way."""
_DRAWS = 2  # pairs of opposite ones
_DRAWN_KEYS = 3
DRAWN_INPUTS = 3
_SIDES = 2
"""Both sums are rounded, the reference's and the executor's."""


def judged(
    judge: Callable[[Tensor | None], Verdict], attend: Attend, cache: PagedKVCache, layer: int,
    rounding: Callable[[], Tensor] | None = None,
) -> tuple[Verdict, Tensor | None]:  # fmt: skip
    """A verdict on what attention leads to, and what its vectors may differ by: for ties, and where that is not enough for
    rounded scores as well, and for rounding to BF16.

    Args:
        judge: by what each vector may differ; None for nothing.
        attend, cache, layer: as of `of_ties`.
        rounding: makes what `of_rounding` allows, of a model in BF16.
    """
    allowed = of_ties(attend, cache, layer)
    verdict = judge(allowed)
    for moves in [lambda: of_scores(attend, cache, layer), *([rounding] if rounding else [])]:
        if verdict.reason != "fault":
            break
        by = moves()
        allowed = by if allowed is None else allowed + by
        verdict = judge(allowed)
    return verdict, allowed


def of_rounding(exact: Tensor, rounded: Sequence[Tensor]) -> Tensor:
    """How far rounding may move each vector of a result: [...] fp64.

    Args:
        exact: [..., N], the result in FP32.
        rounded: the same rounded, or of inputs that were.
    """
    moved = torch.stack([(one.double() - exact.double()).norm(dim=-1) for one in rounded])
    return _SIDES * moved.amax(0)


def moved_by_rounding(x: Tensor, seed: int) -> Tensor:
    """Each number of x [..., N] moved by up to half a step of BF16, at random: fp32."""
    steps = torch.ldexp(torch.full_like(x, 2.0**-7, dtype=torch.float32), torch.frexp(x.float()).exponent - 1)
    return x.float() + steps * (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) - 0.5)


def of_ties(attend: Attend, cache: PagedKVCache, layer: int) -> Tensor | None:
    """How far ties of restored vectors may move each vector of a result: [...] fp64, zeros where there is no tie; None if a
    layer restores none.

    A draw decides every tie, its opposite each the other way. Let them move a vector by a and b. All ties together then move
    it by |a + b|, and ties at right angles to each other, all together, by |a - b| as well. Only some of them move it by no
    more, where all pull one way or all at right angles. So sqrt(|a + b|**2 + |a - b|**2) = sqrt(2 |a|**2 + 2 |b|**2) is
    allowed. Ties that undo each other in one draw are likelier not to in the next.

    Args:
        attend: makes [..., N] of a cache, without rounding to BF16 on the way.
        cache: what is attended to.
    """
    if not any(kv_format.restored(cache.shape(layer).head_dim) for kv_format in cache.plan.layers[layer]):
        return None
    generator = torch.Generator().manual_seed(layer)
    plain = attend(_numbers(cache, layer, None, 0)).double()
    allowed = torch.zeros(plain.shape[:-1], dtype=torch.float64)
    for _ in range(_DRAWS):
        seed = int(torch.randint(2**31, (), generator=generator))
        moved = [attend(_numbers(cache, layer, seed, way)).double() - plain for way in (1, -1)]
        squares = sum((by.square().sum(-1) for by in moved), torch.zeros(()))
        allowed = torch.maximum(allowed, (2 * squares).sqrt())
    return allowed


def of_scores(attend: Attend, cache: PagedKVCache, layer: int) -> Tensor:
    """How far rounded scores may move each vector of a result: [...] fp64.

    Arguments as of `of_ties`.
    """
    k = cache.k_format(layer).dequantize(cache.k_fields(layer), layer)
    v = cache.v_format(layer).dequantize(cache.v_fields(layer), layer)
    generator, share = torch.Generator().manual_seed(layer), math.sqrt(k.shape[-1]) * 2.0**-24

    def over(keys: Tensor) -> Tensor:
        return attend(as_numbers(cache, layer, keys, v)).double()

    right = over(k)
    moved = [
        (over(k * (1 + share * (2 * torch.rand(k.shape, generator=generator) - 1))) - right).norm(dim=-1)
        for _ in range(_DRAWN_KEYS)
    ]
    return _SIDES * torch.stack(moved).amax(0)


def attending(call: Call, ops: OpTable) -> tuple[Attend, PagedKVCache, int]:
    """What runs a recorded attention [T, Hq, D] again, the live cache and its layer."""
    q, cache, layer, batch, scale = call.args
    return lambda drawn: ops.paged_attention(q.float(), drawn, layer, batch, scale), cache, layer


def of_op(call: Call, ops: OpTable) -> Tensor | None:
    """`of_ties` of a recorded attention; None of any other op."""
    return of_ties(*attending(call, ops)) if call.op == "paged_attention" else None


def nearer(ours: Tensor, theirs: Tensor, allowed: Tensor | None) -> Tensor:
    """`theirs` without what ties explain: fp64 [..., N], each vector nearer to ours by what it is allowed; NaN stays NaN.

    Args:
        allowed: [...], of `judged`; `theirs` itself if there is none.
    """
    if allowed is None:
        return theirs
    off = theirs.double() - ours.double()
    distance = off.norm(dim=-1, keepdim=True)
    left = (distance - allowed.unsqueeze(-1)).clamp(min=0)
    return ours.double() + off * torch.where(distance == 0, 0.0, left / distance)


def _numbers(cache: PagedKVCache, layer: int, seed: int | None, way: int) -> PagedKVCache:
    """A layer's K and V as the numbers that they stand for, every tie decided by a draw, or by its opposite (`way` -1)."""
    generator = torch.Generator().manual_seed(seed or 0)
    sides = []
    for kv_format, fields in ((cache.k_format(layer), cache.k_fields(layer)), (cache.v_format(layer), cache.v_fields(layer))):
        restored = kv_format.restored(cache.shape(layer).head_dim)
        if restored is None or seed is None:
            sides.append(kv_format.dequantize(fields, layer))
        else:
            sides.append(_decided(restored, fields, layer, generator, way))
    return as_numbers(cache, layer, sides[0], sides[1])


def as_numbers(cache: PagedKVCache, layer: int, k: Tensor, v: Tensor) -> PagedKVCache:
    """A layer's cache that holds these FP32 [num_blocks, Hkv, block_size, D] in place of what is packed."""
    plain, shape, turns = formats.get("fp32"), cache.shape(layer), cache.k_format(layer).turns(layer)
    pair, fields = (formats.by_stretches(turns) if turns else plain, plain), ({"data": k}, {"data": v})
    return PagedKVCache.over(pair, layer, fields, cache.kept(layer), shape.head_dim, shape.window, cache.ring(layer))


def _decided(by: Restored, fields: dict[str, Tensor], layer: int, generator: torch.Generator, way: int) -> Tensor:
    """Vectors [..., D] fp32 whose numbers were moved by FP32 noise before they were rounded, up or down as drawn.

    The scale is a vector's own: its noise moves all of them together. Sums with the matrix are each one's own.
    """
    codes = fields["codes"]

    def signs(*shape: int) -> Tensor:
        return way * (2.0 * torch.randint(2, shape, generator=generator) - 1)

    centroids = centroids_at(codes, by.centroids)
    scale = (centroids.square().sum(-1) + by.least).rsqrt() * fields["norm"]
    product = centroids * scale.unsqueeze(-1)
    product = product * (1 + bounds.BF16_TIE_NOISE * signs(*scale.shape, 1))
    rotated = product.to(torch.bfloat16).float() @ by.back(layer)
    noise = bounds.BF16_TIE_NOISE * rotated.abs().amax(-1, keepdim=True)
    return (rotated + noise * signs(*rotated.shape)).to(torch.bfloat16).float()
