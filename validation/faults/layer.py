"""Faults of one layer that attends: its ops, what it stores, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks import haar_rotation
from haarkv.codebooks.haar import SEED
from haarkv.codebooks.learned import EIGHTHS
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.formats.learned import LearnedFormat
from haarkv.tq_ops.formats.rotated import Coordinates
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.validation.faults.base import Call, Fault, K, Layer, Table, V, Wrong, instead
from haarkv.validation.faults.model import rounded_positions, wrong_models
from haarkv.validation.faults.ops import ATTENTION, LINEAR, NORM, ROPE, STORE, SWIGLU, Spoil, keeping, other_block
from haarkv.validation.layers.parts import Snapshot, read_as

NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj")
PUBLISHED_FAULTS = (
    "a transposed rotation", "swapped nibbles", "K stored as V", "a slot off by one", "zero output", "random K codes",
    "another layer's rotation", "the first two of five Q heads corrupted", "K and V not written", "one NaN",
)  # fmt: skip
LONGEST = 262
"""Tokens of a prompt in which every fault of `long_faults` shows: positions of nine bits, and three blocks."""
_BITS = 4
LEARNED_KV = f"k=lr{_BITS},v=tq4"
"""Formats for faults in learned coordinates."""


def published_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Every published fault, in a layer from 1 on, for a cache in a format of 16 levels."""
    at, sequential = Layer(model, layer), _sequential(model.config.heads.head_dim)
    return [
        *_cache_faults(at, PUBLISHED_FAULTS),
        Fault("rotations seeded in sequence", 1, K, sequential),
        *at.projecting("an MLP left out", "down_proj", torch.zeros_like),
    ]


def common_bugs(model: DecoderModel, layer: int) -> list[Fault]:
    """Every other fault that a hundred tokens of two sequences show. Those of the model's config show in layer 0."""
    at = Layer(model, layer)
    cache_faults = _cache_faults(at, [name for name in (*ATTENTION, *STORE) if name not in PUBLISHED_FAULTS])
    return [*_norms(at), *_projections(at), *_everywhere(at), *cache_faults, *wrong_models(model, layer)]


def long_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Faults that a prompt of `LONGEST` tokens shows."""
    at = Layer(model, layer)
    return [
        rounded_positions(model),
        *(at.attending(f"{'KV'[side]}'s scales are read from the block before", other_block(side)) for side in (0, 1)),
    ]


# -- Ops -------------------------------------------------------------------------------------------------------------------
def _cache_faults(at: Layer, names: Sequence[str]) -> Iterator[Fault]:
    """Storing and attention. One of several KV heads needs several, dealing in turn several queries each."""
    heads = at.model.config.heads
    for name in names:
        if ("KV head" in name and heads.num_kv_heads == 1) or ("in turn" in name and heads.num_heads == heads.num_kv_heads):
            continue
        head = at.last_head if "the last KV head" in name else None
        if name in STORE:
            yield at.storing(name, *STORE[name], head)
        else:
            yield at.attending(name, ATTENTION[name], head)


def _norms(at: Layer) -> Iterator[Fault]:
    only = {"takes the mean away": ("input_norm",), "cut off, not rounded": ("input_norm", "post_norm")}
    for words, wrong in NORM.items():
        for name in only.get(words, NORMS):
            # K is normed again, so the length that this takes away shows in V.
            also = (V,) if (name, words) == ("input_norm", "cut off, not rounded") else ()
            yield from at.weighing(f"{name} {words}", name, wrong, also)


def _projections(at: Layer) -> Iterator[Fault]:
    # Where Q and K are normed, their length does not matter.
    free = tuple(name for name in PROJECTIONS if at.weight(f"{name[0]}_norm") is None)
    only = {
        " 1 % too large": (*free, "down_proj"),
        "'s result rounded to BF16": PROJECTIONS[1:3],
        "'s sums kept in BF16": ("o_proj",),
    }
    for words, wrong in LINEAR.items():
        for name in only.get(words, PROJECTIONS):
            yield from at.weighing(f"{name}{words}", name, wrong)
    k, v, heads = at.weight("k_proj"), at.weight("v_proj"), at.last_head + 1
    if k is not None and v is not None:
        swap_table = instead(
            "linear",
            lambda call: call.again(weight=v if call.weight is k else k),
            lambda call: call.weight is k or call.weight is v,
        )
        yield Fault("k_proj and v_proj exchanged", at.index, "k_proj", swap_table)
    if heads > 1:
        orders: dict[str, tuple[str, Spoil]] = {
            "k_proj: KV heads in another order": ("k_proj", lambda y: y.view(len(y), heads, -1).roll(1, 1).flatten(1)),
            "v_proj: KV heads in another order": ("v_proj", lambda y: y.view(len(y), heads, -1).roll(1, 1).flatten(1)),
            "V's heads and coordinates exchanged": ("v_proj", lambda y: y.view(len(y), -1, heads).mT.flatten(1)),
        }
        for name, (weight, spoil) in orders.items():
            yield from at.projecting(name, weight, spoil)


def _everywhere(at: Layer) -> Iterator[Fault]:
    """In every layer: RoPE of Q or of K, which differ by their heads, and the MLP's product."""
    heads = at.model.config.heads
    if heads.num_heads != heads.num_kv_heads:
        for letter, count in (("Q", heads.num_heads), ("K", heads.num_kv_heads)):
            for name, wrong in ROPE.items():
                table = instead("rope", wrong, lambda call, count=count: call.x.shape[1] == count)  # type: ignore[misc]
                yield Fault(f"{name}, of {letter}", 0, f"{letter.lower()}_rope", table)
    for name, wrong in SWIGLU.items():
        yield Fault(name, 0, "silu_mul", instead("silu_mul", wrong))


def _sequential(dim: int) -> Table:
    """One generator drew all layers' rotations in turn, so all but the first differ; the output stays right."""

    @cache
    def rotation_between(layer: int) -> Tensor:
        generator = torch.Generator().manual_seed(SEED)
        gaussian = [torch.randn(dim, dim, generator=generator) for _ in range(layer + 1)][-1]
        q, r = torch.linalg.qr(gaussian.double())
        rotation: Tensor = (q * torch.diag(r).sign()).to(torch.bfloat16).float()
        return rotation @ haar_rotation(layer, dim).float().T

    def attend(call: Call) -> Tensor:
        matrix = rotation_between(call.layer)
        out = call.again(q=(call.q.float() @ matrix).to(call.q.dtype)).float() @ matrix.T
        return out.to(call.q.dtype)

    def later(call: Call) -> bool:
        return bool(call.layer > 0)

    store = instead(
        "store_kv",
        lambda call: call.again(k=call.k @ rotation_between(call.layer), v=call.v @ rotation_between(call.layer)),
        later,
    )
    return {**store, **instead("paged_attention", attend, later)}


# -- Learned coordinates -----------------------------------------------------------------------------------------------------
def coordinate_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Faults in learned coordinates, in storing and reading, for a cache in `LEARNED_KV`."""
    heads, at = model.config.heads, Layer(model, layer)
    assert heads.num_kv_heads > 1, "heads can be exchanged where there are two"
    right, v = formats.parse(LEARNED_KV, calibration(model.config.num_layers, heads.num_kv_heads, heads.head_dim))
    assert isinstance(right, LearnedFormat), "its keys are learned"

    def storing(wrong: LearnedFormat) -> Wrong:
        def keep(call: Call) -> Snapshot:
            k = wrong.as_stored(call.k.transpose(0, 1), call.layer, call.batch.positions)
            return {"k": by_token(wrong.quantize(k, call.layer))}

        return keeping(keep)

    def reading(wrong: LearnedFormat) -> Wrong:
        return lambda call: call.again(cache=read_as(call.cache, call.layer, formats=(wrong, v)))

    wrong = {name: right.altered(change) for name, change in _COORDINATE_FAULTS.items()}
    return [
        *(at.storing(name, K, storing(distort)) for name, distort in wrong.items()),
        *(
            at.attending(f"{name} in attention", reading(distort))
            for name, distort in wrong.items()
            if name.startswith("two ")
        ),
        at.attending("rows transposed", reading(wrong["coordinates transposed"])),
    ]


def _swapped_eighths(right: Coordinates) -> Coordinates:
    """The first and the second: levels of 6 and 5 bits."""
    places = torch.arange(right.mean.shape[1]).view(EIGHTHS, -1)[[1, 0, *range(2, EIGHTHS)]].flatten()
    return replace(right, forward=right.forward[..., places], rows=right.rows[:, places])


_COORDINATE_FAULTS: dict[str, Callable[[Coordinates], Coordinates]] = {
    "two heads' matrices exchanged": lambda c: replace(c, forward=c.forward.roll(1, 0), rows=c.rows.roll(1, 0)),
    "the mean left out": lambda c: replace(c, mean=torch.zeros_like(c.mean)),
    "two eighths' coordinates swapped": _swapped_eighths,
    "coordinates transposed": lambda c: replace(c, forward=c.forward.mT.contiguous(), rows=c.rows.mT.contiguous()),
}
