"""Learn the coordinates of a model's K and V from a text: moments of what the cache is given, layer by layer.

    for every layer:    run all windows through it, and sum q q^T, k k^T and v v^T of each KV head as they go by
                        codebooks.learned.learn(metric of K from the queries, of V from o_proj; spreads; means)

Only the hidden states between two layers are kept, and one layer's sums. Windows that are held back take part in the forward
but not in what is learned: the same sums of theirs say how much worse the coordinates suit a text that was not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis, expected_cost, learn
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.models.weights import LayerWeights
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, blocks_for
from haarkv.tq_ops.kv.plan import BLOCK_SIZE, KVSpec
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.validation.planning.learning import Learning

OnStep = Callable[[str, int], None]
"""Told what has been done, and how many tokens it took."""
ENOUGH = 1.25
"""Held-back text may cost so many times what the text learned from does; beyond it, more text helps."""
_TINY = 1e-300


@dataclass
class Moments:
    """Weighted sums over the vectors of one side of a layer: float64.

    Attributes:
        weight: [H], sum of the vectors' weights.
        first: [H, D], of weight * x.
        second: [H, D, D], of weight * x x^T.
    """

    weight: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def empty(cls, heads: int, dim: int) -> Moments:
        """Of no vectors."""
        shapes = ((heads,), (heads, dim), (heads, dim, dim))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, x: Tensor, weight: Tensor | None = None) -> None:
        """Add vectors [H, n, D] float64 of weights [H, n], each 1 unless given."""
        weight = torch.ones(x.shape[:2], dtype=torch.float64) if weight is None else weight
        weighted = x * weight.unsqueeze(-1)
        self.weight += weight.sum(1)
        self.first += weighted.sum(1)
        self.second += weighted.mT @ x

    @property
    def mean(self) -> Tensor:
        """[H, D]; zeros of a head that had no vector of any weight."""
        return self.first / self.weight.clamp(min=_TINY).unsqueeze(-1)

    def spread(self, mean: Tensor) -> Tensor:
        """E[(x - mean) (x - mean)^T], [H, D, D], of a mean [H, D] that may be another text's."""
        outer = self.mean.unsqueeze(-1) * mean.unsqueeze(-2)
        second = self.second / self.weight.clamp(min=_TINY)[:, None, None]
        return second - outer - outer.mT + mean.unsqueeze(-1) * mean.unsqueeze(-2)


class Sums:
    """What one layer is learned from, added up as tokens go by.

    Keys count alike: those of larger norm make larger errors of the logits. Values are divided by their length in the metric,
    so that a few long ones do not decide: in attention's output a long value's weight is what attention makes it.

    Args:
        metric_v: [H, D, D] float64, of V.
        config: of the model.
    """

    def __init__(self, metric_v: Tensor, config: DecoderConfig) -> None:
        shape = (config.num_kv_heads, config.head_dim)
        self.metric_v, self._heads = metric_v, config.num_kv_heads
        self.q, self.k, self.v = (Moments.empty(*shape) for _ in range(3))

    def add_kv(self, k: Tensor, v: Tensor) -> None:
        """Add K and V [T, H, D] of some tokens."""
        keys, values = (x.transpose(0, 1).to("cpu", torch.float64) for x in (k, v))
        length = ((values @ self.metric_v) * values).sum(-1)
        self.k.add(keys)
        self.v.add(values, torch.where(length > 0, 1 / length.clamp(min=_TINY), 0.0))

    def add_q(self, q: Tensor) -> None:
        """Add queries [T, Hq, D]; those that share a KV head count as one head's."""
        by_head = q.to("cpu", torch.float64).view(len(q), self._heads, -1, q.shape[-1])
        self.q.add(by_head.transpose(0, 1).flatten(1, 2))

    @property
    def metric_k(self) -> Tensor:
        """E[q q^T], [H, D, D] float64: what an error of a key costs in the squared error of its logits."""
        return self.q.second / self.q.weight.clamp(min=_TINY)[:, None, None]


def metric_of_values(weights: LayerWeights, config: DecoderConfig) -> Tensor:
    """Sum of W^T W over the query heads of a KV head, W being their columns of o_proj: [H, D, D] float64.

    An error e of a value moves the attention block's output by p W e, p being the probability: it costs e^T W^T W e.
    """
    by_head = weights.o_proj.view(-1, config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    columns = (by_head[:, head].flatten(0, 1).to("cpu", torch.float64) for head in range(config.num_kv_heads))
    return torch.stack([of_head.T @ of_head for of_head in columns])


def recording(ops: OpTable, sums: Sums) -> OpTable:
    """An op table that adds what the cache and attention are given to some sums."""

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        sums.add_kv(k, v)
        ops.store_kv(k, v, cache, layer, batch)

    def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        sums.add_q(q)
        return ops.paged_attention(q, cache, layer, batch, softmax_scale)

    return with_ops(ops, {"store_kv": store_kv, "paged_attention": paged_attention})


def learn_model(
    model: DecoderModel,
    ops: OpTable,
    windows: Sequence[Tensor],
    held_back: Sequence[Tensor],
    *,
    learning: Learning | None = None,
    save: Callable[[Learning], None] = lambda _: None,
    on_step: OnStep = lambda *_: None,
) -> Learning:
    """Learn the coordinates of every layer's K and V.

    The forward is the model's own, with K and V in bf16, each window from an empty cache.

    Args:
        model: where `ops` work.
        ops: the table that runs the layers; it must take a bf16 cache.
        windows: token ids [n] int64 of each window to learn from, at least one.
        held_back: the same, of windows to judge by; may be none, and then no fit is known (NaN).
        learning: what an earlier run has done with the same model and windows.
        save: called after each layer.
    Raises:
        NonFiniteError: K, V or a query is not finite, with the layer.
    """
    learning, config = learning or Learning(), model.config
    lengths = [len(window) for window in (*windows, *held_back)]
    if learning.hidden is None:
        learning.hidden = model.embed(torch.cat([*windows, *held_back]).to(model.weights.embedding.device))
    for layer in range(len(learning.layers), config.num_layers):
        own, other = (Sums(metric_of_values(model.weights.layers[layer], config), config) for _ in range(2))
        after = []
        for number, hidden in enumerate(torch.split(learning.hidden, lengths)):
            sums = own if number < len(windows) else other
            after.append(_run(model, recording(ops, sums), layer, hidden))
            on_step(f"layer {layer + 1} of {config.num_layers}", len(hidden))
        learning.hidden = torch.cat(after)
        learning.layers.append(_learned(own, layer))
        learning.fits.append(_fit(own, other, learning.layers[-1]))
        save(learning)
    return learning


@torch.inference_mode()
def _run(model: DecoderModel, ops: OpTable, layer: int, hidden: Tensor) -> Tensor:
    """What leaves a layer [T, hidden] of what enters it, from an empty cache of that layer alone."""
    config, blocks = model.config, blocks_for(len(hidden))
    plan = KVSpec("bf16").plan(config.num_layers)
    shape = (config.num_kv_heads, config.head_dim)
    page = round(BLOCK_SIZE * sum(f.bytes_per_vector(config.head_dim) for f in plan.layers[layer]) * config.num_kv_heads)
    pages = {layer: torch.zeros(blocks, page, dtype=torch.uint8, device=hidden.device)}
    cache = PagedKVCache(
        plan, num_kv_heads=shape[0], head_dim=shape[1], num_blocks=blocks, num_rows=1, device=hidden.device, pages=pages
    )
    paging = PagedSequences(blocks, cache.block_size, num_rows=1)
    batch = paging.batch([paging.add()], [len(hidden)]).to(hidden.device)
    return model.layers(hidden, range(layer, layer + 1), batch, cache, ops)


def _learned(sums: Sums, layer: int) -> tuple[Basis, Basis]:
    try:
        k = learn(sums.metric_k, sums.k.spread(sums.k.mean), sums.k.mean)
        v = learn(sums.metric_v, sums.v.spread(sums.v.mean), sums.v.mean)
    except ValueError:
        raise NonFiniteError(
            f"layer {layer}: K, V or the queries of this text are not finite; nothing can be learned"
        ) from None
    return k, v


def _fit(own: Sums, other: Sums, bases: tuple[Basis, Basis]) -> tuple[float, float]:
    """How many times as much K and V cost on held-back text as on the text learned from, by the model of `expected_cost`."""
    found = []
    for side, basis in zip("kv", bases, strict=True):
        costs = []
        for sums in (own, other):
            moments = getattr(sums, side)
            metric = sums.metric_k if side == "k" else sums.metric_v
            forward, back = basis.forward.double(), basis.back.double()
            spread = forward.mT @ moments.spread(basis.mean.double()) @ forward
            of_coordinate = (back @ metric @ back.mT).diagonal(dim1=-2, dim2=-1) * spread.diagonal(dim1=-2, dim2=-1)
            costs.append(float(expected_cost(basis.weights, basis.head_dim // 2, of_coordinate).mean()))
        found.append(costs[1] / costs[0] if min(costs) > 0 else math.nan)
    return found[0], found[1]
