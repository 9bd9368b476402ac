"""Choose the next token from logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import upload

_MOST_SEED = 2**62  # of the first sequence, so that the others' seeds fit in 64 bits too
_FIRST_SORTED, _GROWTH = 256, 16  # tokens sorted at first, and how many times more if all of them are kept


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Filters in order: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probability reaches p.
        seed: in 0 … 2**62; sequence i draws from `seed + i`, independent of the batch.
        min_p: keep tokens at least p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: divides positive logits of tokens seen so far, multiplies negative ones; in [0.001, 1000], 1 is
            off. Applies at temperature 0 too.
    Raises:
        InputError: a value out of range, or no number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind, words = (Integral, "a whole number") if name in ("top_k", "seed") else (Real, "a number")
            if not isinstance(value, kind):
                raise InputError(f"{name.replace('_', '-')} must be {words}, not {value!r}")
        penalty = self.repetition_penalty  # beyond its range, logits leave that of fp32
        for right, name, rule, value in (
            (0 <= self.temperature < float("inf"), "temperature", "be 0 or a positive number", self.temperature),
            (self.top_k >= 0, "top-k", "be 0 (all) or positive", self.top_k),
            (0 < self.top_p <= 1, "top-p", "lie in (0, 1]", self.top_p),
            (0 <= self.min_p <= 1, "min-p", "lie in [0, 1]", self.min_p),
            (0 <= self.seed <= _MOST_SEED, "seed", "lie in 0 … 2**62", self.seed),
            (1e-3 <= penalty <= 1e3, "repetition penalty", "lie in [0.001, 1000]", penalty),
        ):
            if not right:
                raise InputError(f"{name} must {rule}, not {value}")


class SamplingSettings(TypedDict, total=False):
    """Some fields of `Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    repetition_penalty: float


def require_drawn(defaults: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Refuse filters in `request` that do nothing because decoding is greedy."""
    if "temperature" in request or defaults.get("temperature"):
        return
    neutral = Sampling()
    for name in ("top_k", "top_p", "min_p"):
        if name in request and request[name] != getattr(neutral, name):
            word = name.replace("_", "-")
            raise InputError(f"{word} chooses among tokens, and this model takes the likeliest; give a temperature as well")


class BatchSampler:
    """Draws the next tokens of several sequences on the logits' device, without waiting for a GPU.

    A token is drawn with one random number u in [0, 1): the first whose cumulative weight exceeds u of the total. The order is
    that of ids, or with a filter from the most likely token down, ties by lower id. Random numbers come from CPU generators,
    weights and sums are FP64: equal logits draw the same token on every device, but for u within about 1e-13 of a boundary.

    Args:
        prompts: token ids of each sequence, for the repetition penalty.
        unused_ids: vocabulary rows that are no tokens; never drawn.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Iterable[int]], unused_ids: Sequence[int] = ()) -> None:
        self._sampling, self._unused = sampling, torch.tensor(unused_ids, dtype=torch.int64)
        self._prompts = list(prompts)
        self._seen_tokens: Tensor | None = None
        self._generators = [torch.Generator().manual_seed(sampling.seed + number) for number in range(len(prompts))]

    @property
    def is_pure_greedy(self) -> bool:
        """Whether a token depends on its logits alone."""
        return self._sampling.temperature == 0 and self._sampling.repetition_penalty == 1

    def best(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """[n] int64, the likeliest tokens after logits [n, vocab] of `rows`, which are not counted as seen; without a penalty
        a sequence may have several. The lowest id wins a tie.
        """
        return _lowest_of_largest(self._penalize(self._at_hand(logits), rows))

    def next(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Draw one token for each sequence in `rows` (distinct).

        Args:
            logits: [n, vocab] fp32, finite.
        Returns:
            [n] int64 ids, on the logits' device if that is a GPU, else on the CPU.
        """
        logits = self._penalize(self._at_hand(logits), rows)
        if self._sampling.temperature == 0:
            tokens = _lowest_of_largest(logits)
        else:
            numbers = [torch.rand((), dtype=torch.float64, generator=self._generators[row]) for row in rows]
            tokens = self._draw_tokens(logits, upload(torch.stack(numbers), logits.device))
        if self._seen_tokens is not None:
            at = self._at(rows, logits)
            self._seen_tokens[at] = self._seen_tokens[at].scatter(1, tokens.unsqueeze(1), True)
        return tokens

    def _at_hand(self, logits: Tensor) -> Tensor:
        """Logits on a GPU or the CPU, -inf for unused ids."""
        logits = logits if logits.is_cuda else logits.cpu()
        if not len(self._unused):
            return logits
        self._unused = self._unused.to(logits.device)
        return logits.index_fill(1, self._unused, -torch.inf)

    def _at(self, rows: Sequence[int], logits: Tensor) -> Tensor | slice:
        return slice(None) if len(rows) == len(self._prompts) else upload(torch.tensor(rows), logits.device)

    def _penalize(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        penalty = self._sampling.repetition_penalty
        if penalty == 1:
            return logits
        if self._seen_tokens is None:
            mask = torch.zeros(len(self._prompts), logits.shape[1], dtype=torch.bool)
            for row, prompt in enumerate(self._prompts):
                mask[row, sorted(set(prompt))] = True
            self._seen_tokens = mask.to(logits.device)
        seen = self._seen_tokens[self._at(rows, logits)]
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def _draw_tokens(self, logits: Tensor, u: Tensor) -> Tensor:
        token_parts = []
        for part, number in zip(_parts(logits), _parts(u), strict=True):
            ids, weights = self._candidates(part)
            sums = weights.cumsum(-1)
            # u is 1 - 2**-53 at most, and u times the sum is less than the sum in FP64: so `place` is always a valid index.
            place = torch.searchsorted(sums, number.unsqueeze(1) * sums[:, -1:], right=True)
            token_parts.append(ids.gather(1, _last_with_weight(weights, place)).squeeze(1))
        return torch.cat(token_parts)

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [n, m] in drawing order, and weights [n, m] fp64, 0 if filtered.

        Filters keep few tokens, so the CPU sorts a growing part until one is dropped. A GPU would have to wait for that: it
        sorts all.
        """
        sampling, vocab = self._sampling, logits.shape[1]
        largest = logits.amax(-1, keepdim=True).double()

        def softmax_weights(values: Tensor) -> Tensor:
            # The largest becomes 0, which stays finite however low the temperature. In place: clearing fresh pages for each
            # step over a vocabulary takes longer than the arithmetic.
            return values.double().sub_(largest).div_(sampling.temperature).exp_()

        if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
            return torch.arange(vocab, device=logits.device).expand(logits.shape), softmax_weights(logits)
        total = None if sampling.top_k else softmax_weights(logits).sum(-1, keepdim=True)
        size = vocab if logits.is_cuda else sampling.top_k or _FIRST_SORTED
        while True:
            values, ids = _head(logits, size)
            if sampling.top_k:
                values, ids = values[:, : sampling.top_k], ids[:, : sampling.top_k]
            weights = self._filter(softmax_weights(values), total)
            if size >= vocab or sampling.top_k or not weights[:, -1].any():
                return ids, weights
            size *= _GROWTH

    def _filter(self, weights: Tensor, total: Tensor | None) -> Tensor:
        """Weights [n, m] in descending order, 0 where top-p or min-p drop; `total` [n, 1] is over all tokens."""
        # A token stays while the mass before it has not reached p; the first always stays.
        before = weights.cumsum(-1) - weights
        mass = weights.sum(-1, keepdim=True) if total is None else total
        keep = (before < self._sampling.top_p * mass) & (weights >= self._sampling.min_p * weights[:, :1])
        return torch.where(keep, weights, 0.0)


def _parts(batch: Tensor) -> tuple[Tensor, ...]:
    """A batch whole on a GPU, row by row on the CPU, where each row sorts as much as it needs."""
    return (batch,) if batch.is_cuda else torch.split(batch, 1)


def _last_with_weight(weights: Tensor, place: Tensor) -> Tensor:
    """[n, 1] int64, the last token at or before `place` with weight: a GPU's parallel sums may move `place` by rounding."""
    index = torch.arange(weights.shape[1], device=weights.device)
    return torch.where((weights > 0) & (index <= place), index, 0).amax(-1, keepdim=True)


def _lowest_of_largest(logits: Tensor) -> Tensor:
    """[n] int64, the first of the largest logits; argmax promises no order on a GPU."""
    if not logits.is_cuda:
        # NumPy promises the first, and wakes no threads that would spin into the next step.
        return torch.from_numpy(logits.numpy().argmax(-1))
    vocab = logits.shape[1]
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), ids, vocab - 1).amin(-1).long()


def _head(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest logits and ties with the last, descending, and their ids, both [n, m]; ties by lower id.

    All of the vocabulary if `size` is as large; else `logits` is one row on the CPU.
    """
    if size >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = (logits >= logits.topk(size).values[:, -1:]).nonzero()[:, 1].unsqueeze(0)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
