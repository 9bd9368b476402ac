"""Does a cache lose too much of K or V for readable text? Judged by the weights and by the first tokens of a prompt.

Limits come from `tiny` with faults planted in every layer (benchmarks/LOG.md): its perplexity rose by 1 % with logits off by
about 0.5, by 10 to 30 % at 1.5 to 2.5. A few layers beyond that do not spoil text: Qwen2.5-Coder-0.5B has 3 of 24 in tq4, and
still writes correct programs at a mean KL of 0.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.models.balance import Moments, name_layers
from haarkv.models.parallel import SINGLE_RANK, Ranks
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.probe import logit_errors, stored_error, weighted_error
from haarkv.tq_ops.table import OpTable, with_ops

LEAST_TOKENS, MOST_TOKENS = 16, 128
COLLAPSES = 1 / 4
"""Share of collapsing layers at which text collapses."""
SINKS = 4
"""First tokens of a sequence, whose vectors may be far larger than others."""


@dataclass(frozen=True)
class Measure:
    """A measure of loss, and the amounts at which text suffers and collapses."""

    suffers: float
    garbage: float
    words: str


LOGITS = Measure(0.5, 2.0, "attention scores are off by {:.2g}")
"""For K: RMS error over queries and keys."""
OUTPUT = Measure(0.5, 1.0, "{:.0%} of what attention returns is error")
"""For V: relative error, channels weighted by o_proj; at 1 nothing is left."""


@dataclass(frozen=True)
class Loss:
    """Loss of K or V of one layer, in its worst KV head; `in_sinks` if due to the first tokens alone."""

    layer: int
    side: str
    kv_format: str
    measure: Measure
    amount: float
    in_sinks: bool = False

    @property
    def suffers(self) -> bool:
        """Whether text suffers from it."""
        return self.amount >= self.measure.suffers

    @property
    def garbage(self) -> bool:
        """Whether text would collapse if all layers were so."""
        return self.amount >= self.measure.garbage


def expected_losses(plan: KVPlan, moments: Mapping[int, tuple[Moments, Moments]], softmax_scale: float) -> list[Loss]:
    """Losses expected from the weights alone, by synthetic vectors of their moments; only those that text suffers from.

    Without norms of Q and K, little more than the biases is known. The plan must have no learned coordinates, which fit no
    synthetic vectors.
    """
    generator, losses = torch.Generator().manual_seed(0), []
    for layer, (k, v) in moments.items():
        for side, side_moments, kv_format in (("K", k, plan.k(layer)), ("V", v, plan.v(layer))):
            if not kv_format.lossy:
                continue
            x = _synthetic_vectors(side_moments, generator, rotates=side == "K")
            use = side_moments.use
            queries = torch.randn(MOST_TOKENS, *use.shape, generator=generator) * use.sqrt()
            try:
                losses.append(
                    key_loss(kv_format, layer, x, queries, softmax_scale)
                    if side == "K"
                    else value_loss(kv_format, layer, x, use)
                )
            except NonFiniteError:  # weights that are not finite: the forward says so, and where
                continue
    return [loss for loss in losses if loss and loss.suffers]


def _synthetic_vectors(moments: Moments, generator: torch.Generator, *, rotates: bool) -> Tensor:
    """Gaussian vectors [H, n, D] of given moments; RoPE `rotates` their constant part by random angles."""
    heads, dim = moments.spread.shape
    noise = torch.randn(heads, MOST_TOKENS, dim, generator=generator) * moments.spread.sqrt().unsqueeze(1)
    constant = moments.constant.unsqueeze(1)
    if rotates:
        angle = torch.rand(heads, MOST_TOKENS, dim // 2, generator=generator) * (2 * math.pi)
        constant = constant * math.sqrt(2) * torch.cat([angle.cos(), angle.sin()], dim=-1)
    return noise + constant


def key_loss(kv_format: KVFormat, layer: int, k: Tensor, q: Tensor, softmax_scale: float, sink: int = 0) -> Loss | None:
    """Loss of keys `k` [H, n, D] of positions 0 … n - 1 for queries `q` [m, Hq, D], both after RoPE; None of too few."""
    error = stored_error(kv_format, layer, k)
    if error is None:
        return None
    error[:, :sink] = 0.0
    squares = logit_errors(error, q, softmax_scale).square()  # [H, n]
    whole = float(squares.mean(1).max().sqrt())
    later = float(squares[:, SINKS:].mean(1).max().sqrt())
    return Loss(layer, "K", kv_format.name, LOGITS, whole, in_sinks=later < whole / 2)


def value_loss(kv_format: KVFormat, layer: int, v: Tensor, use: Tensor) -> Loss | None:
    """Loss of values [H, n, D], channels weighted by `use` [H, D]; None of too few."""
    error = stored_error(kv_format, layer, v)
    if error is None:
        return None
    amount = float(weighted_error(error, v[:, : error.shape[1]], use).max())
    return Loss(layer, "V", kv_format.name, OUTPUT, amount)


# -- What is said of it ----------------------------------------------------------------------------------------------------


def describe(losses: Sequence[Loss], *, could_balance: bool = False) -> str:
    """One line: what suffers, and what to use instead."""
    parts = []
    for side, measure in dict.fromkeys((loss.side, loss.measure) for loss in losses):
        side_losses = [loss for loss in losses if (loss.side, loss.measure) == (side, measure)]
        names = " and ".join(dict.fromkeys(loss.kv_format for loss in side_losses))
        worst = measure.words.format(max(loss.amount for loss in side_losses))
        parts.append(f"{side} of {name_layers([loss.layer for loss in side_losses])} suffers in {names}: {worst}")
    if could_balance:
        instead = "leave balance on"
    elif all(loss.in_sinks for loss in losses):
        instead = f"keep the first tokens in BF16: --kv-sink {SINKS}"
    else:
        layers = ",".join(str(layer) for layer in sorted({loss.layer for loss in losses}))
        instead = f"take the default cache, or keep what suffers in BF16 (--kv-skip-layers {layers})"
    return f"{'; '.join(parts)}; {instead}"


@dataclass
class Guard:
    """Judges a session's cache at load, and once more by the first prompt.

    The prompt is observed through the op table (`Executor.with_ops`). Executors that run fused layers have none: there the
    weights alone are judged.

    Args:
        could_balance: balance is off, and would help.
        allow: warn where text would be garbage, instead of refusing.
        ranks: ranks of the model; all judge together.
        insist: the option that goes on all the same.
    """

    plan: KVPlan
    moments: Mapping[int, tuple[Moments, Moments]]
    softmax_scale: float
    could_balance: bool = False
    allow: bool = False
    ranks: Ranks = SINGLE_RANK
    insist: str = "--allow-collapse"
    _layer_losses: dict[tuple[int, str], Loss] = field(default_factory=dict)
    _warned: set[tuple[int, str]] = field(default_factory=set)
    _done: bool = False

    def at_load(self, on_warning: Callable[[str], object]) -> None:
        """Judge by the weights.

        Raises:
            InputError: text would be garbage; it names layers and a remedy.
        """
        self._judge(expected_losses(self.plan, self.moments, self.softmax_scale), on_warning)

    def watches(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether it still has to judge, and these prompts are long enough."""
        return not self._done and len(prompts[0]) >= LEAST_TOKENS

    def table(self, ops: OpTable) -> OpTable:
        """An op table that measures each layer's first tokens once."""
        first_kv: dict[int, tuple[Tensor, Tensor]] = {}

        def store_kv(k: Tensor, v: Tensor, at: LayerView) -> None:
            if not self._done and int(at.batch.positions[0]) == 0:
                first_kv[at.layer] = k, v
            ops.store_kv(k, v, at)

        def paged_attention(q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
            if at.layer in first_kv:
                tokens = min(int(at.batch.query_start_loc[1]), MOST_TOKENS)
                self._probe(at.layer, q[:tokens], *(x[:tokens].transpose(0, 1) for x in first_kv.pop(at.layer)))
            return ops.paged_attention(q, at, softmax_scale)

        return with_ops(ops, {"store_kv": store_kv, "paged_attention": paged_attention})

    def after_prefill(self, on_warning: Callable[[str], object]) -> None:
        """Judge by the first tokens; refuses as `at_load`."""
        if not self._done:
            self._done = bool(self._layer_losses)
            self._judge(list(self._layer_losses.values()), on_warning)

    def _probe(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if len(q) < LEAST_TOKENS:
            return
        k_format, v_format = self.plan.layers[layer]
        sides: list[tuple[str, KVFormat, Callable[[], Any]]] = [
            ("K", k_format, partial(key_loss, k_format, layer, k, q, self.softmax_scale, self.plan.sink)),
            ("V", v_format, partial(value_loss, v_format, layer, v[:, self.plan.sink :], self.moments[layer][1].use)),
        ]
        for side, kv_format, measure_loss in sides:
            try:
                loss = measure_loss() if kv_format.lossy else None
            except NonFiniteError:  # storing them says so, and where
                continue
            if loss:
                self._layer_losses[layer, side] = loss

    def _judge(self, losses: list[Loss], on_warning: Callable[[str], object]) -> None:
        # Each rank sees its own heads. All must come to one verdict, or some would wait for the others.
        every = self.ranks.collect([loss for loss in losses if loss.suffers])
        worst: dict[tuple[int, str], Loss] = {}
        for loss in self.ranks.share([loss for rank_losses in every for loss in rank_losses]):
            key = loss.layer, loss.side
            if key not in worst or loss.amount > worst[key].amount:
                worst[key] = loss
        garbage_layers = {layer for (layer, _), loss in worst.items() if loss.garbage}
        if len(garbage_layers) >= COLLAPSES * len(self.plan.layers) and not self.allow:
            line = describe(list(worst.values()), could_balance=self.could_balance)
            raise InputError(f"text would be garbage: {line}; {self.insist} goes on all the same")
        new = [loss for key, loss in worst.items() if key not in self._warned]
        self._warned |= worst.keys()
        if new and self.ranks.rank == 0:
            on_warning(describe(new, could_balance=self.could_balance))
