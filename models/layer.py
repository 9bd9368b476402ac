"""The forward of one decoder layer, op by op, for any batch of new tokens. `MIXERS` lists every kind of mixer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import Activation, Attention, Experts, Layer, Mixer, Norm, Rope
from haarkv.models.parallel import Ranks
from haarkv.models.tensors import Axis, LayerWeights, StoredTensor
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.recurrent import VERSIONS, StateShape
from haarkv.tq_ops.table import ExpertOps, OpTable


def decoder_layer(hidden: Tensor, weights: LayerWeights, layer: Layer, index: int, step: Step, ranks: Ranks) -> Tensor:
    """Run one layer; store its K and V, or its state, in the cache.

        hidden += mixer(norm(hidden));   hidden += mlp(norm(hidden))      with `post_norms`: norm(mixer(…)), norm(mlp(…))

    Args:
        hidden: [T, hidden] bf16 or fp32.
        ranks: adds up the fp32 outputs of mixer and MLP over all ranks, before they are added to the residual.
    Returns:
        [T, hidden] of hidden's dtype.
    Rounding points: as in `tq_ops.reference` and the mixer; the hidden state is rounded once after each addition.
    """
    eps, ops = layer.norm.eps, step.ops

    def add_residual(hidden: Tensor, update: Tensor, norm: str) -> Tensor:
        update = ranks.sum(update)
        if layer.post_norms:
            update = ops.rms_norm(update, weights[norm], eps)
        return (hidden.float() + update).to(hidden.dtype)

    x = ops.rms_norm(hidden, weights["input_norm"], eps)
    hidden = add_residual(
        hidden, mixer_kind(layer.mixer).mix(x, weights, layer.mixer, layer.norm, index, step), "mixer_out_norm"
    )
    x = ops.rms_norm(hidden, weights["post_norm"], eps)
    if isinstance(layer.mlp, Experts):
        update = through_experts(x, weights, layer.mlp, ops)
    else:
        update = gated_mlp(x, weights, layer.mlp.activation, ops)
    return add_residual(hidden, update, "mlp_out_norm")


def gated_mlp(x: Tensor, weights: LayerWeights, activation: Activation, ops: OpTable) -> Tensor:
    """`down(act(gate(x)) * up(x))` for x [T, hidden]: [T, hidden] fp32. The product is rounded once, to x's dtype."""
    product = ops.silu_mul if activation == "silu" else ops.gelu_mul
    gate, up = ops.linear(x, weights.matrix("gate_proj")), ops.linear(x, weights.matrix("up_proj"))
    return ops.linear(product(gate, up, x.dtype), weights.matrix("down_proj"))


def through_experts(x: Tensor, weights: LayerWeights, mlp: Experts, ops: OpTable) -> Tensor:
    """Mixture of experts for x [T, hidden]: [T, hidden] fp32; shares and sums are FP32.

        share = the `per_token` largest numbers of softmax(x @ router.T)
        out = sum(share_e * expert_e(x)) + sigmoid(x @ gate.T) * shared(x)

    Each token adds up its experts in ascending order, in any batch.
    """
    logits = ops.linear(x, weights.matrix("router"))
    if weights.stack is not None and isinstance(ops, ExpertOps):
        out = ops.experts(x, logits, weights.stack)
    else:
        out = _one_by_one(x, logits, weights, mlp, ops)
    if mlp.shared:
        y = gated_mlp(x, weights.part("shared_expert."), mlp.activation, ops)
        out += ops.sigmoid_mul(ops.linear(x, weights.matrix("shared_gate")).expand_as(y), y, torch.float32)
    return out


def _one_by_one(x: Tensor, logits: Tensor, weights: LayerWeights, mlp: Experts, ops: OpTable) -> Tensor:
    """Run each chosen expert once, on all tokens that chose it: [T, hidden] fp32."""
    share, experts = logits.softmax(-1).topk(mlp.per_token)
    if mlp.normalized:
        share = share / share.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(experts.flatten().tolist())):
        token, place = (experts == expert).nonzero(as_tuple=True)
        y = gated_mlp(x[token], weights.part(f"experts.{expert}."), mlp.activation, ops)
        out[token] += share[token, place, None] * y
    return out


@dataclass(frozen=True)
class Step:
    """Arguments that all layers of one forward share; `rope` has cos and sin [T, dims / 2] fp32 at the batch's positions."""

    ops: OpTable
    cache: PagedKVCache
    batch: Batch
    rope: Mapping[Rope, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MixerKind:
    """The code for one class of mixers.

    Attributes:
        tensors: (mixer, norm, hidden_size) -> every weight tensor, by field.
        mix: (x [T, hidden] normed, weights, mixer, norm, layer index, step) -> [T, hidden] fp32, this rank's part of the sum.
    """

    tensors: Callable[[Any, Norm, int], dict[str, StoredTensor]]
    mix: Callable[[Tensor, LayerWeights, Any, Norm, int, Step], Tensor]


def attention_tensors(mixer: Attention, norm: Norm, hidden_size: int) -> dict[str, StoredTensor]:
    """Weight tensors of an `Attention`."""
    hidden = Axis(hidden_size)
    queries = Axis(mixer.num_heads * mixer.head_dim, cut=True, unit=mixer.head_dim)
    keys = Axis(mixer.num_kv_heads * mixer.head_dim, cut=True, unit=mixer.head_dim, shared=True)
    # The rows of a head's gate follow the rows of its query.
    with_gates = Axis(2 * queries.size, cut=True, unit=2 * queries.unit) if mixer.gated else queries
    rows = {"q": with_gates, "k": keys, "v": keys}
    tensors = {f"{x}_proj": StoredTensor(f"self_attn.{x}_proj.weight", (axis, hidden)) for x, axis in rows.items()}
    if mixer.head_norms:
        tensors |= {
            f"{x}_norm": StoredTensor(f"self_attn.{x}_norm.weight", (Axis(mixer.head_dim),), plus_one=norm.plus_one)
            for x in "qk"
        }
    tensors["o_proj"] = StoredTensor("self_attn.o_proj.weight", (hidden, queries))
    if mixer.bias:
        tensors |= {f"{x}_bias": StoredTensor(f"self_attn.{x}_proj.bias", (axis,)) for x, axis in rows.items()}
    return tensors


def attend(x: Tensor, weights: LayerWeights, mixer: Attention, norm: Norm, index: int, step: Step) -> Tensor:
    """Softmax attention over the cache, new tokens included; a `MixerKind.mix`.

    Rounding points: as in `tq_ops.reference`. Biases are added in FP32; q is rounded once, after RoPE. Gated output is rounded
    a second time, after its FP32 gate.
    """
    ops, rope = step.ops, step.rope[mixer.rope]

    def project(side: str) -> Tensor:
        y = ops.linear(x, weights.matrix(f"{side}_proj"))
        if mixer.bias:
            y = y + weights[f"{side}_bias"]
        return y.view(len(x), -1, mixer.head_dim)

    def norm_and_rope(y: Tensor, side: str) -> Tensor:
        if mixer.head_norms:
            y = ops.rms_norm(y, weights[f"{side}_norm"], norm.eps)
        if mixer.rope.dims == mixer.head_dim:
            return ops.rope(y, *rope)
        first, rest = torch.split(y, [mixer.rope.dims, mixer.head_dim - mixer.rope.dims], dim=-1)
        return torch.cat([ops.rope(first, *rope), rest], dim=-1)

    q = project("q")
    if mixer.gated:
        q, gate = q.view(len(x), mixer.num_heads, 2, mixer.head_dim).unbind(2)
    q, k, v = norm_and_rope(q, "q"), norm_and_rope(project("k"), "k"), project("v")

    def store_and_attend(at: LayerView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ops.store_kv(k, v, at)
        return ops.paged_attention(q, at, mixer.scale)

    out = step.cache.run(index, step.batch, store_and_attend, q.to(x.dtype), k, v).flatten(1)
    if mixer.gated:
        out = ops.sigmoid_mul(gate.flatten(1), out.float(), x.dtype)
    return ops.linear(out, weights.matrix("o_proj"))


# -- Gated DeltaNet: one matrix of state a head, and a short convolution before it -------------------------------------------
#
#     x = silu(conv(projected)); q and k are normalized to unit vectors, q over sqrt(key_dim)
#     S = S * exp(-exp(a_log) * softplus(a + dt_bias));   S += k (v - S^T k) * sigmoid(b);   out = S^T q
#
# Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), as Qwen3-Next and Qwen3.5
# build it.


@dataclass(frozen=True)
class DeltaNet:
    """A mixer: the gated delta rule, with a state [key_dim, value_dim] for each head of V.

    Attributes:
        num_key_heads: heads of Q and of K; several heads of V share one.
        taps: number of tokens in the convolution's window.
        by_key_head: whether the checkpoint stacks projections key head by key head (Qwen3-Next).
        versions: versions of the state that the cache keeps; drafts need more.
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
        """The convolution's last inputs, and one matrix for each head of V, FP32."""
        shapes = {
            "conv": (self.taps - 1, sum(self.widths)),
            "delta": (self.num_value_heads, self.key_dim, self.value_dim),
        }
        return StateShape(tuple((name, shape, torch.float32) for name, shape in shapes.items()), self.versions)


def delta_tensors(mixer: DeltaNet, norm: Norm, hidden_size: int) -> dict[str, StoredTensor]:  # noqa: ARG001
    """Weight tensors of a `DeltaNet`."""
    hidden, heads, values = Axis(hidden_size), Axis(mixer.num_value_heads), Axis(mixer.widths[2])
    qkv_axis = Axis(sum(mixer.widths))
    stacked_rows = {"in_proj_qkvz": Axis(qkv_axis.size + values.size), "in_proj_ba": Axis(2 * heads.size)}
    separate_rows = {"in_proj_qkv": qkv_axis, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    rows = stacked_rows if mixer.by_key_head else separate_rows
    return {
        **{field: StoredTensor(f"linear_attn.{field}.weight", (axis, hidden)) for field, axis in rows.items()},
        "conv1d": StoredTensor("linear_attn.conv1d.weight", (qkv_axis, Axis(1), Axis(mixer.taps)), in_fp32=True),
        "a_log": StoredTensor("linear_attn.A_log", (heads,), in_fp32=True),
        "dt_bias": StoredTensor("linear_attn.dt_bias", (heads,), in_fp32=True),
        "delta_norm": StoredTensor("linear_attn.norm.weight", (Axis(mixer.value_dim),), in_fp32=True),
        "out_proj": StoredTensor("linear_attn.out_proj.weight", (hidden, values)),
    }


def gated_delta_net(x: Tensor, weights: LayerWeights, mixer: DeltaNet, norm: Norm, index: int, step: Step) -> Tensor:
    """The gated delta rule, with its state in the cache; a `MixerKind.mix`.

    Rounding points: as in `tq_ops.reference`; everything is FP32 from the projections to the gated norm.
    """
    ops = step.ops
    if mixer.by_key_head:
        qkvz, ba = (ops.linear(x, weights.matrix(f"in_proj_{parts}")) for parts in ("qkvz", "ba"))
        qkv, z, b, a = _split_projections(qkvz, ba, mixer)
    else:
        qkv, z, b, a = (ops.linear(x, weights.matrix(f"in_proj_{part}")) for part in ("qkv", "z", "b", "a"))
    delta_weights = weights["conv1d"], weights["a_log"], weights["dt_bias"]
    with step.cache.open(index, step.batch) as at:
        delta_out = ops.gated_delta(qkv, a, b, *delta_weights, at)
    y = ops.rms_norm(delta_out, weights["delta_norm"], norm.eps)
    return ops.linear(ops.silu_mul(z, y.flatten(1), x.dtype), weights.matrix("out_proj"))


def _split_projections(qkvz: Tensor, ba: Tensor, mixer: DeltaNet) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K and V in one tensor, z, b and a, from projections that are stacked key head by key head."""
    per_key = mixer.num_value_heads // mixer.num_key_heads
    values = per_key * mixer.value_dim
    by_head = qkvz.view(len(qkvz), mixer.num_key_heads, -1)
    parts = torch.split(by_head, [mixer.key_dim, mixer.key_dim, values, values], dim=-1)
    q, k, v, z = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in torch.split(ba.view(len(ba), mixer.num_key_heads, -1), per_key, dim=-1))
    return torch.cat([q, k, v], dim=-1), z, b, a


MIXERS: dict[type, MixerKind] = {
    Attention: MixerKind(attention_tensors, attend),
    DeltaNet: MixerKind(delta_tensors, gated_delta_net),
}
"""Class of a mixer's declaration -> its code."""


def mixer_kind(mixer: Mixer) -> MixerKind:
    """The entry of a mixer in `MIXERS`; a ValueError if there is none."""
    kind = MIXERS.get(type(mixer))
    if kind is None:
        raise ValueError(f"nothing here runs a layer that mixes tokens by {type(mixer).__name__}")
    return kind
