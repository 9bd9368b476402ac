"""Faults to plant in the reference: published bugs and slips of the pen, each of which a validation must find where it is.

Here are what a fault is, the layer that it is put into, and the published ones. `slips`, `machine_faults`, `window_faults` and
`learned_faults` hold the others.
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
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.layers.parts import Stored, put, quantized

K, V, OUT = "store_kv.k", "store_kv.v", "attention_mlp"
PACKED = ("k", "v")


@dataclass(frozen=True)
class Asked:
    """What attention is given."""

    q: Tensor
    cache: PagedKVCache
    layer: int
    batch: Batch
    scale: float

    def again(self, **other: Any) -> Tensor:
        """What the reference answers where some of it is other."""
        return reference.paged_attention(*vars(replace(self, **other)).values())

    def by_head(self, **other: Any) -> tuple[Tensor, ...]:
        """The same, each KV head's part by itself."""
        return self.again(**other).chunk(self.cache.shape(self.layer).num_kv_heads, 1)


@dataclass(frozen=True)
class Given:
    """What `store_kv` is given."""

    k: Tensor
    v: Tensor
    cache: PagedKVCache
    layer: int
    batch: Batch

    def store(self, **other: Any) -> None:
        """Store as the reference does where some of it is other."""
        reference.store_kv(*vars(replace(self, **other)).values())

    def parts(self, k: Tensor | None = None, v: Tensor | None = None, rotated_as: int | None = None) -> Stored:
        """What every part would hold; of other K and V, or by another layer's rotation."""
        k, v = self.k if k is None else k, self.v if v is None else v
        return quantized(self.cache, self.layer, self.batch, k, v, rotated_as)


Table = Mapping[str, Callable[..., Any]]
Spoil = Callable[[Tensor], Tensor]
Attend = Callable[[Asked], Tensor]
Store = Callable[[Given], None]
Keep = Callable[[Given], Stored]
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
        self.batches_alike, self.decode_step, self.weights = executor.batches_alike, executor.decode_step, executor.weights
        self.blocks = executor.blocks

    def over(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None


DRIVES: Mapping[str, Callable[[Executor], Executor]] = {"ops": lambda executor: executor, "layers": WholeLayers}
"""How an executor can be driven: its ops seen one by one, or its layers alone."""


OF_DELTA = ("in_proj_z", "gated_delta", "delta_norm", "delta_gate", "out_proj")
"""Stages of a layer of Gated DeltaNet alone."""
_BEHIND = ("post_norm", "gate_proj", "up_proj", "silu_mul", "down_proj")
SEEN_AS = {
    K: ("input_norm", "k_proj", "k_norm", "k_rope", K),
    V: ("input_norm", "v_proj", V),
    OUT: ("q_proj", "q_norm", "q_rope", "paged_attention", "o_proj", *OF_DELTA, *_BEHIND),
    "conv_state": ("in_proj_qkv", "in_proj_qkvz", "conv_state"),
    "delta_state": ("in_proj_a", "in_proj_b", "in_proj_ba", "state_read", "convolution", "decay", "beta", "delta_state"),
    "head": ("final_norm", "forward"),
}  # fmt: skip
"""What may be wrong where layers can only be run whole, by the stage that shows it; any other stage shows itself."""


@dataclass(frozen=True)
class Fault:
    """One way of being wrong.

    Attributes:
        name: what is wrong, in words.
        layer: the first layer in which it shows; None for what is around them.
        stage: the op that is wrong, as a recorded op table shows it.
        ops: what replaces the reference's ops.
        model: what replaces the model, where its shapes or tables are wrong.
        head: the KV head that is wrong, if it is one.
        also: other stages that may be named where several are wrong.
        whole: as in `Mistaken`.
    """

    name: str
    layer: int | None
    stage: str
    ops: Table = field(default_factory=dict)
    model: DecoderModel | None = None
    head: int | None = None
    also: tuple[str, ...] = ()
    whole: Whole | None = None

    @property
    def seen_as(self) -> str:
        """The stage that shows it where only whole layers can be run."""
        return next((shown for shown, wrong in SEEN_AS.items() if self.stage in wrong), self.stage)

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
    return lambda given: {
        name: fields for name, fields in given.parts(*change(given.k, given.v)).items() if name.startswith(parts)
    }


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
        """A weight as it is stored; None where the family has none of that name."""
        named = self.model.weights.layers[self.index].named()
        return next((cast(Tensor, tensor) for field, _, tensor in named if field.split(".")[-1] == name), None)

    @property
    def rotation(self) -> Tensor:
        """[D, D] fp32."""
        return haar_rotation(self.index, self.model.config.heads.head_dim).float()

    @property
    def last_head(self) -> int:
        """The last KV head."""
        return self.model.config.heads.num_kv_heads - 1

    # -- What is wrong in this layer alone -------------------------------------------------------------------------------
    def instead(self, op: str, wrong: Attend | Store) -> Table:
        """`store_kv` or `paged_attention`, otherwise."""
        right, kind = getattr(reference, op), {"store_kv": Given, "paged_attention": Asked}[op]

        def run(*args: Any) -> Any:
            given: Any = kind(*args)
            return wrong(given) if given.layer == self.index else right(*args)

        return {op: run}

    def weighing(self, name: str, weight: str, wrong: Callable[..., Tensor], also: tuple[str, ...] = ()) -> list[Fault]:
        """`rms_norm` or `linear` by one weight is wrong; none where the family has no such weight."""
        op, faulty_weight = "rms_norm" if weight.endswith("norm") else "linear", self.weight(weight)
        right = getattr(reference, op)
        table = {op: lambda *given: (wrong if given[1] is faulty_weight else right)(*given)}
        return [] if faulty_weight is None else [Fault(name, self.index, weight, table, also=also)]

    def projecting(self, name: str, weight: str, spoil: Spoil) -> list[Fault]:
        """The result of `linear` by one weight is wrong; none where the family has no such weight."""
        return self.weighing(name, weight, lambda *given: spoil(reference.linear(*given)))

    def attending(self, name: str, attend: Attend, head: int | None = None) -> Fault:
        """Attention is wrong."""
        return Fault(name, self.index, "paged_attention", self.instead("paged_attention", attend), head=head)

    def storing(self, name: str, where: str, store: Store, head: int | None = None) -> Fault:
        """Storing is wrong."""
        return Fault(name, self.index, where, self.instead("store_kv", store), head=head)

    def keeping(self, name: str, where: str, keep: Keep, head: int | None = None) -> Fault:
        """Some parts of what is stored are wrong; of one head, if that is named."""

        def store(given: Given) -> None:
            kept = keep(given)
            given.store()
            put(given.cache, given.layer, given.batch, kept)

        return self.storing(name, where, store, head)


# -- Published ones --------------------------------------------------------------------------------------------------------
def planted(model: DecoderModel, layer: int) -> list[Fault]:
    """Every published fault there is, in one layer each, for a cache in a format of 16 levels.

    Args:
        model: which a faulty op recognises the layer by.
        layer: 1 or later; the one in which faults are planted, but for rotations in sequence, which begin in layer 1.
    """
    at, heads = Layer(model, layer), model.config.heads
    group = heads.num_heads // heads.num_kv_heads
    # Rotated as usual, this is x rotated by the transposed rotation.
    twice_back = at.rotation.T @ at.rotation.T

    def next_slot(given: Given) -> None:
        given.store(batch=replace(given.batch, slot_mapping=given.batch.slot_mapping + 1))

    return [
        at.keeping("a transposed rotation", K, other(lambda k, v: (k @ twice_back, v @ twice_back))),
        at.keeping("swapped nibbles", K, _codes(_swapped, "kv")),
        at.keeping("K stored as V", V, other(lambda k, _: (k, k))),
        at.storing("a slot off by one", "untouched_slots", next_slot),
        at.attending("zero output", lambda asked: torch.zeros_like(asked.q)),
        at.keeping("random K codes", K, _codes(_random, "k")),
        at.keeping("another layer's rotation", K, lambda given: given.parts(rotated_as=given.layer + 1)),
        Fault("rotations seeded in sequence", 1, K, _sequential(heads.head_dim)),
        at.attending("the first two of five Q heads corrupted", lambda asked: _first_two_heads(asked.again(), group)),
        at.storing("K and V not written", K, lambda _: None),
        at.attending("one NaN", lambda asked: _one_nan(asked.again())),
        *at.projecting("an MLP left out", "down_proj", torch.zeros_like),
    ]


def _codes(spoil: Callable[[Tensor, bool], Tensor], sides: str) -> Keep:
    """Codes of K or V spoilt, which is told whether each level has a byte of its own."""

    def keep(given: Given) -> Stored:
        stored, dim = given.parts(), given.k.shape[-1]
        return {
            side: stored[side] | {"codes": spoil(stored[side]["codes"], stored[side]["codes"].shape[-1] == dim)}
            for side in sides
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
