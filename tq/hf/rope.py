"""How the keys of a transformers model turn with their position: found in its buffers, and tried on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from haarkv.validation.planning.moments import Moments, Sums, over_positions

_TOKENS, _LATER = 16, 37
_NEAR = 0.02  # of the moments, for models in BF16


class Recorder(Protocol):
    """Runs a window, and adds up what attention is given."""

    def run(self, window: Sequence[int], begin: int = 0) -> None: ...

    def sums(self) -> Iterable[tuple[int, Sums]]: ...


def rope_of(model: PreTrainedModel, recorder: Callable[[], Recorder], window: Sequence[int]) -> list[Tensor] | None:
    """What a position is multiplied with to be an angle, [R/2], of each layer; None if some layer's keys turn otherwise.

    A few tokens are run at two places. Of the model's `inv_freq` buffers a layer's is the one that takes the moments of its
    keys from the first place to the second.
    """
    candidates = [buffer.detach().cpu() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not candidates:
        return None
    runs = []
    for begin in (0, _LATER):
        run = recorder()
        run.run(window[:_TOKENS], begin)
        runs.append([sums.k for _, sums in run.sums()])
    found = []
    for first, later in zip(*runs, strict=True):
        fitting = [inv_freq for inv_freq in candidates if _turns(first, later, inv_freq)]
        if not fitting:
            return None
        found.append(fitting[0])
    return found


def _turns(first: Moments, later: Moments, inv_freq: Tensor) -> bool:
    if inv_freq.ndim != 1 or 2 * len(inv_freq) > first.first.shape[-1]:
        return False
    turned = over_positions(first, inv_freq, torch.tensor([float(_LATER)]))
    return bool((turned.second - later.second).norm() < _NEAR * later.second.norm())
