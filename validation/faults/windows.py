"""Faults in what stays in BF16 beside packed tokens: how it is stored, seen, and merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.layer import LayerKV
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.validation.faults.base import Call, Fault, K, Layer, Wrong
from haarkv.validation.faults.ops import (
    PACKED,
    Keep,
    Spoil,
    by_head,
    cut_off,
    keeping,
    last_positions,
    layer_rotation,
    one_side,
    other,
    quantized_parts,
)
from haarkv.validation.layers.parts import Snapshot, put, read_as, take, vector_parts

WINDOW_SPEC = KVSpec("tq4", tail=16, sink=4)
"""With prompts of more than 84 tokens its ring starts over."""
Read = Callable[[ResidualWindow, Batch, int], Tensor]
Visibility = Callable[[ResidualWindow, Tensor, int], Tensor]
Move = Callable[[ResidualWindow, Batch, Tensor], None]


def window_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Every one, in one layer, for a cache whose K and V are lossy, with a tail and sinks."""
    at = Layer(model, layer)
    return [
        *_storage_faults(at),
        *_placement_faults(at),
        *_visibility(at),
        *(at.attending(name, merging(merge)) for name, merge in _MERGES.items()),
    ]


# -- Storing -------------------------------------------------------------------------------------------------------------
def _storage_faults(at: Layer) -> Iterator[Fault]:
    """What is packed is right; other vectors are kept in BF16, or none."""
    last, k_in, v_in, k_sink = at.last_head, "window.k", "window.v", "sink.k"

    def rotated(x: Tensor) -> Tensor:
        return x @ at.rotation

    def unwritten(which: str) -> Keep:
        return lambda call: {name: fields for name, fields in _before(call).items() if name.startswith(which)}

    def last_head_unwritten(call: Call) -> Snapshot:
        key_fields = quantized_parts(call)[k_in]
        key_fields["data"][:, last] = _before(call)[k_in]["data"][:, last]
        return {k_in: key_fields}

    def dequantized_parts(call: Call) -> Snapshot:
        packed, parts = quantized_parts(call), vector_parts(call.cache, call.layer)[:2]
        pair = [part.kv_format.dequantize(by_token(packed[part.side]), call.layer).transpose(0, 1) for part in parts]
        return other(lambda *_: (pair[0], pair[1]), "window")(call)

    spoilt: dict[str, tuple[str, Spoil]] = {
        "K of the window rotated": (k_in, rotated), "V of the window rotated": (v_in, rotated),
        "K of the window cut off, not rounded": (k_in, cut_off), "V of the window cut off, not rounded": (v_in, cut_off),
        "V of the window 0.4 % too long": (v_in, lambda v: v * (1 + 2.0**-8)), "K of the sinks rotated": (k_sink, rotated),
    }  # fmt: skip
    for name, (part, spoil) in spoilt.items():
        yield at.storing(name, part, keeping(other(one_side(part[-1], spoil), part)))
    yield at.storing("K and V of the window exchanged", k_in, keeping(other(lambda k, v: (v, k), "window")))
    yield at.storing("the window holds what was packed", k_in, keeping(dequantized_parts))
    yield at.storing("the window is not written", k_in, keeping(unwritten("window")))
    yield at.storing("sinks are not written", k_sink, keeping(unwritten("sink")))
    if last:
        yield at.storing("K of the window of the last KV head is not written", k_in, keeping(last_head_unwritten), last)


def _placement_faults(at: Layer) -> Iterator[Fault]:
    """What is packed is right; vectors are kept in BF16 at other places."""

    def writing(move: Move) -> Wrong:
        def store(call: Call) -> None:
            windows = call.at.kv.windows
            pairs = [
                (residual_window, x.to(torch.bfloat16))
                for residual_window, x in zip(windows, (call.k, call.v), strict=True)
                if residual_window
            ]
            before = [window.vectors.clone() for window, _ in pairs]
            call.again()
            for (window, x), vectors in zip(pairs, before, strict=True):
                window.vectors.copy_(vectors)
                move(window, call.batch, x)

        return store

    def next_row(window: ResidualWindow, batch: Batch, x: Tensor) -> None:
        rows = (batch.of_tokens(batch.rows) + 1) % len(window.vectors)
        _write(window, batch, x, rows, window.sink, window.ring)

    moves: dict[str, tuple[str, Move]] = {
        "the ring runs over the sinks": ("window.k", lambda w, b, x: _write(w, b, x, b.of_tokens(b.rows), 0, w.ring)),
        "each chunk's first tokens become sinks": ("untouched_window", _sinks_of_chunks),
        "one of the sinks is not kept": ("sink.k", _one_sink_too_few),
        "the window of another sequence is written": ("untouched_window", next_row),
        "the ring is one place too short": (
            "untouched_window", lambda w, b, x: _write(w, b, x, b.of_tokens(b.rows), w.sink, w.ring - 1),
        ),
    }  # fmt: skip
    for name, (stage, move) in moves.items():
        yield at.storing(name, stage, writing(move))
    yield at.storing("tokens are packed when they leave the window", K, _late)


def _write(window: ResidualWindow, batch: Batch, x: Tensor, rows: Tensor, begin: int, ring: int) -> None:
    """Write a batch's tokens into a ring that begins at `begin`, and sinks where they belong."""
    if window.ring:
        window.vectors[rows, :, begin + batch.positions % max(ring, 1)] = x
    first = batch.positions < window.sink
    window.vectors[rows[first], :, batch.positions[first]] = x[first]


def _sinks_of_chunks(window: ResidualWindow, batch: Batch, x: Tensor) -> None:
    window.write(x, batch)
    index = torch.arange(len(x)) - batch.of_tokens(batch.query_start_loc[:-1].long())
    first = index < window.sink
    window.vectors[batch.of_tokens(batch.rows)[first], :, index[first]] = x[first]


def _one_sink_too_few(window: ResidualWindow, batch: Batch, x: Tensor) -> None:
    last_sink = batch.positions == window.sink - 1
    sink_vectors = window.vectors[batch.of_tokens(batch.rows)[last_sink], :, batch.positions[last_sink]]
    window.write(x, batch)
    window.vectors[batch.of_tokens(batch.rows)[last_sink], :, batch.positions[last_sink]] = sink_vectors


def _before(call: Call) -> Snapshot:
    """What the places of a batch's tokens hold."""
    return take(call.cache, call.layer, call.batch)


def _late(call: Call) -> None:
    """A token's slot keeps its old content until the token leaves the window."""
    window, before = next((window for window in call.at.kv.windows if window), None), _before(call)
    call.again()
    if window:
        inside, after = last_positions(call.batch) - call.batch.positions < window.tail, _before(call)
        for part in PACKED:
            for name, tensor in after[part].items():
                tensor[inside] = before[part][name][inside]
        put(call.cache, call.layer, call.batch, {part: after[part] for part in PACKED})


# -- Seeing ------------------------------------------------------------------------------------------------------------
class _Other(ResidualWindow):
    """A window that is read in another way."""

    def __init__(self, right: ResidualWindow, visibility: Visibility | None = None, read: Read | None = None) -> None:
        vars(self).update(vars(right))
        self._right, self._visibility, self._read = right, visibility, read

    def visible(self, positions: Tensor, tokens: int) -> Tensor:
        return self._visibility(self._right, positions, tokens) if self._visibility else self._right.visible(positions, tokens)

    def read(self, batch: Batch, tokens: int) -> Tensor:
        return self._read(self._right, batch, tokens) if self._read else self._right.read(batch, tokens)


def _looking(at: Layer, name: str, visibility: Visibility | None, read: Read | None = None, head: int | None = None) -> Fault:
    """Attention that sees its windows in another way; of one KV head, if one is given."""

    def attend(call: Call) -> Tensor:
        k, v = (_Other(window, visibility, read) if window else None for window in call.at.kv.windows)
        wrong, right = by_head(call, cache=read_as(call.cache, call.layer, windows=(k, v))), by_head(call)
        return torch.cat([wrong[one] if head in (None, one) else right[one] for one in range(len(right))], 1)

    return at.attending(name, attend, head)


def _visibility(at: Layer) -> Iterator[Fault]:
    def longer(by: int) -> Visibility:
        def seen(window: ResidualWindow, positions: Tensor, tokens: int) -> Tensor:
            other_window = copy(window)
            other_window.tail = max(window.tail + by, 0)
            return other_window.visible(positions, tokens)

        return seen

    def sinks_alone(window: ResidualWindow, positions: Tensor, tokens: int) -> Tensor:
        return (torch.arange(tokens) < window.sink).expand(*positions.shape, tokens)

    def no_sinks(window: ResidualWindow, positions: Tensor, tokens: int) -> Tensor:
        return window.visible(positions, tokens) & (torch.arange(tokens) >= positions.unsqueeze(-1) - window.tail + 1)

    def last_of_sinks(window: ResidualWindow, positions: Tensor, tokens: int) -> Tensor:
        last_sink = torch.arange(tokens) == window.sink - 1
        return window.visible(positions, tokens) & ~(last_sink & (positions.unsqueeze(-1) >= window.sink - 1 + window.tail))

    def place_reader(place: Callable[[ResidualWindow], Tensor]) -> Read:
        def read(window: ResidualWindow, batch: Batch, tokens: int) -> Tensor:
            moved_window = _Other(window)
            moved_window.vectors = place(window)
            return ResidualWindow.read(moved_window, batch, tokens)

        return read

    def one_place_on(window: ResidualWindow) -> Tensor:
        return torch.cat([window.vectors[:, :, : window.sink], window.vectors[:, :, window.sink :].roll(-1, 2)], 2)

    def row_reader(rows: Callable[[Tensor, int], Tensor]) -> Read:
        return lambda window, batch, tokens: window.read(replace(batch, rows=rows(batch.rows, len(window.vectors))), tokens)

    looks: dict[str, tuple[Visibility | None, Read | None]] = {
        "the window is one token short": (longer(-1), None),
        "the window is one token long": (longer(1), None),
        "nothing of the window is seen": (sinks_alone, None),
        "sinks are read packed": (no_sinks, None),
        "the last of the sinks is read packed": (last_of_sinks, None),
        "the ring is read one place on": (None, place_reader(one_place_on)),
        "the ring is read as if sinks took no place": (None, place_reader(lambda window: window.vectors.roll(window.sink, 2))),
        "the window of another sequence is read": (None, row_reader(lambda rows, count: (rows + 1) % count)),
        "the first row of the window is read for every sequence": (None, row_reader(lambda rows, _: torch.zeros_like(rows))),
    }
    for name, (visibility, read) in looks.items():
        yield _looking(at, name, visibility, read)
    if last := at.last_head:
        yield _looking(at, "the window of the last KV head is one token short", longer(-1), head=last)


# -- Sliding windows -----------------------------------------------------------------------------------------------------
SLIDING_TOKENS = 40
"""Length of the sliding window; its ring of two blocks starts over within a prompt of `layer.LONGEST` tokens."""


def with_sliding_window(model: DecoderModel, layer: int) -> DecoderModel:
    """The model with a sliding window in one layer."""
    layers = list(model.config.layers)
    layers[layer] = replace(layers[layer], mixer=replace(layers[layer].attention, window=SLIDING_TOKENS))
    return replace(model, config=replace(model.config, layers=tuple(layers)))


def sliding_faults(model: DecoderModel, layer: int) -> list[Fault]:
    """Every one, in a layer with a sliding window."""
    at = Layer(model, layer)

    def seeing(window: int | None) -> Wrong:
        def attend(call: Call) -> Tensor:
            cache, kv = read_as(call.cache, call.layer), call.at.kv
            cache.kv[call.layer] = replace(kv, shape=replace(kv.shape, window=window))
            return call.again(cache=cache)

        return attend

    def moved(move: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
        """`move`: block of a sequence and of its ring [T] -> another block of the ring."""

        def store(call: Call) -> None:
            size, ring, batch = call.at.kv.block_size, call.at.kv.ring, call.batch
            block, offset = batch.slot_mapping // size, batch.slot_mapping % size
            other_block = move(batch.positions // size, block % ring)
            call.again(batch=replace(batch, slot_mapping=((block // ring) * ring + other_block) * size + offset))

        return store

    seen = {"one token too many": SLIDING_TOKENS + 1, "one token too few": SLIDING_TOKENS - 1, "all that its ring holds": None}
    stored = {
        "a ring never starts over": lambda block, _: block.clamp(max=1),
        "a ring's blocks are exchanged": lambda _, in_ring: 1 - in_ring,
    }
    return [
        *(at.attending(f"a sliding window shows {name}", seeing(window)) for name, window in seen.items()),
        *(at.storing(name, "untouched_slots", moved(move)) for name, move in stored.items()),
    ]


# -- Packed tokens and those in BF16 become one softmax ------------------------------------------------------------------
@dataclass(frozen=True)
class Parts:
    """Attention of one sequence, split into packed tokens and those in BF16. S tokens; the queries of a KV head in a row.

    Attributes:
        packed, exact: [G*Q, S] bool, tokens seen packed; in BF16.
        oldest: [G*Q, S] bool, of `exact` the one that leaves the tail next, unless it is a sink.
        future: [G*Q, S] bool, tokens after a query; sinks: [S] bool.
        queries: [Hkv, G*Q, D], times the softmax scale.
        packed_keys, packed_values, exact_keys, exact_values: [Hkv, S, D].
        rotation: [D, D], of the layer.
    """

    packed: Tensor
    exact: Tensor
    oldest: Tensor
    future: Tensor
    sinks: Tensor
    queries: Tensor
    packed_keys: Tensor
    packed_values: Tensor
    exact_keys: Tensor
    exact_values: Tensor
    rotation: Tensor

    def scores(self) -> list[Tensor]:
        """Of each part; -inf of tokens that it does not see."""
        each = (self.packed, self.packed_keys), (self.exact, self.exact_keys)
        return [(self.queries @ keys.mT).masked_fill(~visible, -torch.inf) for visible, keys in each]

    def merge(self) -> Tensor:
        """One softmax over both."""
        return torch.softmax(torch.cat(self.scores(), -1), -1) @ torch.cat([self.packed_values, self.exact_values], 1)

    def sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of each part, against its own maximum: weighted values, and the sum of weights; 0 without a token."""
        weights = [torch.exp(x - x.amax(-1, keepdim=True).nan_to_num(neginf=0.0)) for x in self.scores()]
        out = [weights[0] @ self.packed_values, weights[1] @ self.exact_values]
        return out, [w.sum(-1, keepdim=True) for w in weights]


def _split(queries: Tensor, kv: LayerKV, one: Batch, rotation: Tensor) -> Parts:
    """Attention of one sequence, whose queries are [Hkv, G*Q, D]. V is seen as K is."""
    window, v_window = kv.windows
    assert window is not None
    assert v_window is not None
    length = int(one.seq_lens)
    position, tokens = one.positions.repeat(queries.shape[1] // len(one.positions)), torch.arange(length)
    k, v = (x[0, :, :length] for x in kv.read(one.block_table[:, : -(-length // kv.block_size)]))
    in_window, at = window.visible(position, length), position.unsqueeze(1)
    future, sinks = tokens > at, tokens < window.sink
    attendable = ~future if kv.shape.window is None else ~future & (tokens > at - kv.shape.window)
    oldest = (tokens == window.first_recent(at)) & ~sinks & attendable
    exact_k, exact_v = window.read(one, length)[0], v_window.read(one, length)[0]
    packed, exact = ~in_window & attendable, in_window & attendable
    return Parts(packed, exact, oldest, future, sinks, queries, k, v, exact_k, exact_v, rotation)


Merge = Callable[[Parts], Tensor]


def merging(merge: Merge) -> Wrong:
    """Attention in two parts, in FP32; with `Parts.merge` it is right."""

    def attend(call: Call) -> Tensor:
        kv, rotation = call.at.kv, layer_rotation(call)
        if None in kv.windows:
            return call.again()
        heads, out = kv.shape.num_kv_heads, []
        counts = call.batch.query_start_loc.diff().tolist()
        for q, one in zip(torch.split(call.q, counts), call.batch.sequences(), strict=True):
            by_head = q.float().view(len(q), heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
            queries = by_head.flatten(1, 2) * call.softmax_scale
            out.append(merge(_split(queries, kv, one, rotation)).view(by_head.shape).permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(out).to(call.q.dtype)

    return attend


def _without_merge(parts: Parts) -> Tensor:
    out, total = parts.sums()
    return (out[0] + out[1]) / (total[0] + total[1])


def _average_parts(parts: Parts) -> Tensor:
    out, total = parts.sums()
    packed, exact = (values / weights.clamp(min=1e-30) for values, weights in zip(out, total, strict=True))
    return torch.where(total[0] == 0, exact, torch.where(total[1] == 0, packed, (packed + exact) / 2))


def _merge_with(change: Callable[[Parts], dict[str, Tensor]]) -> Merge:
    return lambda parts: replace(parts, **change(parts)).merge()


_MERGES: dict[str, Merge] = {
    "tokens of the window are read packed as well": _merge_with(lambda p: {"packed": p.packed | p.exact}),
    "the oldest token of the window counts twice": _merge_with(lambda p: {"packed": p.packed | p.oldest}),
    "the token that leaves the window counts nowhere": _merge_with(lambda p: {"packed": p.packed & ~p.oldest.roll(-1, -1)}),
    "sinks are read packed as well": _merge_with(lambda p: {"packed": p.packed | p.exact & p.sinks}),
    "sinks count nowhere": _merge_with(lambda p: {"exact": p.exact & ~(p.sinks & p.packed.any(-1, keepdim=True))}),
    "packed tokens and the window are merged without the maximum": _without_merge,
    "packed tokens and the window are averaged": _average_parts,
    "the softmax scale is left out in the window": _merge_with(
        lambda p: {"exact_keys": p.exact_keys * len(p.rotation) ** 0.5}
    ),
    "a query sees tokens of the window that follow it": _merge_with(lambda p: {"exact": p.exact | p.future}),
    "Q is rotated for the window": _merge_with(lambda p: {"exact_keys": p.exact_keys @ p.rotation.T}),
    "V of the window is taken for rotated": _merge_with(lambda p: {"exact_values": p.exact_values @ p.rotation.T}),
}
