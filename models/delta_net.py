"""Gated DeltaNet, a mixer whose memory of all tokens is one matrix a head, and a short convolution before it.

    x = silu(conv(projected)), of which q and k are made unit vectors, q over sqrt(key_dim)
    S = S * exp(-exp(a_log) * softplus(a + dt_bias));   S += k (v - S^T k) * sigmoid(b);   out = S^T q

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), as Qwen3-Next and Qwen3.5
build it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from haarkv.models.config import Norm
from haarkv.models.tensors import Axis, LayerWeights, StoredTensor
from haarkv.tq_ops.kv.recurrent import VERSIONS, StateShape

if TYPE_CHECKING:
    from haarkv.models.mixers import Step


@dataclass(frozen=True)
class DeltaNet:
    """A mixer: the gated delta rule.

    Attributes:
        num_key_heads: heads of Q and of K; each serves num_value_heads / num_key_heads heads of V.
        num_value_heads: as many matrices are remembered, [key_dim, value_dim] each.
        key_dim, value_dim: of one head.
        taps: newest tokens that the convolution sums, the token itself among them.
        by_key_head: the checkpoint stacks its projections key head by key head (Qwen3-Next), instead of one after the other.
        versions: of its state, which `ModelConfig.for_drafts` makes more.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    by_key_head: bool = False
    versions: int = VERSIONS
    kv_shape: None = None

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of Q, K and V."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def state_shape(self) -> StateShape:
        """The convolution's last inputs, and the matrices."""
        shapes = {
            "conv": (self.taps - 1, sum(self.widths)),
            "delta": (self.num_value_heads, self.key_dim, self.value_dim),
        }
        return StateShape(tuple((name, shape, torch.float32) for name, shape in shapes.items()), self.versions)


def delta_tensors(mixer: DeltaNet, norm: Norm, hidden_size: int) -> dict[str, StoredTensor]:  # noqa: ARG001
    """Projections, convolution, decays and norm of a `DeltaNet`. What decides how fast it forgets stays in FP32."""
    hidden, heads, values = Axis(hidden_size, "hidden"), Axis(mixer.num_value_heads), Axis(mixer.widths[2])
    mixed = Axis(sum(mixer.widths))
    stacked = {"in_proj_qkvz": Axis(mixed.size + values.size), "in_proj_ba": Axis(2 * heads.size)}
    apart = {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    rows = stacked if mixer.by_key_head else apart
    return {
        **{field: StoredTensor(f"linear_attn.{field}.weight", (axis, hidden)) for field, axis in rows.items()},
        "conv1d": StoredTensor("linear_attn.conv1d.weight", (mixed, Axis(1), Axis(mixer.taps)), in_fp32=True),
        "a_log": StoredTensor("linear_attn.A_log", (heads,), in_fp32=True),
        "dt_bias": StoredTensor("linear_attn.dt_bias", (heads,), in_fp32=True),
        "delta_norm": StoredTensor("linear_attn.norm.weight", (Axis(mixer.value_dim),), in_fp32=True),
        "out_proj": StoredTensor("linear_attn.out_proj.weight", (hidden, values)),
    }


def remember(x: Tensor, weights: LayerWeights, mixer: DeltaNet, norm: Norm, index: int, step: Step) -> Tensor:
    """The gated delta rule over all tokens so far, whose state the cache keeps; see `MixerKind.mix`.

    Rounding points: those of `tq_ops.reference`; from the projections to the gated norm all is FP32, and so is the state.
    """
    ops = step.ops
    if mixer.by_key_head:
        qkvz, ba = (ops.linear(x, weights.matrix(f"in_proj_{parts}")) for parts in ("qkvz", "ba"))
        mixed, z, b, a = _apart(qkvz, ba, mixer)
    else:
        mixed, z, b, a = (ops.linear(x, weights.matrix(f"in_proj_{part}")) for part in ("qkv", "z", "b", "a"))
    told = ops.gated_delta(mixed, a, b, weights["conv1d"], weights["a_log"], weights["dt_bias"], step.cache, index, step.batch)
    normed = ops.rms_norm(told, weights["delta_norm"], norm.eps)
    return ops.linear(ops.silu_mul(z, normed.flatten(1), x.dtype), weights.matrix("out_proj"))


def _apart(qkvz: Tensor, ba: Tensor, mixer: DeltaNet) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projections that are stacked key head by key head, one after the other: Q with K and V, z, b and a."""
    per_key = mixer.num_value_heads // mixer.num_key_heads
    values = per_key * mixer.value_dim
    by_head = qkvz.view(len(qkvz), mixer.num_key_heads, -1)
    parts = torch.split(by_head, [mixer.key_dim, mixer.key_dim, values, values], dim=-1)
    q, k, v, z = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in torch.split(ba.view(len(ba), mixer.num_key_heads, -1), per_key, dim=-1))
    return torch.cat([q, k, v], dim=-1), z, b, a
