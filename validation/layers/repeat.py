"""Is an executor of one mind with itself? The same run on the same inputs, again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from haarkv.validation import bounds
from haarkv.validation.layers.judge import Verdict


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
        counted = Counter([bits_of(run), *(bits_of(again()) for _ in range(times))])
        return unstable("", times + 1 - counted.most_common(1)[0][1], times + 1) if len(counted) > 1 else None


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
    if hasattr(value, "__dataclass_fields__"):
        return bits_of(vars(value))
    return str(value).encode()
