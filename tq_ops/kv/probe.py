"""How much of some real K and V a format loses, in the units of what they are for: logits, and attention's output."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat


def stored_error(kv_format: KVFormat, layer: int, x: Tensor) -> Tensor | None:
    """Dequantized minus original vectors x [H, n, D], fp32; None of fewer than a group. K is taken after RoPE.

    Of a format that stores G tokens together, the last n % G are left out.
    """
    group, x = kv_format.group_tokens, x.float()
    if group == 1:
        return kv_format.dequantize(kv_format.quantize(x, layer), layer) - x
    x = x[:, : x.shape[1] // group * group]
    if not x.numel():
        return None
    groups = x.reshape(len(x), -1, group, x.shape[-1])
    return kv_format.dequantize(kv_format.quantize(groups, layer), layer).flatten(1, 2) - x


def logit_errors(error: Tensor, q: Tensor, softmax_scale: float) -> Tensor:
    """Root mean square change of some queries' logits by each key's error: [H, n] fp32, in nats.

    A change common to all keys of a query is left out, for softmax drops it.

    Args:
        error: [H, n, D] of the keys, after RoPE.
        q: [m, Hq, D], after RoPE; KV head g serves query heads g*Hq/H … (g+1)*Hq/H - 1.
    """
    by_head = q.float().reshape(len(q), len(error), -1, q.shape[-1])
    queries = by_head.permute(1, 0, 2, 3).flatten(1, 2)  # [H, m * Hq/H, D]
    changes: Tensor = (queries @ error.mT) * softmax_scale
    return (changes - changes.mean(-1, keepdim=True)).square().mean(1).sqrt()


def weighted_error(error: Tensor, x: Tensor, use: Tensor) -> Tensor:
    """Relative error of vectors x [H, n, D] with a weight per channel: [H] fp32, 1 if all is lost.

        sqrt(sum of use * error**2 / sum of use * x**2)

    Args:
        use: [H, D], cost of a channel's squared error.
    """
    weight = use.unsqueeze(1)
    total = (x.float().square() * weight).sum((1, 2))
    error_energy = (error.square() * weight).sum((1, 2))
    return torch.where(total > 0, error_energy / total, 0.0).sqrt()
