"""Attention as `CpuOps.paged_attention` says that it rounds from avx512vnni on, in torch: what its integers do and no more.

Exact but for the rounding points: the query's rotated levels, centroids, and each block's weights as integers; the block's
probabilities and the output to BF16. For caches of one format in one plane, without tokens in BF16.
"""

import torch

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops.cpu.layout import whole_levels
from haarkv.tq_ops.reference import rounded_softmax

_LARGEST = 127 * 256 + 127


def _whole(x, largest_level):
    """Rows [..., n] as integers, and their steps: as fine as 16 bits allow, and no 32-bit sum of products overflows."""
    most = 0.999 * 2147483647 / largest_level - 0.5 * x.shape[-1]
    step = torch.maximum(x.abs().amax(-1, keepdim=True) / _LARGEST, x.abs().sum(-1, keepdim=True) / most)
    return torch.where(step > 0, (x / step).round(), 0.0).double(), step


def integer_attention(q, at, softmax_scale):
    """[T, Hq, D] bf16 of bf16 queries."""
    parts = zip(q.split(at.batch.query_start_loc.diff().tolist()), at.batch.sequences(), strict=True)
    return torch.cat([_sequence_attention(one, at.kv, sequence, softmax_scale) for one, sequence in parts])


def _sequence_attention(q, kv, sequence, softmax_scale):
    kv_format, heads, dim = kv.k.kv_format, kv.shape.num_kv_heads, kv.shape.head_dim
    levels, unit = whole_levels(kv_format.description(dim).centroids)
    rotation, largest = haar_rotation(kv.index, dim).float(), int(levels.abs().max())
    blocks = sequence.block_table[0].clamp(min=0).long()

    def unpack(fields):
        """Integers [Hkv, S, D] and scales [Hkv, 1, S]."""
        flat_fields = {name: x[blocks].transpose(0, 1).flatten(1, 2) for name, x in fields.items()}
        return levels[kv_format.levels(flat_fields).long()].double(), flat_fields["scale"].float().unsqueeze(1)

    (k, k_scale), (v, v_scale) = map(unpack, kv.fields)
    group, places = q.shape[1] // heads, torch.arange(k.shape[1])
    queries, step = _whole(q.float().unflatten(1, (heads, group)).permute(1, 2, 0, 3).flatten(1, 2) @ rotation, largest)
    logits = ((queries @ k.mT) * step * unit).float() * k_scale * softmax_scale
    hidden = places > sequence.positions.repeat(group).unsqueeze(1)
    weights, total = rounded_softmax(logits.masked_fill(hidden, -torch.inf), kv.block_size, torch.bfloat16)
    weights = (weights * v_scale).masked_fill(hidden, 0.0).unflatten(-1, (-1, kv.block_size))
    whole, step = _whole(weights, largest)
    out = torch.einsum("hgnk,hnkd->hgnd", whole, v.unflatten(1, (-1, kv.block_size))) * step * unit
    out = (out.sum(2) / total) @ rotation.double().T
    return out.float().unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2).to(torch.bfloat16)
