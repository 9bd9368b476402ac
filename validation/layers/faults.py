"""Faults to plant in the reference: published bugs and slips of the pen, each of which a validation must find where it is.

Here are what a fault is, the layer that it is put into, and the published ones. `slips`, `machine_faults` and `window_faults`
hold the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache as memoised
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.codebooks import haar_rotation
from haarkv.codebooks.haar import SEED
from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.formats.learned import LearnedFormat
from haarkv.tq_ops.formats.made_up import calibration
from haarkv.tq_ops.formats.rotated import Coordinates
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.layers.parts import Stored, put, quantized, read_as

K, V, OUT = "store_kv.k", "store_kv.v", "attention_mlp"
PACKED = ("k", "v")
Table = Mapping[str, Callable[..., Any]]
Spoil = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, PagedKVCache, int, Batch, float], Tensor]
Keep = Callable[[Tensor, Tensor, PagedKVCache, int, Batch], Stored]
"""What a layer stores in place of what is right, by part; parts that it leaves out are right."""
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""K and V [T, Hkv, D] fp32 in place of the right ones."""
Whole = Callable[["Mistaken", Tensor, Batch, PagedKVCache], Tensor]
"""An executor's forward: hidden states [T, hidden]."""


class Mistaken(ReferenceExecutor):
    """The reference with a fault in it. It takes itself for an executor of the right model, as a faulty one does.

    Args:
        right: the model whose executor it says it is.
        whole: a forward in place of the reference's.
    Attributes:
        notes: what such a forward remembers of earlier ones.
    """

    def __init__(self, right: DecoderModel, model: DecoderModel, ops: OpTable, whole: Whole | None = None) -> None:
        super().__init__(model, ops)
        self.config, self.model, self.notes = right.config, model, dict[int, int]()
        self._whole = whole or ReferenceExecutor.forward

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        return self._whole(self, token_ids, batch, cache)


class WholeLayers:
    """An executor as a fused one: its layers run whole, nobody sees its ops."""

    ops = None

    def __init__(self, executor: Executor) -> None:
        self.name, self.config, self.device = executor.name, executor.config, executor.device
        self.description, self.simulated = f"{executor.description}, by whole layers", executor.simulated
        self.compiled, self.supports, self.layers = executor.compiled, executor.supports, executor.layers
        self.forward, self.head = executor.forward, executor.head
        self.batches_alike, self.weights = executor.batches_alike, executor.weights

    def over(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None


DRIVES: Mapping[str, Callable[[Executor], Executor]] = {"ops": lambda executor: executor, "layers": WholeLayers}
"""How an executor can be driven: its ops seen one by one, or its layers alone."""


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
        whole: as in `Mistaken`.
    """

    name: str
    layer: int | None
    stage: str
    seen_as: str
    ops: Table = field(default_factory=dict)
    model: DecoderModel | None = None
    head: int | None = None
    also: tuple[str, ...] = ()
    whole: Whole | None = None

    def table(self) -> OpTable:
        """The reference's op table with this fault in it."""
        return table_with(self.ops)

    def executor(self, model: DecoderModel, drive: str = "ops") -> Executor:
        """The reference of a model with this fault in it, driven as a key of `DRIVES` says."""
        return DRIVES[drive](Mistaken(model, self.model or model, self.table(), self.whole))

    def stages(self, drive: str) -> tuple[str, ...]:
        """The stages that may be named, the one that should be first."""
        return (self.stage if drive == "ops" else self.seen_as, *self.also)


def table_with(ops: Table) -> OpTable:
    """The reference's op table with some of its ops replaced."""
    return with_ops(cast(OpTable, reference), ops)


def other(change: Change, parts: str | tuple[str, ...] = PACKED) -> Keep:
    """Parts whose names begin so hold other K and V."""

    def keep(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> Stored:
        stored = quantized(cache, layer, batch, *change(k, v))
        return {name: fields for name, fields in stored.items() if name.startswith(parts)}

    return keep


def one_side(side: str, spoil: Spoil, head: int = 0) -> Change:
    """K or V otherwise, from one of its heads on."""

    def change(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pair = {"k": k.clone(), "v": v.clone()}
        pair[side][:, head:] = spoil(pair[side][:, head:])
        return pair["k"], pair["v"]

    return change


@dataclass(frozen=True)
class Layer:
    """The layer that faults are put into; weights by the last part of their field's name."""

    model: DecoderModel
    index: int

    def weight(self, name: str) -> Tensor | None:
        """A weight; None where the family has none of that name."""
        return next((t for f, t in self.model.weights.layers[self.index].items() if f.split(".")[-1] == name), None)

    @property
    def rotation(self) -> Tensor:
        """[D, D] fp32."""
        return haar_rotation(self.index, self.model.config.heads.head_dim).float()

    @property
    def last_head(self) -> int:
        """The last KV head."""
        return self.model.config.heads.num_kv_heads - 1

    # -- What is wrong in this layer alone -------------------------------------------------------------------------------
    def instead(self, op: str, wrong: Callable[..., Any]) -> Table:
        """`store_kv` or `paged_attention`, otherwise."""
        right, place = getattr(reference, op), {"store_kv": 3, "paged_attention": 2}[op]
        return {op: lambda *given: (wrong if given[place] == self.index else right)(*given)}

    def weighed(self, name: str, wrong: Callable[..., Tensor]) -> Table:
        """`rms_norm` or `linear` by one weight, otherwise."""
        op, own = "rms_norm" if name.endswith("norm") else "linear", self.weight(name)
        right = getattr(reference, op)
        return {op: lambda *given: (wrong if given[1] is own else right)(*given)}

    def projected(self, name: str, spoil: Spoil) -> Table:
        """`linear` by one weight, its result spoilt."""
        return self.weighed(name, lambda *given: spoil(reference.linear(*given)))

    def attending(self, name: str, attend: Attend, head: int | None = None) -> Fault:
        """Attention is wrong."""
        return Fault(name, self.index, "paged_attention", OUT, self.instead("paged_attention", attend), head=head)

    def storing(self, name: str, where: str, store: Callable[..., None], head: int | None = None) -> Fault:
        """Storing is wrong."""
        return Fault(name, self.index, where, where, self.instead("store_kv", store), head=head)

    def keeping(self, name: str, where: str, keep: Keep, head: int | None = None) -> Fault:
        """Some parts of what is stored are wrong; of one head, if that is named."""

        def store(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
            kept = keep(k, v, cache, layer, batch)
            reference.store_kv(k, v, cache, layer, batch)
            put(cache, layer, batch, kept)

        return self.storing(name, where, store, head)


# -- Published ones --------------------------------------------------------------------------------------------------------
def planted(model: DecoderModel, layer: int) -> list[Fault]:
    """Every published fault there is, in one layer each, for a cache in a format of 16 levels.

    Args:
        model: which a faulty op recognises the layer by.
        layer: 1 or later; the one in which faults are planted, but for rotations in sequence, which begin in layer 1.
    """
    at, dim, group = (
        Layer(model, layer),
        model.config.heads.head_dim,
        model.config.heads.num_heads // model.config.heads.num_kv_heads,
    )
    mlp_out, down = next((f, t) for f, _, t in model.weights.layers[layer].named() if f.endswith("down_proj"))
    attention = reference.paged_attention
    # Rotated as usual, this is x rotated by the transposed rotation.
    twice_back = at.rotation.T @ at.rotation.T

    def without_mlp(x: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros(len(x), len(weight)) if weight is down else reference.linear(x, weight)

    def next_slot(k: Tensor, v: Tensor, cache: PagedKVCache, index: int, batch: Batch) -> None:
        reference.store_kv(k, v, cache, index, replace(batch, slot_mapping=batch.slot_mapping + 1))

    def next_rotation(k: Tensor, v: Tensor, cache: PagedKVCache, index: int, batch: Batch) -> Stored:
        return quantized(cache, index, batch, k, v, rotated_as=index + 1)

    return [
        at.keeping("a transposed rotation", K, other(lambda k, v: (k @ twice_back, v @ twice_back))),
        at.keeping("swapped nibbles", K, _codes(_swapped, "kv")),
        at.keeping("K stored as V", V, other(lambda k, _: (k, k))),
        at.storing("a slot off by one", "untouched_slots", next_slot),
        at.attending("zero output", lambda q, *_: torch.zeros_like(q)),
        at.keeping("random K codes", K, _codes(_random, "k")),
        at.keeping("another layer's rotation", K, next_rotation),
        Fault("rotations seeded in sequence", 1, K, K, _sequential(dim)),
        at.attending("the first two of five Q heads corrupted", lambda *given: _first_two_heads(attention(*given), group)),
        at.storing("K and V not written", K, lambda *_: None),
        at.attending("one NaN", lambda *given: _one_nan(attention(*given))),
        Fault("an MLP left out", layer, mlp_out, OUT, {"linear": without_mlp}),
    ]


def _codes(spoil: Callable[[Tensor, bool], Tensor], sides: str) -> Keep:
    """Codes of K or V spoilt, which is told whether each level has a byte of its own."""

    def keep(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> Stored:
        stored = quantized(cache, layer, batch, k, v)
        codes = {side: stored[side]["codes"] for side in sides}
        return {
            side: stored[side] | {"codes": spoil(packed, packed.shape[-1] == k.shape[-1])} for side, packed in codes.items()
        }

    return keep


def _swapped(codes: Tensor, byte_a_level: bool) -> Tensor:
    """Nibbles hold the vector's halves; where a level has a byte of its own, these are exchanged."""
    return codes.roll(codes.shape[-1] // 2, -1) if byte_a_level else codes >> 4 | codes << 4


def _random(codes: Tensor, byte_a_level: bool) -> Tensor:
    drawn = torch.randint(256, codes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return drawn & 15 if byte_a_level else drawn


def _first_two_heads(out: Tensor, group: int) -> Tensor:
    grouped = out.view(out.shape[0], -1, group, out.shape[2]).clone()
    grouped[:, :, :2] = grouped[:, :, :2].flip(-1)
    return grouped.view(out.shape)


def _one_nan(out: Tensor) -> Tensor:
    out = out.clone()
    out[-1, 0, 0] = torch.nan
    return out


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

    def there(layer: int) -> Tensor:
        return torch.eye(dim) if layer == 0 else _sequential_rotation(layer, dim) @ haar_rotation(layer, dim).float().T

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        reference.store_kv(k @ there(layer), v @ there(layer), cache, layer, batch)

    def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        rotated = (q.float() @ there(layer)).to(q.dtype)
        out = reference.paged_attention(rotated, cache, layer, batch, softmax_scale)
        return (out.float() @ there(layer).T).to(q.dtype)

    return {"store_kv": store_kv, "paged_attention": paged_attention}


# -- Learned coordinates ---------------------------------------------------------------------------------------------------
_K_NIBBLES, _V_NIBBLES = 208, 128
LEARNED = f"k=lr{_K_NIBBLES},v=lr{_V_NIBBLES}"
"""Formats for faults in learned coordinates: K's have third levels, and V's as many levels as numbers."""


def planted_learned(model: DecoderModel, layer: int) -> list[Fault]:
    """Faults in what was learned, in one layer each, for a cache in `LEARNED` of made-up coordinates.

    Args:
        model, layer: as in `planted`.
    """
    assert model.config.heads.num_kv_heads > 1, "heads can be exchanged where there are two"
    config, at, exchanged = model.config, Layer(model, layer), "two heads' matrices exchanged"
    learned = calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
    k, v = learned.format("k", _K_NIBBLES), learned.format("v", _V_NIBBLES)

    def storing(name: str, side: str, wrong: LearnedFormat) -> Fault:
        def keep(k: Tensor, v: Tensor, _cache: PagedKVCache, index: int, _batch: Batch) -> Stored:
            return {side: by_token(wrong.quantize((k if side == "k" else v).transpose(0, 1), index))}

        return at.keeping(name, f"store_kv.{side}", keep)

    def reading(name: str, k_format: KVFormat, v_format: KVFormat) -> Fault:
        def attend(q: Tensor, cache: PagedKVCache, index: int, batch: Batch, scale: float) -> Tensor:
            return reference.paged_attention(q, read_as(cache, index, formats=(k_format, v_format)), index, batch, scale)

        return at.attending(name, attend)

    return [
        storing(exchanged, "k", k.altered(_exchanged)),
        storing("a mean left out of K", "k", k.altered(_without_mean)),
        storing("a mean left out of V", "v", v.altered(_without_mean)),
        storing("steps of the stages swapped", "k", k.altered(_swapped_steps)),
        storing("coordinates transposed", "v", v.altered(_transposed)),
        reading(f"{exchanged} in attention", k.altered(_exchanged), v),
        reading("V's mean left out of the output", k, v.altered(_without_mean)),
        reading("steps of the stages swapped in attention", k.altered(_swapped_steps), v),
        reading("V's rows transposed", k, v.altered(_transposed)),
    ]


def _exchanged(right: Coordinates) -> Coordinates:
    return replace(right, forward=right.forward.roll(1, 0), rows=right.rows.roll(1, 0))


def _without_mean(right: Coordinates) -> Coordinates:
    return replace(right, mean=torch.zeros_like(right.mean))


def _swapped_steps(right: Coordinates) -> Coordinates:
    first, second, third = right.steps
    factor = torch.tensor([1.0, third / second, second / third])[right.owners // right.mean.shape[1]]
    return replace(right, steps=(first, third, second), rows=right.rows * factor.unsqueeze(-1))


def _transposed(right: Coordinates) -> Coordinates:
    return replace(right, forward=right.forward.mT.contiguous(), rows=right.rows.mT.contiguous())


# -- No fault ----------------------------------------------------------------------------------------------------------------
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
