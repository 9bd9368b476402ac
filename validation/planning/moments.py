"""What weights are learned or quantised by: second moments of queries and keys, and mean squares of matrices' inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.engine.plans import SINKS, TAIL
from haarkv.engine.session import Session
from haarkv.models.weights import TensorNames
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.stretches import STRETCH, RopeShift
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Weight

_TINY = 1e-300
_BY_ATTENTION = 0.9
"""Share of a key's weight that attention decides; the rest is the same for all, so that rare keys stay possible."""


@dataclass
class Moments:
    """Weighted sums over the vectors x of one side of a layer, float64: of weights [H], w x [H, D] and w x x^T [H, D, D]."""

    weight: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def empty(cls, heads: int, dim: int) -> Moments:
        shapes = ((heads,), (heads, dim), (heads, dim, dim))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, x: Tensor, weight: Tensor | None = None) -> None:
        """Add vectors [H, n, D] float64 with weights [H, n], each 1 unless given."""
        weight = torch.ones(x.shape[:2], dtype=torch.float64) if weight is None else weight
        weighted_x = x * weight.unsqueeze(-1)
        self.weight += weight.sum(1)
        self.first += weighted_x.sum(1)
        self.second += weighted_x.mT @ x

    @property
    def mean(self) -> Tensor:
        """[H, D]; zeros of a head without weight."""
        return self.first / self.weight.clamp(min=_TINY).unsqueeze(-1)

    def spread(self, mean: Tensor) -> Tensor:
        """E[(x - mean) (x - mean)^T], [H, D, D], about a mean [H, D] that may be another text's."""
        outer = self.mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return _second(self) - outer - outer.mT + mean.unsqueeze(-1) * mean.unsqueeze(-2)


def over_positions(moments: Moments, inv_freq: Tensor, shifts: Tensor) -> Moments:
    """The moments that vectors after RoPE would have, had their text also stood at other places of a context.

    If the text begins `shift` tokens later, RoPE turns each pair (x_i, x_{i + D/2}) by shift * inv_freq_i more. With
    z = x_i + 1j * x_{i + D/2} a turn is a factor, and the moments' mean over all turns is a product with the mean factor.

    Args:
        inv_freq: [R/2]; the first R numbers of a vector are turned.
        shifts: [n], in tokens.
    """
    half, inv_freq = len(inv_freq), inv_freq.double()
    angles = shifts.double().unsqueeze(1) * inv_freq
    turns = torch.polar(torch.ones_like(angles), angles)  # [n, R/2]
    mean, relative_turn, joint_turn = turns.mean(0), turns.mT @ turns.conj() / len(turns), turns.mT @ turns / len(turns)
    first, second = moments.first.clone(), moments.second.clone()
    a, b, rest = slice(0, half), slice(half, 2 * half), slice(2 * half, None)
    z = torch.complex(first[:, a], first[:, b]) * mean
    first[:, a], first[:, b] = z.real, z.imag
    # E[z z^H] and E[z z^T]
    p = torch.complex(second[:, a, a] + second[:, b, b], second[:, b, a] - second[:, a, b]) * relative_turn
    q = torch.complex(second[:, a, a] - second[:, b, b], second[:, a, b] + second[:, b, a]) * joint_turn
    second_moment = second.clone()
    second_moment[:, a, a], second_moment[:, b, b] = (p + q).real / 2, (p - q).real / 2
    second_moment[:, b, a], second_moment[:, a, b] = (q + p).imag / 2, (q - p).imag / 2
    # With what is not turned.
    z = torch.complex(second[:, a, rest], second[:, b, rest]) * mean.unsqueeze(1)
    second_moment[:, a, rest], second_moment[:, b, rest] = z.real, z.imag
    second_moment[:, rest, a], second_moment[:, rest, b] = z.real.mT, z.imag.mT
    return Moments(moments.weight, first, second_moment)


class AttentionVectors:
    """Keys and queries of one window in one layer, as the cache and attention got them."""

    def __init__(self) -> None:
        self._k: list[Tensor] = []
        self._q: list[Tensor] = []

    def add_kv(self, k: Tensor, v: Tensor) -> None:
        self._k.append(k.to("cpu", torch.float64).transpose(0, 1))

    def add_q(self, q: Tensor) -> None:
        """Queries [T, Hq, D]."""
        self._q.append(q.to("cpu", torch.float64).transpose(0, 1))

    def first(self, tokens: int) -> AttentionVectors:
        """Those of the first tokens."""
        vectors = AttentionVectors()
        vectors._k, vectors._q = [torch.cat(self._k, 1)[:, :tokens]], [torch.cat(self._q, 1)[:, :tokens]]
        return vectors

    @property
    def tokens(self) -> int:
        return sum(k.shape[1] for k in self._k)

    def stretch_vectors(self, turns: RopeShift | None) -> tuple[Tensor, Tensor]:
        """Keys [H, T, D] float64 as their stretches store them, and queries [H, n, D] turned back by their own stretch.
        Queries that share a KV head follow each other. Without `turns`, both are as they stand.
        """
        keys, queries = torch.cat(self._k, 1), torch.cat(self._q, 1)
        if turns and keys.shape[1] > STRETCH:
            places = torch.arange(keys.shape[1])
            keys, queries = (turns.undo(x, places).double() for x in (keys, queries))
        return keys, queries.reshape(len(keys), -1, queries.shape[-1])

    def key_weights(self, scale: float) -> Tensor:
        """What errors of keys count, [H, T] float64 with mean 1: mostly by what attention gives to each in all.

        Attention to the newest `TAIL` tokens of a query and to the first `SINKS` of the text, which caches store in BF16, does
        not count.
        """
        keys, queries = torch.cat(self._k, 1).float(), torch.cat(self._q, 1).float()
        heads, tokens, dim = keys.shape
        sees, received = torch.ones(tokens, tokens, dtype=torch.bool).tril(), torch.zeros(heads, tokens, dtype=torch.float64)
        for head, group in enumerate(queries.view(heads, -1, tokens, dim)):
            for q in group:
                attention = (q @ keys[head].T).mul_(scale).masked_fill_(~sees, -math.inf).softmax(-1)
                received[head] += attention.tril_(-TAIL).sum(0)
        received[:, :SINKS] = 0
        mean, equal = received.mean(1, keepdim=True), torch.ones_like(received)
        by_attention = received / mean.clamp(min=_TINY)
        return torch.where(mean > 0, torch.lerp(equal, by_attention, _BY_ATTENTION), equal)


class Sums:
    """What one layer's keys are learned from, added up window by window.

    Each key counts by what attention reads of it as it is stored (`AttentionVectors.key_weights`): a blank that serves as a
    sink costs more than a hundred keys that no query looks at.

    Args:
        scale: of logits before the softmax; 1 / sqrt(D) unless given.
    Attributes:
        q, k: moments of queries and of keys.
    """

    def __init__(self, heads: int, dim: int, scale: float | None = None) -> None:
        self.tokens, self._scale = 0, dim**-0.5 if scale is None else scale
        self.q, self.k = (Moments.empty(heads, dim) for _ in range(2))

    def add(self, window: AttentionVectors, turns: RopeShift | None = None, context: int = STRETCH) -> None:
        """Add a window, as if its text had stood at every place of a stretch.

        A shorter window is laid end to end as often as fills it. Of a longer one every stretch counts as the first, its
        queries too: most of what they look for lies near. Without `turns` keys and queries are taken where they stand.
        """
        keys, queries = window.stretch_vectors(turns)
        q, k = (Moments.empty(*self.q.first.shape) for _ in range(2))
        q.add(queries)
        k.add(keys, window.key_weights(self._scale))
        for sums, window_moments in ((self.q, q), (self.k, k)):
            shifts = _shifts(window.tokens, min(context, STRETCH))
            shifted_moments = (
                window_moments if turns is None else over_positions(window_moments, torch.tensor(turns.inv_freq), shifts)
            )
            sums.weight += shifted_moments.weight
            sums.first += shifted_moments.first
            sums.second += shifted_moments.second
        self.tokens += window.tokens

    @property
    def metric(self) -> Tensor:
        """E[q q^T], [H, D, D] float64: what an error of a key costs in the squared error of its logits."""
        return _second(self.q)

    def spread(self, mean: Tensor) -> Tensor:
        """Of the keys about a mean [H, D] that may be another text's, [H, D, D]."""
        return self.k.spread(mean)


def _second(moments: Moments) -> Tensor:
    return moments.second / moments.weight.clamp(min=_TINY)[:, None, None]


def _shifts(tokens: int, context: int) -> Tensor:
    return torch.linspace(0, max(0, context - tokens), max(1, math.ceil(context / tokens)), dtype=torch.float64)


# -- Of any matrix's inputs ----------------------------------------------------------------------------------------------
_HEAD_TOKENS = 32
"""Tokens of a window whose logits are computed, for the head's inputs."""


def importance(
    session: Session, windows: Sequence[Tensor], on_step: Callable[[str, int], object] = lambda *_: None
) -> dict[str, Tensor]:
    """Mean squares of the inputs of every matrix, by Hugging Face's names: [in] fp32.

    If columns of the input are uncorrelated, a product's mean squared error is the sum over columns of error^2 times this.

    Args:
        session: with weights as they were read (`balance=False`), on an executor that runs op by op.
    """
    executor = session.executor
    if executor.ops is None:
        raise InputError(f"executor {executor.name} does not run op by op; take cpu or reference")
    names = TensorNames(executor.weights.named_tensors())
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def looking(ops: OpTable) -> OpTable:
        def linear(x: Tensor, weight: Weight) -> Tensor:
            if (name := names.name_of(weight)) is not None and len(x):
                squares = x.double().square().sum(0)
                sums[name] = sums[name] + squares if name in sums else squares
                counts[name] = counts.get(name, 0) + len(x)
            return ops.linear(x, weight)

        return with_ops(ops, {"linear": linear})

    observed_executor = executor.with_ops(looking)
    assert observed_executor is not None  # an executor with ops can be wrapped
    for window in windows:
        cache, paging = session.new_cache(1, len(window))
        hidden = observed_executor.forward(window, paging.batch([paging.add()], [len(window)]), cache)
        observed_executor.head(hidden[-_HEAD_TOKENS:])
        on_step("a window", len(window))
    return {name: (total / counts[name]).float() for name, total in sums.items()}
