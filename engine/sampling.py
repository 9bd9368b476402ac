"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError

_MOST_SEED = 2**62  # of the first sequence, so that the others' seeds fit in 64 bits too
_PENALTIES = (1e-3, 1e3)  # beyond, logits leave the range of fp32
_FIRST_SORTED, _GROWTH = 256, 16  # tokens sorted at first, and how many times more if all of them are kept


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probability reaches p.
        seed: of the first sequence, in 0 … 2**62; sequence i draws from `seed + i`, whatever else runs beside it.
        min_p: keep tokens at least p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: divides the positive logits of tokens in the prompt or text so far, and multiplies the negative
            ones; 1 changes nothing. In [0.001, 1000]. Applies at temperature 0 too.
    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be 0 or a positive number, not {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top-k must be 0 (all) or positive, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min-p must lie in [0, 1], not {self.min_p}")
        if not 0 <= self.seed <= _MOST_SEED:
            raise InputError(f"seed must lie in 0 … 2**62, not {self.seed}")
        low, high = _PENALTIES
        if not low <= self.repetition_penalty <= high:
            raise InputError(f"repetition penalty must lie in [{low:g}, {high:g}], not {self.repetition_penalty}")


class Sampler:
    """Draws the tokens of one sequence.

    Args:
        sampling: the settings.
        index: of the sequence among those generated together.
        prompt: its token ids, which a repetition penalty counts as said.
    """

    def __init__(self, sampling: Sampling, index: int = 0, prompt: Iterable[int] = ()) -> None:
        self._sampling = sampling
        self._said = set(prompt)
        self._generator = torch.Generator().manual_seed(sampling.seed + index)

    def next(self, logits: Tensor) -> int:
        """Draw from logits [vocab] fp32; the lowest id wins a tie when greedy."""
        logits = self._penalized(logits)
        if self._sampling.temperature == 0:
            # Not argmax, which on a GPU returns any of several equal ones.
            token = int((logits == logits.amax()).nonzero()[0])
        else:
            ids, weights = self._kept(logits)
            token = int(ids[torch.multinomial(weights, 1, generator=self._generator)])
        self._said.add(token)
        return token

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probability [vocab] fp64 with which `next` draws each token at a temperature above 0."""
        ids, weights = self._kept(self._penalized(logits))
        return torch.zeros(len(logits), dtype=torch.float64).scatter(0, ids, weights / weights.sum())

    def _penalized(self, logits: Tensor) -> Tensor:
        penalty = self._sampling.repetition_penalty
        if penalty == 1 or not self._said:
            return logits
        said = torch.tensor(sorted(self._said), device=logits.device)
        scores = logits[said]
        return logits.index_put((said,), torch.where(scores < 0, scores * penalty, scores / penalty))

    def _kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of the tokens that may be drawn, and their weights [n] fp64, which need not add up to 1; on the CPU.

        The filters keep the head of the sorted vocabulary, mostly few tokens, so only about as many are sorted.
        """
        sampling = self._sampling
        # The largest becomes 0, which stays finite however low the temperature.
        logits = (logits.double() - logits.amax()) / sampling.temperature
        # Exponentials and their sum on the CPU, whose rounding is one for all devices: a seed means one text.
        if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
            return torch.arange(len(logits)), logits.cpu().exp()
        total = logits.cpu().exp().sum()
        size = sampling.top_k or _FIRST_SORTED
        while True:
            order, kept = _head(logits, size)
            whole = len(order) == len(logits)
            mass = kept[: sampling.top_k].sum() if sampling.top_k else total
            kept = kept[: sampling.top_k] if sampling.top_k else kept
            # A token stays while the mass before it has not reached p; the first always stays.
            before = kept.cumsum(-1) - kept
            some = kept[before < sampling.top_p * mass]
            some = some[some >= sampling.min_p * some[0]]
            if whole or sampling.top_k or len(some) < len(kept):
                return order[: len(some)], some
            size *= _GROWTH


def _head(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Ids of the `size` largest logits [vocab], and of those equal to the last of them, and exp of them, descending.

    Of equal ones the lower id comes first. Both on the CPU.
    """
    if size < len(logits):
        ids = (logits >= logits.topk(size).values[-1]).nonzero()[:, 0]
        values = logits[ids].cpu()
    else:
        ids, values = torch.arange(len(logits)), logits.cpu()
    order = values.argsort(descending=True, stable=True)
    return ids.cpu()[order], values[order].exp()
