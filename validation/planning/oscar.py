"""Learn OSCAR's rotations of a model from a text, layer by layer, as its calibration does.

    K of a KV head: E[q q^T] of the queries that read it.   V: E[w v v^T],  w = k^T E[q q^T] k of the token's own key

Source: `qqt` and `sst` of its authors' `compute_kv_rotation.py`, for each KV head as in the second version of their files.
What a layer was given is kept until it is done: w needs all of its queries first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.codebooks.oscar import rotations
from haarkv.engine.session import Session
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.formats.learned import Calibration
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import with_ops
from haarkv.validation.fidelity.evaluation import run_span


def moments(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What K's and V's rotations are made of.

    Args:
        q: [T, Hq, D], queries after RoPE; the first Hq / H of them read the first KV head.
        k, v: [T, H, D], K after RoPE and V.
    Returns:
        two of [H, D, D] fp64.
    """
    tokens, heads, dim = k.shape
    of_head = q.double().reshape(tokens, heads, -1, dim).transpose(0, 1).flatten(1, 2)  # [H, T * Hq / H, D]
    asked = of_head.mT @ of_head / of_head.shape[1]
    keys, values = k.double().transpose(0, 1), v.double().transpose(0, 1)
    weight = ((keys @ asked) * keys).sum(-1, keepdim=True)
    return asked, (weight * values).mT @ values / weight.sum(1, keepdim=True).clamp(min=1e-12)


@torch.inference_mode()
def learn(model: DecoderModel, base: Session, windows: Sequence[Tensor]) -> Calibration:
    """Rotations of every layer, as `oscar2` takes them.

    Args:
        model: weights and shapes, on the CPU.
        base: gives the plan of the cache, bf16, and a shape to make caches of.
        windows: [n] int64 each, token ids.
    """
    seen: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        seen["k"].append(k)
        seen["v"].append(v)
        reference.store_kv(k, v, cache, layer, batch)

    def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        seen["q"].append(q)
        return reference.paged_attention(q, cache, layer, batch, softmax_scale)

    ops = with_ops(reference, {"store_kv": store_kv, "paged_attention": paged_attention})
    side = Session(base.name, base.config, ReferenceExecutor(model, ops), base.tokenizer, base.plan)
    hidden = [model.embed(window) for window in windows]
    bases: dict[str, list[Basis]] = {"k": [], "v": []}
    for layer in range(model.config.num_layers):
        hidden = [torch.cat(list(run_span(side, x, range(layer, layer + 1)))) for x in hidden]
        for name, moment in zip("kv", moments(*(torch.cat(seen[part]) for part in "qkv")), strict=True):
            bases[name].append(rotations(moment))
        for parts in seen.values():
            parts.clear()
    digest = hashlib.sha256()
    for basis in (*bases["k"], *bases["v"]):
        digest.update(basis.forward.numpy().tobytes())
    return Calibration(tuple(bases["k"]), tuple(bases["v"]), digest.hexdigest())
