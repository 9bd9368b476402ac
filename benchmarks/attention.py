"""Decode attention of one layer, and storing its new token: ours beside torch's attention, over the same K and V.

A model reads another layer's K and V with every call, so they come from memory, while code, query and rotation stay warm.
Here the same holds: so many copies of the layer take turns that together they exceed any processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from haarkv.benchmarks import decode_peers
from haarkv.benchmarks.caches import filled
from haarkv.benchmarks.decode_cost import Case, Cost, CostRow, Kind, attention_cost, row, store_cost
from haarkv.benchmarks.timing import Machine, OnTurn, take_rested_turns
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable

Sides = dict[str, tuple[Executor, KVPlan]]
Call = Callable[[int], object]

_COLD_BYTES = 128 * 2**20
"""Far more than a processor's cache holds."""
MOST_COPIES = 64
"""As many layers as there are rotations; a short context stays within the cache all the same."""


def copies(layer_bytes: float) -> int:
    """How many copies of a layer's K and V take turns."""
    return max(1, min(MOST_COPIES, int(_COLD_BYTES // layer_bytes)))


def attention_rows(
    sides: Sides,
    model: DecoderModel,
    case: Case,
    k: Tensor,
    v: Tensor,
    machine: Machine,
    *,
    peers: bool,
    repeats: int,
    on_turn: OnTurn,
) -> Iterator[CostRow]:
    """Attention and storing of every side in a case, then of the peers; all take turns.

    Args:
        k, v: [B, Hkv, context, D] bf16.
        peers: whether torch's attention is timed too.
        repeats: turns that count.
    """
    config, item = model.config, model.dtype.itemsize
    q = torch.randn(case.batch, config.heads.num_heads, config.heads.head_dim, generator=torch.Generator().manual_seed(1))
    q = q.to(k.device, model.dtype)
    runs: dict[tuple[Kind, str], Call] = {}
    costs: dict[tuple[Kind, str], Cost] = {}
    for who, (executor, plan) in sides.items():
        if executor.ops is None:
            no_cost = attention_cost(config, case, 0, item)
            yield row("attention", who, case, no_cost, machine, None, "its layers are whole programs")
            continue
        one = KVPlan(plan.layers[:1], plan.recent, plan.sink)
        token_bytes = one.bytes_per_token(config.heads.num_kv_heads, config.heads.head_dim)
        cost = attention_cost(config, case, token_bytes, item)
        attend, store = _ours(executor.ops, plan, model, case, q, k, v, copies(cost.kv))
        runs["attention", who], costs["attention", who] = attend, cost
        runs["store", who], costs["store", who] = store, store_cost(config, case, token_bytes)
    if peers:
        for peer in decode_peers.attention(q, k, v, copies):
            runs["attention", peer.name] = peer.run
            costs["attention", peer.name] = attention_cost(config, case, peer.token_bytes, item)
    named = {f"{kind} {who}": run for (kind, who), run in runs.items()}
    times = take_rested_turns(named, k.device, repeats=repeats, on_turn=on_turn)
    for (kind, who), taken in zip(runs, times.values(), strict=True):
        yield row(kind, who, case, costs[kind, who], machine, taken)


def _ours(
    ops: OpTable, plan: KVPlan, model: DecoderModel, case: Case, q: Tensor, k: Tensor, v: Tensor, layers: int
) -> tuple[Call, Call]:
    """Attention over copies of a plan's first layer, and storing their last token again and again."""
    config = model.config
    copied = KVPlan(plan.layers[:1] * layers, plan.recent, plan.sink)
    cache, paging = filled(copied, config, case, k, v, 1)
    batch = paging.batch(range(case.batch), [1] * case.batch).to(k.device)
    new_k, new_v = (x[:, :, -1].float().contiguous() for x in (k, v))
    for layer in range(layers):
        ops.store_kv(new_k, new_v, cache, layer, batch)

    @torch.inference_mode()
    def attend(number: int) -> Tensor:
        return ops.paged_attention(q, cache, number % layers, batch, config.attentions[0].scale)

    @torch.inference_mode()
    def store(number: int) -> None:
        ops.store_kv(new_k, new_v, cache, number % layers, batch)

    return attend, store
