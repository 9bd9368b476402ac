"""Attention as `CpuOps.paged_attention` says that it rounds from avx512vnni on, in torch: what its integers do and no more.

Exact but for the rounding points: the query's rotated levels, centroids, and each block's weights as integers; the block's
probabilities and the output to BF16. For caches of one format in one plane, without tokens in BF16.
"""

import torch

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu.layout import whole_levels

_LARGEST = 127 * 256 + 127


def _whole(x, largest_level):
    """Rows [..., n] as integers, and their steps: as fine as 16 bits allow, and no 32-bit sum of products overflows."""
    most = 0.999 * 2147483647 / largest_level - 0.5 * x.shape[-1]
    step = torch.maximum(x.abs().amax(-1, keepdim=True) / _LARGEST, x.abs().sum(-1, keepdim=True) / most)
    return torch.where(step > 0, (x / step).round(), 0.0).double(), step


def integer_attention(q, cache, layer, batch, softmax_scale):
    """[T, Hq, D] bf16 of bf16 queries."""
    kv_format, heads, dim = cache.k_format(layer), cache.shape(0).num_kv_heads, cache.shape(0).head_dim
    levels, unit = whole_levels(kv_format.description(dim).centroids)
    rotation, largest = haar_rotation(layer, dim).float(), int(levels.abs().max())
    blocks = batch.block_table.clamp(min=0).long()

    def stored(fields):
        """Integers [B, Hkv, S, D] and scales [B, Hkv, 1, S]."""
        of = {name: x[blocks].transpose(1, 2).flatten(2, 3) for name, x in fields.items()}
        return levels[kv_format.levels(of).long()].double(), of["scale"].float().unsqueeze(2)

    (k, k_scale), (v, v_scale) = stored(cache.k_fields(layer)), stored(cache.v_fields(layer))
    token, position, valid = reference.pad_queries(batch)
    group, places = q.shape[1] // heads, torch.arange(k.shape[2])
    queries, step = _whole(reference._group_heads(q[token].float(), heads) @ rotation, largest)
    logits = ((queries @ k.mT) * step * unit).float() * k_scale * softmax_scale
    hidden = (places > position.unsqueeze(-1)).repeat(1, group, 1).unsqueeze(1)
    weights, total = reference._rounded_softmax(logits.masked_fill(hidden, -torch.inf), cache.block_size, torch.bfloat16)
    weights = (weights * v_scale).masked_fill(hidden, 0.0).unflatten(-1, (-1, cache.block_size))
    whole, step = _whole(weights, largest)
    out = torch.einsum("bhgnk,bhnkd->bhgnd", whole, v.unflatten(2, (-1, cache.block_size))) * step * unit
    out = (out.sum(3) / total) @ rotation.double().T
    return reference._ungroup_heads(out.float(), q.shape[1])[valid].to(torch.bfloat16)
