"""Runs the candidate on its own device, on copies, in a cache whose every slot is watched; and again, comparing bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from haarkv.executors.base import Executor, prefill, verify
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation.layers.forward import copy_argument, is_unchanged
from haarkv.validation.layers.parts import Snapshot, cache_parts, layer_tensors, load, put, stage_of, take
from haarkv.validation.layers.report import Verdict

if TYPE_CHECKING:
    from haarkv.validation.layers.forward import Forward

StrayWrites = dict[int, dict[str, list[str]]]
"""Places that changed and were not to be written, in words, by layer and part."""
CONFIRMING_RUNS, MOST_CONFIRMED = 8, 4
"""Further runs of a fault, to see whether it is the same each time; and faults of a validation that are run again."""
WITHIN_ROUNDING = "within rounding: sums that come in another order each time do so"
"""Detail of runs that differ and are right: still a finding, since no executor here claims to do that."""


@dataclass(frozen=True)
class Outcome:
    """A result on the host, all NaN if the executor refused its own values; and what is wrong whatever the numbers are."""

    result: Tensor
    problem: str = ""


@dataclass(frozen=True)
class Run:
    """What one run of a layer returned and stored."""

    outcome: Outcome
    stray_writes: StrayWrites
    new_fields: Snapshot


class CandidateRunner:
    """An executor that gets copies of all inputs, its cache, and a second one with what must stay where nothing is written.

    Args:
        like: shape and formats of the cache.
    """

    def __init__(self, executor: Executor, like: PagedKVCache) -> None:
        self.executor = executor
        self.cache, self._expected = (like.empty_like(executor.device) for _ in range(2))

    def load(self, layer: int, part_fields: Snapshot) -> None:
        """Set a layer's cache."""
        load(self.cache, layer, part_fields)
        load(self._expected, layer, part_fields)

    def put(self, layer: int, batch: Batch, part_fields: Snapshot) -> None:
        """Set the places of a batch's tokens, as poison for what is about to be written."""
        put(self.cache, layer, batch, part_fields)
        put(self._expected, layer, batch, part_fields)

    def run(self, hidden: Tensor, layer: int, bad: Snapshot, batch: Batch) -> Run:
        """Run one layer, hidden [T, hidden] in and out; `bad` is poison for the places of its tokens."""
        self.put(layer, batch, bad)
        span = range(layer, layer + 1)
        outcome = self._run(
            hidden, batch, lambda x, b: self.executor.layers(x, span, b, self.cache), hidden.dtype, hidden.shape
        )
        return Run(outcome, self.stray_writes(span, batch), take(self.cache, layer, batch))

    def forward(self, forward: Forward) -> Outcome:
        """Logits [N, vocab] of a whole forward."""
        logits = verify if forward.phase == "verify" else prefill
        shape = torch.Size((len(forward.logit_rows), self.executor.config.vocab_size))
        return self._run(
            forward.token_ids, forward.batch, lambda x, b: logits(self.executor, x, b, self.cache), torch.float32, shape
        )

    def _run(
        self, x: Tensor, batch: Batch, run: Callable[[Tensor, Batch], Tensor], dtype: torch.dtype, shape: torch.Size
    ) -> Outcome:
        x_copy, places = copy_argument(x, self.executor.device), copy_argument(batch, self.executor.device)
        nan_result = torch.full(shape, torch.nan, dtype=dtype)
        try:
            result = run(x_copy, places)
        except NonFiniteError as error:
            return Outcome(nan_result, str(error))
        if result.shape != shape or result.dtype != dtype:
            return Outcome(nan_result, f"returned {list(result.shape)} {result.dtype}, not {list(shape)} {dtype}")
        inputs_changed = not (is_unchanged(x, x_copy) and is_unchanged(batch, places))
        return Outcome(result.to("cpu", copy=True), "changed the inputs that it was given" if inputs_changed else "")

    def stray_writes(self, written_layers: range, batch: Batch) -> StrayWrites:
        """What changed since the last call, other than the places of a batch in layers that ran."""
        stray_writes: StrayWrites = {}
        for layer in range(len(self.cache.plan.layers)):
            at = batch if layer in written_layers else None
            parts, expected = cache_parts(self.cache, layer), layer_tensors(self._expected, layer)
            if all(torch.equal(x, expected[part.name][name]) for part in parts for name, x in part.fields.items()):
                continue
            places_by_part = {part.name: part.changes(expected[part.name], at) for part in parts}
            if any(places_by_part.values()):
                stray_writes[layer] = {name: places for name, places in places_by_part.items() if places}
            load(self._expected, layer, layer_tensors(self.cache, layer))
        return stray_writes


# -- Again ---------------------------------------------------------------------------------------------------------------
class Repeats:
    """Runs things again and compares bits: every layer `always` times, and faults."""

    def __init__(self, always: int) -> None:
        self._always, self._left = always, MOST_CONFIRMED

    def layer_deviation(self, run: Any, again: Callable[[], Any]) -> Verdict | None:
        """A layer that differs from itself, if layers run more than once."""
        return differing([run, *(again() for _ in range(self._always))])

    def confirm(self, run: Any, again: Callable[[], Any]) -> Verdict | None:
        """Run a fault again: the verdict that it differs from itself, or None."""
        if not self._left:
            return None
        self._left -= 1
        return differing([run, *(again() for _ in range(CONFIRMING_RUNS))])


def differing(runs: Sequence[Any], stage: str = "") -> Verdict | None:
    """The verdict on runs on the same inputs that differ, or None. Of layers it names the first stage that does."""
    run_bytes = [value_bytes(run) for run in runs]
    one, other = runs[0], next((run for run, bits in zip(runs, run_bytes, strict=True) if bits != run_bytes[0]), None)
    if other is None:
        return None
    if isinstance(one, Run):
        stage = _first_stage(one, other)
    count = len(runs) - Counter(run_bytes).most_common(1)[0][1]
    detail = f"differs from itself: {count} of {len(runs)} runs on the same inputs give something else than the others"
    return Verdict.violation(stage, detail, "unstable")


def _first_stage(one: Run, other: Run) -> str:
    """The first stage of a layer at which two runs differ."""
    for part, ours in one.new_fields.items():
        theirs = other.new_fields[part]
        for name in ours:
            if value_bytes(ours[name]) != value_bytes(theirs[name]):
                return stage_of(part, name)
    return "attention_mlp"


def value_bytes(value: Any) -> bytes:
    """All that a run returned, as bytes that are equal only if it is equal to the last bit."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    if isinstance(value, dict):
        return b"".join(str(key).encode() + value_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(value_bytes, value))
    return value_bytes(vars(value)) if hasattr(value, "__dataclass_fields__") else str(value).encode()
