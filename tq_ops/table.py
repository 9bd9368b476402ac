"""Op tables: the ops that a decoder layer calls, with the same signatures on every backend.

Models are written in the ops of a table, one formula each. `FusedOps` compute the same with the same rounding points in
fewer launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.weight import Weight


class OpTable(Protocol):
    """A module such as `tq_ops.reference`, whose signatures every table repeats."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight) -> Tensor: ...
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def gelu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def sigmoid_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def store_kv(self, k: Tensor, v: Tensor, at: LayerView) -> None: ...
    def paged_attention(self, q: Tensor, at: LayerView, softmax_scale: float) -> Tensor: ...
    def gated_delta(
        self, x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, at: LayerView
    ) -> Tensor: ...


OP_NAMES = (
    "rms_norm", "linear", "rope", "silu_mul", "gelu_mul", "sigmoid_mul", "store_kv", "paged_attention", "gated_delta",
)  # fmt: skip
"""Every op of a table, in the order in which a layer first calls them."""

_SIGNATURES = {name: signature(getattr(OpTable, name)) for name in OP_NAMES}


def arguments(op: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of a call by parameter name: `arguments("store_kv", …)["at"]`."""
    bound = _SIGNATURES[op].bind(None, *args, **kwargs).arguments
    return {name: value for name, value in bound.items() if name != "self"}


def with_ops(ops: OpTable, replacements: Mapping[str, Callable[..., Any]]) -> OpTable:
    """An op table with some ops replaced."""
    return cast(OpTable, SimpleNamespace(**{name: replacements.get(name, getattr(ops, name)) for name in OP_NAMES}))


@dataclass(frozen=True)
class Heads:
    """How packed projections become queries, keys and values: split, add the bias, norm Q and K, apply RoPE.

    Attributes:
        num_heads: query heads Hq.
        dtype: the model's, to which queries and attention's output are rounded.
        bias: [(Hq + 2 Hkv) * D], of Q, K and V one after the other.
        q_norm, k_norm: [D], weights of each head's norm.
        eps: of the norms.
    """

    num_heads: int
    dtype: torch.dtype
    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Stack:
    """The gated MLPs of a layer's experts, each projection of all of them in one weight, expert below expert.

    Attributes:
        count: experts E.
        per_token: experts of a token.
        normalized: whether their shares are normalized to sum to 1.
        activation: silu or gelu_tanh.
        gate, up: [E * width, hidden].
        down: [E * hidden, width].
    """

    count: int
    per_token: int
    normalized: bool
    activation: str
    gate: Weight
    up: Weight
    down: Weight


@runtime_checkable
class ExpertOps(Protocol):
    """An optional op of a table, for steps in which the host does not know which experts are chosen."""

    def experts(self, x: Tensor, logits: Tensor, stack: Stack) -> Tensor:
        """Each token through its most likely experts, summed by their shares in the experts' order.

        Args:
            x: [T, hidden] bf16 or fp32.
            logits: [T, E] fp32, of the router.
        Returns:
            [T, hidden] fp32.
        Rounding points: the gated product once, to x's dtype; shares and sums are FP32.
        """


class FusedOps(ExpertOps, Protocol):
    """What a fused layer calls. All but `experts`, `attention` and `add_norm` are those of an op table."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight | tuple[Weight, ...]) -> Tensor:
        """As an op table's; of several weights their results beside each other."""

    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def gelu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...

    def attention(self, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], at: LayerView, softmax_scale: float) -> Tensor:
        """Store K and V, and attend: from packed projections to the input of the output projection.

        Args:
            qkv: [T, (Hq + 2 Hkv) * D] fp32: Q of all heads, then K, then V.
            rope: cos and sin [T, D/2] fp32 of the batch's positions.
            softmax_scale: of the logits, 1/sqrt(D).
        Returns:
            [T, Hq * D] of `heads.dtype`.
        Rounding points: those of the ops; queries once after RoPE, the output once.
        """

    def add_norm(
        self, hidden: Tensor, update: Tensor, weight: Tensor, eps: float, post_norm: tuple[Tensor, float] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The hidden state after a residual, and its RMS norm.

        Args:
            hidden: [T, hidden] bf16 or fp32.
            update: [T, hidden] fp32.
            weight: [hidden], of the norm.
            post_norm: weight [hidden] and eps of a norm of the update, before it is added.
        Returns:
            `hidden + update` and its norm, both [T, hidden] of hidden's dtype.
        Rounding points: the sum once; the norm is taken of the rounded sum, in FP32, and rounded once.
        """


def with_experts(ops: OpTable, experts: Callable[[Tensor, Tensor, Stack], Tensor]) -> OpTable:
    """An op table that is an `ExpertOps` as well."""
    return cast(OpTable, SimpleNamespace(experts=experts, **{name: getattr(ops, name) for name in OP_NAMES}))
