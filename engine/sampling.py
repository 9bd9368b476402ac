"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probability reaches p.
        seed: of the first sequence; sequence i draws from `seed + i`, whatever else runs beside it.
    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be 0 or a positive number, not {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top-k must be 0 (all) or positive, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p must lie in (0, 1], not {self.top_p}")


class Sampler:
    """Draws the tokens of one sequence.

    Args:
        sampling: the settings.
        index: of the sequence among those generated together.
    """

    def __init__(self, sampling: Sampling, index: int = 0) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed + index)

    def next(self, logits: Tensor) -> int:
        """Draw from logits [vocab] fp32; the lowest id wins a tie when greedy."""
        if self._sampling.temperature == 0:
            # Not argmax, which on a GPU returns any of several equal ones.
            return int((logits == logits.amax()).nonzero()[0])
        logits = logits.cpu().double() / self._sampling.temperature
        order = logits.argsort(descending=True, stable=True)
        kept = torch.softmax(logits[order], dim=-1)
        if self._sampling.top_k:
            kept = kept[: self._sampling.top_k]
        # A token stays while the mass before it has not reached p; the first always stays.
        before = kept.cumsum(-1) - kept
        kept = kept[before < self._sampling.top_p * kept.sum()]
        return int(order[torch.multinomial(kept, 1, generator=self._generator)])
