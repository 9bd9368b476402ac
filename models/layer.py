"""One decoder layer as it declares itself, the same for prefill and decode: it sees tokens, not phases."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.models.config import Activation, Experts, Layer
from haarkv.models.mixers import Step, kind_of
from haarkv.models.parallel import Ranks
from haarkv.models.tensors import LayerWeights
from haarkv.tq_ops.fused import ExpertOps
from haarkv.tq_ops.table import OpTable


def decoder_layer(hidden: Tensor, weights: LayerWeights, layer: Layer, index: int, step: Step, ranks: Ranks) -> Tensor:
    """Run one layer, which stores what it remembers.

        hidden += mixer(norm(hidden));   hidden += mlp(norm(hidden))      each result normed first where `norms_behind`

    Args:
        hidden: [T, hidden] bf16 or fp32, the model's dtype.
        index: of the layer, which chooses its rotations and its cache.
        ranks: who else runs this layer. The mixer and the MLP end in `ranks.sum` of what this rank's heads and columns make,
            fp32, before the residual is added: the hidden state is rounded as often as on one rank.
    Returns:
        [T, hidden] of hidden's dtype.
    Rounding points: those of `tq_ops.reference` and of the mixer; the hidden state once after each residual.
    """
    eps, ops = layer.norm.eps, step.ops

    def added(hidden: Tensor, update: Tensor, norm: str) -> Tensor:
        update = ranks.sum(update)
        if layer.norms_behind:
            update = ops.rms_norm(update, weights[norm], eps)
        return (hidden.float() + update).to(hidden.dtype)

    x = ops.rms_norm(hidden, weights["input_norm"], eps)
    hidden = added(hidden, kind_of(layer.mixer).mix(x, weights, layer.mixer, layer.norm, index, step), "mixer_out_norm")
    x = ops.rms_norm(hidden, weights["post_norm"], eps)
    if isinstance(layer.mlp, Experts):
        update = through_experts(x, weights, layer.mlp, ops)
    else:
        update = gated_mlp(x, weights, layer.mlp.activation, ops)
    return added(hidden, update, "mlp_out_norm")


def gated_mlp(x: Tensor, weights: LayerWeights, activation: Activation, ops: OpTable) -> Tensor:
    """`down(act(gate(x)) * up(x))` of x [T, hidden]: [T, hidden] fp32. The product is rounded once to x's dtype."""
    product = ops.silu_mul if activation == "silu" else ops.gelu_mul
    gate, up = ops.linear(x, weights.matrix("gate_proj")), ops.linear(x, weights.matrix("up_proj"))
    return ops.linear(product(gate, up, x.dtype), weights.matrix("down_proj"))


def through_experts(x: Tensor, weights: LayerWeights, mlp: Experts, ops: OpTable) -> Tensor:
    """Each token [T, hidden] through its most likely experts, summed by the router's weights: [T, hidden] fp32.

        share = softmax(x @ router.T), the largest `per_token` of it;   out = sum(share_e * expert_e(x))

    A shared expert's part, `sigmoid(x @ gate.T) * shared(x)`, is added last. Each token's experts are summed in the experts'
    order: who else is in the batch does not matter. The router's weights and the sum stay in FP32.
    """
    logits = ops.linear(x, weights.matrix("router"))
    if weights.stack is not None and isinstance(ops, ExpertOps):
        out = ops.experts(x, logits, weights.stack)
    else:
        out = _one_by_one(x, logits, weights, mlp, ops)
    if mlp.shared:
        y = gated_mlp(x, weights.within("shared_expert."), mlp.activation, ops)
        out += ops.sigmoid_mul(ops.linear(x, weights.matrix("shared_gate")).expand_as(y), y, torch.float32)
    return out


def _one_by_one(x: Tensor, logits: Tensor, weights: LayerWeights, mlp: Experts, ops: OpTable) -> Tensor:
    """The chosen experts, each once, on the tokens that chose it: [T, hidden] fp32."""
    share, chosen = logits.softmax(-1).topk(mlp.per_token)
    if mlp.normalized:
        share = share / share.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        y = gated_mlp(x[token], weights.within(f"experts.{expert}."), mlp.activation, ops)
        out[token] += share[token, place, None] * y
    return out
