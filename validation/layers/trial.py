"""Running an executor on trial: on its own device, on copies, in a cache whose every slot is watched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation.layers.record import copied, unchanged

Stored = dict[str, dict[str, Tensor]]
"""Fields of K and of V, by side ("k", "v") and field name."""


def new_cache_like(cache: PagedKVCache, device: torch.device) -> PagedKVCache:
    """An empty cache of the same shape on another device."""
    return PagedKVCache(
        cache.plan, num_kv_heads=cache.num_kv_heads, head_dim=cache.head_dim, num_blocks=cache.num_blocks,
        block_size=cache.block_size, device=device,
    )  # fmt: skip


def sides(cache: PagedKVCache, layer: int) -> Stored:
    """The very tensors of a layer."""
    return {"k": cache.k_fields(layer), "v": cache.v_fields(layer)}


def snapshot(cache: PagedKVCache, layer: int) -> Stored:
    """A copy of a layer, on the host."""
    return {
        side: {name: tensor.to("cpu", copy=True) for name, tensor in of.items()} for side, of in sides(cache, layer).items()
    }


def load(cache: PagedKVCache, layer: int, stored: Stored) -> None:
    """Put a snapshot, or another cache's `sides`, into a layer."""
    for side, of in sides(cache, layer).items():
        for name, tensor in of.items():
            tensor.copy_(stored[side][name])


def take(cache: PagedKVCache, layer: int, slots: Tensor) -> Stored:
    """Fields [T, Hkv, *] at slots [T], copied to the host."""
    block, offset = slots // cache.block_size, slots % cache.block_size
    return {
        side: {name: tensor.cpu()[block, :, offset] for name, tensor in of.items()} for side, of in sides(cache, layer).items()
    }


def put(cache: PagedKVCache, layer: int, slots: Tensor, stored: Stored) -> None:
    """Write fields [T, Hkv, *] at slots [T]."""
    slots = slots.to(cache.device)
    block, offset = slots // cache.block_size, slots % cache.block_size
    for side, of in sides(cache, layer).items():
        for name, tensor in of.items():
            tensor[block, :, offset] = stored[side][name].to(cache.device)


def poison(cache: PagedKVCache, layer: int, k: Tensor, v: Tensor) -> Stored:
    """What to find in a slot that was not written: valid K and V that are far from the right ones.

    Opposite vectors of another length fall into opposite levels. They are no garbage: a kernel that reads them before it has
    written is wrong, not out of bounds.
    """

    def opposite(kv_format: KVFormat, x: Tensor) -> dict[str, Tensor]:
        return by_token(kv_format.quantize(torch.where(x == 0, 1.0, -x / 3).transpose(0, 1), layer))

    return {"k": opposite(cache.k_format(layer), k), "v": opposite(cache.v_format(layer), v)}


@dataclass(frozen=True)
class Outcome:
    """What one run gave back.

    Attributes:
        result: on the host; NaN throughout if the executor refused its own values as not finite.
        problem: what is wrong with the run whatever the numbers are; empty if nothing is.
    """

    result: Tensor
    problem: str = ""


class Trial:
    """An executor with a cache of its own, and a second cache that says what must be found where nothing is written.

    Args:
        executor: gets copies of all inputs.
        like: shape and formats of the cache.
    """

    def __init__(self, executor: Executor, like: PagedKVCache) -> None:
        self.executor = executor
        self.cache = new_cache_like(like, executor.device)
        self._expected = new_cache_like(like, executor.device)

    def load(self, layer: int, stored: Stored) -> None:
        """Put a layer's K and V of earlier tokens there."""
        load(self.cache, layer, stored)
        load(self._expected, layer, stored)

    def put(self, layer: int, slots: Tensor, stored: Stored) -> None:
        """Put something into slots, as poison for those that are about to be written."""
        put(self.cache, layer, slots, stored)
        put(self._expected, layer, slots, stored)

    def layer(self, hidden: Tensor, layer: int, batch: Batch) -> Outcome:
        """One layer, hidden [T, hidden] in and out."""
        span = range(layer, layer + 1)
        return self._run(hidden, batch, lambda x, b: self.executor.layers(x, span, b, self.cache), hidden.dtype, hidden.shape)

    def forward(self, token_ids: Tensor, batch: Batch, phase: str, vocab_size: int) -> Outcome:
        """Logits [B, vocab] fp32 of a whole forward."""
        run = self.executor.prefill if phase == "prefill" else self.executor.decode
        shape = torch.Size((len(batch.seq_lens), vocab_size))
        return self._run(token_ids, batch, lambda x, b: run(x, b, self.cache), torch.float32, shape)

    def _run(self, x: Tensor, batch: Batch, run: object, dtype: torch.dtype, shape: torch.Size) -> Outcome:
        assert callable(run)
        given, places = copied(x, self.executor.device), copied(batch, self.executor.device)
        lost = torch.full(shape, torch.nan, dtype=dtype)
        try:
            result = run(given, places)
        except NonFiniteError as error:
            return Outcome(lost, str(error))
        if result.shape != shape or result.dtype != dtype:
            return Outcome(lost, f"returned {list(result.shape)} {result.dtype}, not {list(shape)} {dtype}")
        changed = not (unchanged(x, given) and unchanged(batch, places))
        return Outcome(result.to("cpu", copy=True), "changed the inputs that it was given" if changed else "")

    def strays(self, written: range, slots: Tensor) -> dict[int, list[int]]:
        """Slots that changed and were not to be written, by layer; what is there now is expected from here on.

        Args:
            written: layers that were run.
            slots: [T] that these layers were to write.
        """
        found: dict[int, list[int]] = {}
        for layer in range(self.cache.num_layers):
            now, before = sides(self.cache, layer), sides(self._expected, layer)
            if all(torch.equal(tensor, before[side][name]) for side, of in now.items() for name, tensor in of.items()):
                continue
            changed = torch.zeros(self.cache.num_slots, dtype=torch.bool, device=self.cache.device)
            for side, of in now.items():
                for name, tensor in of.items():
                    changed |= _rows(tensor, self.cache).ne(_rows(before[side][name], self.cache)).any(-1)
            if layer in written:
                changed[slots.to(changed.device)] = False
            if changed.any():
                found[layer] = changed.nonzero().flatten().tolist()
            load(self._expected, layer, now)
        return found


def _rows(tensor: Tensor, cache: PagedKVCache) -> Tensor:
    """A field's bytes by slot: uint8 [num_slots, n]. Bytes, since a NaN is not equal to itself."""
    flat = tensor.reshape(cache.num_blocks, cache.num_kv_heads, cache.block_size, -1).view(torch.uint8)
    return flat.transpose(1, 2).flatten(2).flatten(0, 1)
