"""Op tables: the ops that a decoder layer calls, with the same signatures on every backend.

Models call the ops of a table; each op is one formula. `FusedOps` compute the same, with the same rounding points, in fewer
launches.
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
    """A module or object with these ops. `tq_ops.reference` documents each op; every table has its signatures."""

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
    """The arguments of a call, by parameter name: `arguments("store_kv", …)["at"]`."""
    bound = _SIGNATURES[op].bind(None, *args, **kwargs).arguments
    return {name: value for name, value in bound.items() if name != "self"}


def with_ops(ops: OpTable, replacements: Mapping[str, Callable[..., Any]]) -> OpTable:
    """A copy of an op table with some ops replaced, or with the optional one of `ExpertOps` added."""
    return cast(OpTable, SimpleNamespace(**{name: getattr(ops, name) for name in OP_NAMES} | dict(replacements)))


@dataclass(frozen=True)
class Heads:
    """How packed projections become queries, keys and values: split, add the bias, norm Q and K, apply RoPE.

    Attributes:
        num_heads: query heads Hq.
        dtype: the model's dtype, to which queries and attention's output are rounded.
        bias: [(Hq + 2 Hkv) * D], first Q's, then K's, then V's; None without biases.
        q_norm, k_norm: [D], weights of the norm of each head; None without these norms.
        eps: constant of these norms.
    """

    num_heads: int
    dtype: torch.dtype
    bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Stack:
    """The gated MLPs of all experts of a layer: one weight for each projection, with the rows of expert after expert.

    Attributes:
        count: number of experts E.
        per_token: number of experts that each token goes through.
        normalized: whether a token's shares are normalized to sum to 1.
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
    """An optional op of a table, for steps in which the host does not know which experts were chosen."""

    def experts(self, x: Tensor, logits: Tensor, stack: Stack) -> Tensor:
        """Run each token through its most likely experts; add up their outputs times their shares, in the experts' order.

        Args:
            x: [T, hidden] bf16 or fp32.
            logits: [T, E] fp32, from the router.
        Returns:
            [T, hidden] fp32.
        Rounding points: the gated product once, to x's dtype; shares and sums are FP32.
        """


class FusedOps(ExpertOps, Protocol):
    """The ops that a fused layer calls. All but `experts`, `attention` and `add_norm` are ops of an `OpTable`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight | tuple[Weight, ...]) -> Tensor:
        """As in `OpTable`; for several weights, their results side by side: [T, sum of outputs]."""

    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def gelu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...

    def attention(self, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], at: LayerView, softmax_scale: float) -> Tensor:
        """Biases, head norms, RoPE, `store_kv` and `paged_attention`.

        Args:
            qkv: [T, (Hq + 2 Hkv) * D] fp32: Q of all heads, then K, then V.
            rope: cos and sin [T, D/2] fp32 at the positions of the tokens.
            softmax_scale: factor of the logits, 1/sqrt(D).
        Returns:
            [T, Hq * D] of `heads.dtype`, the input of the output projection.
        Rounding points: as in these ops: queries once after RoPE, the output once.
        """

    def add_norm(
        self, hidden: Tensor, update: Tensor, weight: Tensor, eps: float, post_norm: tuple[Tensor, float] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add an update to the hidden state; also the RMS norm of the sum.

        Args:
            hidden: [T, hidden] bf16 or fp32.
            update: [T, hidden] fp32.
            weight: [hidden], weight of the norm.
            post_norm: weight [hidden] and eps of a norm of the update before it is added; None without one.
        Returns:
            `hidden + update` and its norm, both [T, hidden] of hidden's dtype.
        Rounding points: the sum is rounded once; the norm of the rounded sum is computed in FP32 and rounded once.
        """
