"""Faults to plant in an op table: published bugs and slips of the pen, each of which a validation must find where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache as memoised
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.codebooks.haar import SEED
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.formats.learned import LearnedFormat
from haarkv.tq_ops.formats.made_up import calibration
from haarkv.tq_ops.formats.rotated import Coordinates
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.layers.parts import Stored, load, put, tensors_of

Table = Mapping[str, Callable[..., Any]]
Alter = Callable[[Tensor, Tensor, PagedKVCache, int], Stored]


@dataclass(frozen=True)
class Fault:
    """One way of being wrong.

    Attributes:
        name: what is wrong, in words.
        layer: the first layer in which it shows; None for what is around them.
        stage: the op that is wrong, as a recorded op table shows it.
        seen_as: the same where only whole layers can be run.
        ops: what replaces the reference's ops.
        model: what replaces the model, where its shapes or tables are wrong.
        head: the KV head that is wrong, if it is one.
        also: other stages that may be named where several are wrong.
        executor: what makes the faulty executor of the right model, the faulty one and its ops, where a forward is wrong.
    """

    name: str
    layer: int | None
    stage: str
    seen_as: str
    ops: Table
    model: DecoderModel | None = None
    head: int | None = None
    also: tuple[str, ...] = ()
    executor: Callable[[DecoderModel, DecoderModel, OpTable], Executor] | None = None

    def table(self) -> OpTable:
        """The reference's op table with this fault in it."""
        return table_with(self.ops)


def table_with(ops: Table) -> OpTable:
    """The reference's op table with some of its ops replaced."""
    return with_ops(cast(OpTable, reference), ops)


def planted(model: DecoderModel, layer: int) -> list[Fault]:
    """Every fault there is, in one layer each, for a cache in a format of 16 levels.

    Args:
        model: which a faulty op recognises the layer by.
        layer: 1 or later; the one in which faults are planted, but for rotations in sequence, which begin in layer 1.
    """
    dim, group = model.config.heads.head_dim, model.config.heads.num_heads // model.config.heads.num_kv_heads
    mlp_out, down = next((f, t) for f, _, t in model.weights.layers[layer].named() if f.endswith("down_proj"))

    def rotated_wrongly(x: Tensor, index: int) -> Tensor:
        # Rotated as usual, this is x rotated by the transposed rotation.
        back = haar_rotation(index, dim).float().T
        return x @ back @ back

    return [
        _storing(
            "a transposed rotation", layer, lambda k, v, c, i: _quantized(rotated_wrongly(k, i), rotated_wrongly(v, i), c, i)
        ),
        _storing("swapped nibbles", layer, _swapped_nibbles),
        _storing("K stored as V", layer, lambda k, _, c, i: _quantized(k, k, c, i), "store_kv.v"),
        Fault("a slot off by one", layer, "untouched_slots", "untouched_slots", {"store_kv": _off_by_one(layer)}),
        _attending("zero output", layer, torch.zeros_like),
        _storing("random K codes", layer, _random_codes),
        _storing("another layer's rotation", layer, lambda k, v, c, i: _quantized(k, v, c, i + 1)),
        Fault("rotations seeded in sequence", 1, "store_kv.k", "store_kv.k", _sequential(dim)),
        _attending("the first two of five Q heads corrupted", layer, lambda out: _first_two_heads(out, group)),
        _storing("K and V not written", layer, None),
        _attending("one NaN", layer, _one_nan),
        Fault("an MLP left out", layer, mlp_out, "attention_mlp", {"linear": _without(down)}),
    ]


_K_NIBBLES, _V_NIBBLES = 208, 128
LEARNED = f"k=lr{_K_NIBBLES},v=lr{_V_NIBBLES}"
"""Formats for faults in learned coordinates: K's have third levels, and V's as many levels as numbers."""


def planted_learned(model: DecoderModel, layer: int) -> list[Fault]:
    """Faults in what was learned, in one layer each, for a cache in `LEARNED` of made-up coordinates.

    Args:
        model, layer: as in `planted`.
    """
    assert model.config.heads.num_kv_heads > 1, "heads can be exchanged where there are two"
    (k, v), exchanged = _learned(model), "two heads' matrices exchanged"
    return [
        _storing(exchanged, layer, _with("k", k.altered(_exchanged))),
        _storing("a mean left out of K", layer, _with("k", k.altered(_without_mean))),
        _storing("a mean left out of V", layer, _with("v", v.altered(_without_mean)), "store_kv.v"),
        _storing("steps of the stages swapped", layer, _with("k", k.altered(_swapped_steps))),
        _storing("coordinates transposed", layer, _with("v", v.altered(_transposed)), "store_kv.v"),
        _reading(f"{exchanged} in attention", layer, k.altered(_exchanged), v),
        _reading("V's mean left out of the output", layer, k, v.altered(_without_mean)),
        _reading("steps of the stages swapped in attention", layer, k.altered(_swapped_steps), v),
        _reading("V's rows transposed", layer, k, v.altered(_transposed)),
    ]


def reordered() -> OpTable:
    """No fault: the reference's ops with their FP32 sums taken in another order, as an honest executor takes them."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        back = (x[..., :half].flip(-1), weight[:, :half].flip(-1)), (x[..., half:].flip(-1), weight[:, half:].flip(-1))
        return reference.linear(*back[0]) + reference.linear(*back[1])

    return table_with({"rms_norm": rms_norm, "linear": linear})


# -- Storing -------------------------------------------------------------------------------------------------------------
def _storing(name: str, at: int, alter: Alter | None, stage: str = "store_kv.k") -> Fault:
    """A layer that stores what `alter` makes of its K and V, or nothing at all."""

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        if layer != at:
            reference.store_kv(k, v, cache, layer, batch)
        elif alter is not None:
            put(cache, layer, batch, alter(k, v, cache, layer))

    return Fault(name, at, stage, stage, {"store_kv": store_kv})


def _quantized(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int) -> Stored:
    # Every layer's formats are the same; `layer` may be one that the model has not.
    pair = ((cache.k_format(0), k), (cache.v_format(0), v))
    return dict(zip("kv", (by_token(of.quantize(x.transpose(0, 1), layer)) for of, x in pair), strict=True))


def _swapped_nibbles(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int) -> Stored:
    """Nibbles hold the vector's halves; where a level has a byte of its own, these are exchanged."""

    def swapped(codes: Tensor) -> Tensor:
        return codes.roll(codes.shape[-1] // 2, -1) if codes.shape[-1] == k.shape[-1] else codes >> 4 | codes << 4

    return {side: of | {"codes": swapped(of["codes"])} for side, of in _quantized(k, v, cache, layer).items()}


def _random_codes(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int) -> Stored:
    stored = _quantized(k, v, cache, layer)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, stored["k"]["codes"].shape, dtype=torch.uint8, generator=generator)
    if codes.shape[-1] == k.shape[-1]:  # a byte a level
        codes &= 15
    return stored | {"k": stored["k"] | {"codes": codes}}


# -- Learned coordinates -----------------------------------------------------------------------------------------------
def _exchanged(of: Coordinates) -> Coordinates:
    return replace(of, forward=of.forward.roll(1, 0), rows=of.rows.roll(1, 0))


def _without_mean(of: Coordinates) -> Coordinates:
    return replace(of, mean=torch.zeros_like(of.mean))


def _swapped_steps(of: Coordinates) -> Coordinates:
    first, second, third = of.steps
    factor = torch.tensor([1.0, third / second, second / third])[of.owners // of.mean.shape[1]]
    return replace(of, steps=(first, third, second), rows=of.rows * factor.unsqueeze(-1))


def _transposed(of: Coordinates) -> Coordinates:
    return replace(of, forward=of.forward.mT.contiguous(), rows=of.rows.mT.contiguous())


def _learned(model: DecoderModel) -> tuple[LearnedFormat, LearnedFormat]:
    """K's and V's format of `LEARNED`, of the made-up coordinates of a model's shape."""
    config = model.config
    made = calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
    return made.format("k", _K_NIBBLES), made.format("v", _V_NIBBLES)


def _with(side: str, wrong: LearnedFormat) -> Alter:
    """Storing K or V by coordinates that are wrong."""

    def store(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int) -> Stored:
        x = k if side == "k" else v
        return _quantized(k, v, cache, layer) | {side: by_token(wrong.quantize(x.transpose(0, 1), layer))}

    return store


def _reading(name: str, at: int, k_format: KVFormat, v_format: KVFormat) -> Fault:
    """A layer whose attention takes K's or V's stored levels for others than they are."""

    def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        if layer != at:
            return reference.paged_attention(q, cache, layer, batch, softmax_scale)
        wrong = PagedKVCache(
            KVPlan.uniform(k_format, v_format, cache.num_layers), KVShape(cache.num_kv_heads, cache.head_dim),
            num_blocks=cache.num_blocks, block_size=cache.block_size, device=cache.device,
        )  # fmt: skip
        load(wrong, layer, tensors_of(cache, layer))
        return reference.paged_attention(q, wrong, layer, batch, softmax_scale)

    return Fault(name, at, "paged_attention", "attention_mlp", {"paged_attention": paged_attention})


def _off_by_one(at: int) -> Callable[..., None]:
    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        reference.store_kv(k, v, cache, layer, replace(batch, slot_mapping=batch.slot_mapping + (layer == at)))

    return store_kv


# -- Attention and the rest ------------------------------------------------------------------------------------------------
def _attending(name: str, at: int, spoil: Callable[[Tensor], Tensor]) -> Fault:
    """A layer whose attention [T, Hq, D] is spoilt."""

    def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        out = reference.paged_attention(q, cache, layer, batch, softmax_scale)
        return spoil(out) if layer == at else out

    return Fault(name, at, "paged_attention", "attention_mlp", {"paged_attention": paged_attention})


def _first_two_heads(out: Tensor, group: int) -> Tensor:
    grouped = out.view(out.shape[0], -1, group, out.shape[2]).clone()
    grouped[:, :, :2] = grouped[:, :, :2].flip(-1)
    return grouped.view(out.shape)


def _one_nan(out: Tensor) -> Tensor:
    out = out.clone()
    out[-1, 0, 0] = torch.nan
    return out


def _without(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def linear(x: Tensor, given: Tensor) -> Tensor:
        return torch.zeros(len(x), len(given)) if given is weight else reference.linear(x, given)

    return linear


@memoised
def _sequential_rotation(layer: int, dim: int) -> Tensor:
    """Rotation [D, D] fp32 of a layer if one generator draws all layers' in turn; the first is the right one."""
    if layer == 0:
        return haar_rotation(0, dim).float()
    generator = torch.Generator().manual_seed(SEED)
    gaussian = [torch.randn(dim, dim, generator=generator) for _ in range(layer + 1)][-1]
    q, r = torch.linalg.qr(gaussian.double())
    rotation: Tensor = (q * torch.diag(r).sign()).to(torch.bfloat16).float()
    return rotation


def _sequential(dim: int) -> Table:
    """Every layer but the first rotates by another matrix, on the way in and on the way out: the output stays right."""

    def there(x: Tensor, layer: int) -> Tensor:
        return x if layer == 0 else x.float() @ _sequential_rotation(layer, dim) @ haar_rotation(layer, dim).float().T

    def back(x: Tensor, layer: int) -> Tensor:
        return x if layer == 0 else x.float() @ haar_rotation(layer, dim).float() @ _sequential_rotation(layer, dim).T

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        reference.store_kv(there(k, layer), there(v, layer), cache, layer, batch)

    def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        rotated = there(q, layer).to(q.dtype)
        return back(reference.paged_attention(rotated, cache, layer, batch, softmax_scale), layer).to(q.dtype)

    return {"store_kv": store_kv, "paged_attention": paged_attention}
