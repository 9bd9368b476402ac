"""Faults in what stays in BF16 beside the packed tokens: how it is stored, and who sees what of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from haarkv.codebooks import haar_rotation
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.kept import Kept
from haarkv.validation.layers.faults import Fault
from haarkv.validation.layers.parts import Stored, parts_of, put, quantized, take, token_rows
from haarkv.validation.layers.slips import OUT, Layer
from haarkv.validation.layers.window_edges import with_tail
from haarkv.validation.layers.window_merges import merge_faults

WINDOWED = KVSpec("tq4", tail=16, sink=4)
"""A plan for these faults. With prompts of more than 84 tokens the ring starts over."""
Read = Callable[[Kept, Batch, int], Tensor]
Seen = Callable[[Kept, Tensor, int], Tensor]


def window_faults(model: DecoderModel, layer: int, plan_has: tuple[bool, bool] = (True, True)) -> list[Fault]:
    """Every one, in one layer, for a cache whose K and V are both lossy.

    Args:
        layer: the one that they are put into.
        plan_has: a tail; sinks.
    """
    at, (tail, sinks) = Layer(model, layer), plan_has
    every = [*_stored(at), *_seen(at), *merge_faults(at)]
    needs = {"sinks": sinks, "ring": tail, "window": tail}
    return [fault for fault in every if all(has for word, has in needs.items() if word in fault.name)]


# -- Storing -------------------------------------------------------------------------------------------------------------
Keep = Callable[[Tensor, Tensor, PagedKVCache, int, Batch], Stored]


def _keeping(at: Layer, name: str, stage: str, keep: Keep, head: int | None = None, *also: str) -> Fault:
    """A layer that packs what is right and keeps in BF16 what `keep` makes; the parts that this leaves out are right."""

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        if layer != at.index:
            return reference.store_kv(k, v, cache, layer, batch)
        made = keep(k, v, cache, layer, batch)
        reference.store_kv(k, v, cache, layer, batch)
        return put(cache, layer, batch, made)

    return Fault(name, at.index, stage, stage, {"store_kv": store_kv}, head=head, also=also)


def _moving(at: Layer, name: str, stage: str, move: Callable[[Kept, Batch, Tensor], None]) -> Fault:
    """A layer that packs what is right, and writes its windows in another way."""

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        if layer != at.index:
            return reference.store_kv(k, v, cache, layer, batch)
        windows = [window for window in cache.kept(layer) if window]
        before = [window.vectors.clone() for window in windows]
        reference.store_kv(k, v, cache, layer, batch)
        for window, vectors in zip(windows, before, strict=True):
            window.vectors.copy_(vectors)
        for own, x in zip(cache.kept(layer), (k, v), strict=True):
            if own:
                move(own, batch, x.to(torch.bfloat16))
        return None

    return Fault(name, at.index, stage, stage, {"store_kv": store_kv})


def _kept(cache: PagedKVCache, layer: int, batch: Batch, k: Tensor, v: Tensor, which: str) -> Stored:
    """What the parts in BF16 of some name would hold of other K and V."""
    made = quantized(cache, layer, batch, k, v)
    return {name: of for name, of in made.items() if name.startswith(which)}


def _stored(at: Layer) -> Iterator[Fault]:
    rotation = haar_rotation(at.index, at.model.config.heads.head_dim).float()
    last = at.model.config.heads.num_kv_heads - 1

    def other(which: str, of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Keep:
        return lambda k, v, cache, layer, batch: _kept(cache, layer, batch, *of(k, v), which)

    def truncated(x: Tensor) -> Tensor:
        return (x.float().view(torch.int32) & -65536).view(torch.float32)

    def unwritten(which: str) -> Keep:
        def keep(_k: Tensor, _v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> Stored:
            return {name: of for name, of in take(cache, layer, batch).items() if name.startswith(which)}

        return keep

    def last_head_unwritten(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> Stored:
        made, stale = quantized(cache, layer, batch, k, v)["window.k"], take(cache, layer, batch)["window.k"]
        made["data"][:, last] = stale["data"][:, last]
        return {"window.k": made}

    def restored(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> Stored:
        packed = quantized(cache, layer, batch, k, v)
        pair = [
            part.kv_format.dequantize({n: t.transpose(0, 1) for n, t in packed[part.name].items()}, layer).transpose(0, 1)
            for part in parts_of(cache, layer)[:2]
        ]
        return _kept(cache, layer, batch, pair[0], pair[1], "window")

    k_in, v_in, k_sink = "window.k", "window.v", "sink.k"
    yield _keeping(at, "K of the window rotated", k_in, other(k_in, lambda k, v: (k @ rotation, v)))
    yield _keeping(at, "V of the window rotated", v_in, other(v_in, lambda k, v: (k, v @ rotation)))
    yield _keeping(at, "K and V of the window exchanged", k_in, other("window", lambda k, v: (v, k)))
    yield _keeping(at, "the window holds what was packed", k_in, restored)
    yield _keeping(at, "K of the window cut off, not rounded", k_in, other(k_in, lambda k, v: (truncated(k), v)))
    yield _keeping(at, "V of the window cut off, not rounded", v_in, other(v_in, lambda k, v: (k, truncated(v))))
    yield _keeping(at, "V of the window 0.4 % too long", v_in, other(v_in, lambda k, v: (k, v * (1 + 2.0**-8))))
    yield _keeping(at, "the window is not written", k_in, unwritten("window"))
    yield _keeping(at, "sinks are not written", k_sink, unwritten("sink"))
    yield _keeping(at, "K of the sinks rotated", k_sink, other(k_sink, lambda k, v: (k @ rotation, v)))
    if last:
        yield _keeping(at, "K of the window of the last KV head is not written", k_in, last_head_unwritten, last)
    yield _moving(at, "the ring runs over the sinks", k_in, _over_sinks)
    yield _moving(at, "each chunk's first tokens become sinks", "untouched_window", _sinks_of_chunks)
    yield _moving(at, "one of the sinks is not kept", k_sink, _one_sink_too_few)
    yield _moving(at, "the window of another sequence is written", "untouched_window", _to_another_row)
    yield _moving(at, "the ring is one place too short", "untouched_window", _short_ring)
    yield Fault("tokens are packed when they leave the window", at.index, "store_kv.k", "store_kv.k", {"store_kv": _late(at)})


def _write(window: Kept, batch: Batch, x: Tensor, rows: Tensor, places: Tensor) -> None:
    if window.ring:
        window.vectors[rows, :, places] = x
    first = batch.positions < window.sink
    window.vectors[rows[first], :, batch.positions[first]] = x[first]


def _over_sinks(window: Kept, batch: Batch, x: Tensor) -> None:
    _write(window, batch, x, token_rows(batch), batch.positions % max(window.ring, 1))


def _short_ring(window: Kept, batch: Batch, x: Tensor) -> None:
    _write(window, batch, x, token_rows(batch), window.sink + batch.positions % max(window.ring - 1, 1))


def _to_another_row(window: Kept, batch: Batch, x: Tensor) -> None:
    rows = (token_rows(batch) + 1) % len(window.vectors)
    _write(window, batch, x, rows, window.sink + batch.positions % max(window.ring, 1))


def _sinks_of_chunks(window: Kept, batch: Batch, x: Tensor) -> None:
    window.write(x, batch)
    starts = batch.query_start_loc.long()
    index = torch.arange(len(x)) - torch.repeat_interleave(starts[:-1], starts.diff())
    first = index < window.sink
    window.vectors[token_rows(batch)[first], :, index[first]] = x[first]


def _one_sink_too_few(window: Kept, batch: Batch, x: Tensor) -> None:
    gone = batch.positions == window.sink - 1
    kept = window.vectors[token_rows(batch)[gone], :, batch.positions[gone]]
    window.write(x, batch)
    window.vectors[token_rows(batch)[gone], :, batch.positions[gone]] = kept


def _late(at: Layer) -> Callable[..., None]:
    """What a token leaves behind in its slot until then is what was there before."""

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        window = next((window for window in cache.kept(layer) if window), None)
        before = take(cache, layer, batch)
        reference.store_kv(k, v, cache, layer, batch)
        if layer == at.index and window:
            last = torch.repeat_interleave(batch.seq_lens - 1, batch.query_start_loc.diff())
            inside = last - batch.positions < window.tail
            after = take(cache, layer, batch)
            for part in ("k", "v"):
                for name, tensor in after[part].items():
                    tensor[inside] = before[part][name][inside]
            put(cache, layer, batch, {part: after[part] for part in ("k", "v")})

    return store_kv


# -- Who sees what -------------------------------------------------------------------------------------------------------
class _Other(Kept):
    """A window that is read in another way."""

    def __init__(self, of: Kept, seen: Seen | None, read: Read | None) -> None:
        vars(self).update(vars(of))
        self._of, self._seen, self._read = of, seen, read

    def seen(self, positions: Tensor, tokens: int) -> Tensor:
        return self._seen(self._of, positions, tokens) if self._seen else self._of.seen(positions, tokens)

    def read(self, batch: Batch, tokens: int) -> Tensor:
        return self._read(self._of, batch, tokens) if self._read else self._of.read(batch, tokens)


def _looking(at: Layer, name: str, seen: Seen | None = None, read: Read | None = None, head: int | None = None) -> Fault:
    """Attention that sees its windows in another way; of one KV head, if it is one."""

    def attend(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        k, v = (_Other(window, seen, read) if window else None for window in cache.kept(layer))
        other = PagedKVCache.over(
            cache.plan.layers[layer], layer, (cache.k_fields(layer), cache.v_fields(layer)), (k, v), cache.head_dim
        )
        out = reference.paged_attention(q, other, layer, batch, softmax_scale)
        if head is None:
            return out
        whole = reference.paged_attention(q, cache, layer, batch, softmax_scale)
        group = q.shape[1] // cache.num_kv_heads
        whole[:, head * group : (head + 1) * group] = out[:, head * group : (head + 1) * group]
        return whole

    return Fault(name, at.index, "paged_attention", OUT, at.attended(attend), head=head)


def _seen(at: Layer) -> Iterator[Fault]:
    def longer(by: int) -> Seen:
        return lambda window, positions, tokens: with_tail(window, window.tail + by).seen(positions, tokens)

    def sinks_alone(window: Kept, positions: Tensor, tokens: int) -> Tensor:
        return (torch.arange(tokens) < window.sink).expand(*positions.shape, tokens)

    def no_sinks(window: Kept, positions: Tensor, tokens: int) -> Tensor:
        return window.seen(positions, tokens) & (torch.arange(tokens) >= positions.unsqueeze(-1) - window.tail + 1)

    def last_of_sinks(window: Kept, positions: Tensor, tokens: int) -> Tensor:
        gone = torch.arange(tokens) == window.sink - 1
        return window.seen(positions, tokens) & ~(gone & (positions.unsqueeze(-1) >= window.sink - 1 + window.tail))

    def one_place_on(window: Kept, batch: Batch, tokens: int) -> Tensor:
        rolled = _Other(window, None, None)
        ring = window.vectors[:, :, window.sink :].roll(-1, 2)
        rolled.vectors = torch.cat([window.vectors[:, :, : window.sink], ring], 2)
        return Kept.read(rolled, batch, tokens)

    def without_sinks(window: Kept, batch: Batch, tokens: int) -> Tensor:
        shifted = _Other(window, None, None)
        shifted.vectors = window.vectors.roll(window.sink, 2)
        return Kept.read(shifted, batch, tokens)

    def another_row(window: Kept, batch: Batch, tokens: int) -> Tensor:
        return window.read(replace(batch, rows=batch.rows.roll(1)), tokens)

    def by_number(window: Kept, batch: Batch, tokens: int) -> Tensor:
        return window.read(replace(batch, rows=torch.arange(len(batch.rows))), tokens)

    yield _looking(at, "the window is one token short", longer(-1))
    yield _looking(at, "the window is one token long", longer(1))
    yield _looking(at, "nothing of the window is seen", sinks_alone)
    yield _looking(at, "sinks are read packed", no_sinks)
    yield _looking(at, "the last of the sinks is read packed", last_of_sinks)
    yield _looking(at, "the ring is read one place on", None, one_place_on)
    yield _looking(at, "the ring is read as if sinks took no place", None, without_sinks)
    yield _looking(at, "the window of another sequence is read", None, another_row)
    yield _looking(at, "rows of the window are taken for numbers of sequences", None, by_number)
    if (last := at.model.config.heads.num_kv_heads - 1) > 0:
        yield _looking(at, "the window of the last KV head is one token short", longer(-1), head=last)
