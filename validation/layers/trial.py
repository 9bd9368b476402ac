"""Running an executor on trial: on its own device, on copies, in a cache whose every slot is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation.layers.parts import Part, Stored, load, new_cache_like, parts_of, put, tensors_of
from haarkv.validation.layers.record import copied, unchanged

Strays = dict[int, dict[str, list[str]]]
"""Places that changed and were not to be written: layer -> part -> which, in words."""


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

    def put(self, layer: int, batch: Batch, stored: Stored) -> None:
        """Put something where a batch's tokens go, as poison for what is about to be written."""
        put(self.cache, layer, batch, stored)
        put(self._expected, layer, batch, stored)

    def layer(self, hidden: Tensor, layer: int, batch: Batch) -> Outcome:
        """One layer, hidden [T, hidden] in and out."""
        span = range(layer, layer + 1)
        return self._run(hidden, batch, lambda x, b: self.executor.layers(x, span, b, self.cache), hidden.dtype, hidden.shape)

    def forward(self, token_ids: Tensor, batch: Batch, phase: str, vocab_size: int) -> Outcome:
        """Logits [N, vocab] fp32 of a whole forward: of a verify after every token, else after each sequence's last."""
        run: Callable[[Tensor, Batch, PagedKVCache], Tensor] = getattr(self.executor, phase)
        shape = torch.Size((len(token_ids if phase == "verify" else batch.seq_lens), vocab_size))
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

    def strays(self, written: range, batch: Batch) -> Strays:
        """What changed and was not to be written; what is there now is expected from here on.

        Args:
            written: layers that were run.
            batch: whose places these layers were to write.
        """
        found: Strays = {}
        for layer in range(self.cache.num_layers):
            pairs = list(zip(parts_of(self.cache, layer), parts_of(self._expected, layer), strict=True))
            if all(torch.equal(now.fields[name], before.fields[name]) for now, before in pairs for name in now.fields):
                continue
            changed = {now.name: _changed(now, before, batch if layer in written else None) for now, before in pairs}
            if any(changed.values()):
                found[layer] = {name: places for name, places in changed.items() if places}
            load(self._expected, layer, tensors_of(self.cache, layer))
        return found


def _changed(now: Part, before: Part, batch: Batch | None) -> list[str]:
    """Places of a part that changed, but for those of a batch's tokens."""
    changed = torch.stack([_bytes(now.fields[name]).ne(_bytes(before.fields[name])).any(-1) for name in now.fields]).any(0)
    if batch is not None:
        _, unit, offset = now.where(batch)
        changed[unit.to(changed.device), offset.to(changed.device)] = False
    return [now.words(int(place)) for place in changed.flatten().nonzero().flatten()]


def _bytes(tensor: Tensor) -> Tensor:
    """A field's bytes by place: uint8 [units, places, n]. Bytes, since a NaN is not equal to itself."""
    return tensor.reshape(*tensor.shape[:3], -1).contiguous().view(torch.uint8).transpose(1, 2).flatten(2)
