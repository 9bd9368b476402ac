"""Is an executor of one mind with itself? The same run on the same inputs, again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.validation import bounds
from haarkv.validation.layers.forward import Forward
from haarkv.validation.layers.judge import Verdict
from haarkv.validation.layers.parts import Stored, parts_of, stage_of, take
from haarkv.validation.layers.trial import Outcome, Strays, Trial

WITHIN_ROUNDING = "within rounding: sums that come in another order each time do so"
"""Of runs that differ and are right. It is a finding all the same: no executor here says of itself that it does that."""


@dataclass(frozen=True)
class Run:
    """What one run of a layer left behind."""

    outcome: Outcome
    strays: Strays
    stored: Stored


def run_layer(trial: Trial, hidden: Tensor, index: int, bad: Stored, forward: Forward) -> Run:
    """Run a layer on hidden states [T, hidden]; its cache of earlier tokens is the trial's.

    Args:
        bad: what the places of its tokens hold before.
    """
    trial.put(index, forward.batch, bad)
    outcome = trial.layer(hidden, index, forward.batch)
    strays = trial.strays(range(index, index + 1), forward.batch)
    return Run(outcome, strays, take(trial.cache, index, forward.batch))


class Repeats:
    """Runs things again and counts the runs that differ.

    Args:
        always: runs of every layer beside the first. Without, only what is wrong is run again.
    """

    def __init__(self, always: int) -> None:
        self._always = always
        self._left = bounds.MOST_CONFIRMED

    def of_layer(self, run: Any, again: Callable[[], Any]) -> Verdict | None:
        """A layer that differs from itself; None if it does not, or if only faults are run again."""
        return self._differs(run, again, self._always) if self._always else None

    def confirmed(self, run: Any, again: Callable[[], Any]) -> Verdict | None:
        """What is wrong is run again: None if it is wrong every time in the same way, or if enough was run again."""
        if not self._left:
            return None
        self._left -= 1
        return self._differs(run, again, bounds.CONFIRMING_RUNS)

    def _differs(self, run: Any, again: Callable[[], Any], times: int) -> Verdict | None:
        every = [run, *(again() for _ in range(times))]
        counted = Counter(map(bits_of, every))
        if len(counted) == 1:
            return None
        other = next(one for one in every if bits_of(one) != bits_of(run))
        return unstable(_differing(run, other), times + 1 - counted.most_common(1)[0][1], times + 1)


@dataclass(frozen=True)
class FreeRun:
    """A layer's run in a forward left to itself: what it was given, what its tokens' places held, and what it left behind."""

    hidden: Tensor
    bad: Stored
    run: Run


def differing_layer(free: Trial, runs: list[FreeRun], forward: Forward) -> tuple[int, Verdict] | None:
    """The first layer that gives something else when a forward's layers are run again one by one on the same inputs."""
    for index, first in enumerate(runs):
        again = [run_layer(free, first.hidden, index, first.bad, forward) for _ in range(bounds.WHOLE_AGAIN)]
        every = [first.run, *again]
        counted = Counter(map(bits_of, every))
        if len(counted) > 1:
            other = next(run for run in again if bits_of(run) != bits_of(first.run))
            return index, unstable(_differing(first.run, other), len(every) - counted.most_common(1)[0][1], len(every))
    return None


def differing_forward(
    whole: Trial, outcome: Outcome, runs: list[FreeRun], forward: Forward, vocab_size: int
) -> tuple[int | None, Verdict] | None:
    """Whether a whole forward gives something else when it runs again, and the layer from which on it does.

    Where both K and V of a layer differ, what it was given does: the layer before is named.
    """
    batch, layers = forward.batch, range(len(runs))
    kept = [(outcome, [take(whole.cache, index, batch) for index in layers])]
    for _ in range(bounds.WHOLE_AGAIN):
        for index, of in enumerate(runs):
            whole.put(index, batch, of.bad)
        again = whole.forward(forward.token_ids, batch, forward.phase, vocab_size)
        whole.strays(layers, batch)
        kept.append((again, [take(whole.cache, index, batch) for index in layers]))
    counted = Counter(bits_of(list(run)) for run in kept)
    if len(counted) == 1:
        return None
    different = len(kept) - counted.most_common(1)[0][1]
    _, first = kept[0]
    other = next(stored for result, stored in kept if bits_of([result, stored]) != bits_of(list(kept[0])))
    for index in layers:
        parts = [
            part
            for part in parts_of(whole.cache, index)
            if bits_of(first[index][part.name]) != bits_of(other[index][part.name])
        ]
        if {part.side for part in parts} == {"k", "v"} and index:
            where = f" (K and V of layer {index} are the first to differ, so layer {index - 1} gave something else)"
            return index - 1, unstable("attention_mlp", different, len(kept), where)
        if parts:
            return index, unstable(parts[0].stage, different, len(kept))
    return None, unstable("forward", different, len(kept), " after the last K and V")


def _differing(one: Any, other: Any) -> str:
    """The first stage at which two runs of a layer differ; of an op, which its caller names, none."""
    if not isinstance(one, Run):
        return ""
    parts = [part for part in one.stored if bits_of(one.stored[part]) != bits_of(other.stored[part])]
    return stage_of(parts[0]) if parts else "attention_mlp"


def unstable(stage: str, different: int, runs: int, where: str = "") -> Verdict:
    """The verdict on what differs from itself."""
    detail = f"differs from itself{where}: {different} of {runs} runs on the same inputs give something else than the others"
    return Verdict(stage, "unstable", torch.inf, 0.0, detail)


def bits_of(value: Any) -> bytes:
    """Everything that a run gave back, as bytes that are equal where it is equal to the last bit."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    if isinstance(value, dict):
        return b"".join(str(key).encode() + bits_of(item) for key, item in value.items())
    if isinstance(value, list):
        return b"".join(map(bits_of, value))
    if hasattr(value, "__dataclass_fields__"):
        return bits_of(vars(value))
    return str(value).encode()
