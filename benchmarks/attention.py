"""Attention of one layer beside torch's: a decode step's, with storing its new token, and a whole prompt's.

A model reads another layer's K and V with every call, so they come from memory, while code, query and rotation stay warm.
Here the same holds of a decode step: copies of the layer take turns, enough of them to exceed any processor's cache; of a
plan whose layers differ, its layers.
Storing a prompt is not timed. On a GPU a decode step's calls are captured as graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks import decode_peers
from haarkv.benchmarks.cases import (
    Case,
    as_rows,
    filled,
    first_layer,
    heads,
    layers_in_turn,
    random_queries,
    scale,
    seen,
    token_bytes,
)
from haarkv.benchmarks.decode_cost import Cost, CostRow, Kind, attention_cost, prompt_attention_cost, store_cost
from haarkv.benchmarks.timing import MOST_COPIES, Machine, OnTurn, take_rested_turns, take_turns
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable, with_ops

Sides = dict[str, tuple[Executor, KVPlan]]
Call = Callable[[int], object]

PROMPT_PEER = "sdpa bf16 causal"
NO_OPS = "its layers are whole programs"
NO_GRAPH = "no CUDA graph can hold it"
_COLD_BYTES = 128 * 2**20  # far more than a processor's cache holds, a GPU's included


def copies(layer_bytes: float) -> int:
    """How many copies of a layer's K and V take turns."""
    return max(1, min(MOST_COPIES, int(_COLD_BYTES // layer_bytes)))


@dataclass(frozen=True)
class Asked:
    """What both measurements are told; k, v [B, Hkv, stored + context, D] bf16, and whether others' attention is timed too.

    Attributes:
        stored: tokens before those of a prompt; 0 of a decode step.
    """

    sides: Sides
    model: DecoderModel
    case: Case
    k: Tensor
    v: Tensor
    machine: Machine
    peers: bool
    repeats: int
    on_turn: OnTurn
    stored: int = 0


def step_tables(ops: OpTable, device: torch.device) -> dict[str, OpTable]:
    """Op tables of a decode step, by what the names of their rows end with; nothing in one waits for the device.

    On a GPU attention by the Triton kernels is one of its own where the table takes CUDA C++ instead.
    """
    if device.type != "cuda":
        return {"": ops}
    from haarkv.tq_ops.cuda import nvrtc
    from haarkv.tq_ops.cuda import ops as cuda

    step = with_ops(ops, {"store_kv": partial(cuda.append, fault=cuda.new_fault(device))})
    return {"": step} | ({} if nvrtc.missing() else {" triton": with_ops(step, {"paged_attention": cuda.triton_attention})})


def decode_rows(asked: Asked) -> Iterator[CostRow]:
    """Decode attention and storing of every side, then attention of the peers; all take turns."""
    config, case, k, item = asked.model.config, asked.case, asked.k, asked.model.dtype.itemsize
    q = random_queries(config, case.batch, k.device, asked.model.dtype)
    runs: dict[tuple[Kind, str], Call] = {}
    costs: dict[tuple[Kind, str], Cost] = {}
    for who, (executor, plan) in asked.sides.items():
        if executor.ops is None:
            yield CostRow("attention", who, case, attention_cost(config, case, 0, item), asked.machine, None, NO_OPS)
            continue
        first = attention_cost(config, case, token_bytes(plan, config)[0], item)
        layers = layers_in_turn(plan, config, copies(first.kv))
        nbytes = statistics.mean(token_bytes(*layers))
        cost = attention_cost(config, case, nbytes, item)
        attends, runs["store", who] = _ours(step_tables(executor.ops, k.device), *layers, asked, q)
        costs["store", who] = store_cost(config, case, nbytes)
        for ending, attend in attends.items():
            runs["attention", who + ending], costs["attention", who + ending] = attend, cost
    keys, values = (x[:, :, -seen(config.layers[0].attention.window, case.context) :] for x in (k, asked.v))
    peers = list(decode_peers.attention(q, keys, values, copies)) if asked.peers else []
    if peers and peers[0].run and k.device.type == "cuda":
        exact = peers[0].run(0).float()
        peers += decode_peers.packages(q.to(k.dtype).unsqueeze(1), keys, values, exact, copies)
    for peer in peers:
        cost = attention_cost(config, case, peer.token_bytes, item)
        if peer.run is None:
            yield CostRow("attention", peer.name, case, cost, asked.machine, None, peer.note)
        else:
            runs["attention", peer.name], costs["attention", peer.name] = peer.run, cost
    named = {f"{kind} {who}": run for (kind, who), run in runs.items()}
    times = take_rested_turns(named, k.device, repeats=asked.repeats, on_turn=asked.on_turn)
    for kind, who in runs:
        taken = times.get(f"{kind} {who}")
        yield CostRow(kind, who, case, costs[kind, who], asked.machine, taken, "" if taken else NO_GRAPH)


def _ours(
    tables: dict[str, OpTable], plan: KVPlan, config: ModelConfig, asked: Asked, q: Tensor
) -> tuple[dict[str, Call], Call]:
    """Attention by each table over layers that take turns, and storing their last token again and again."""
    cache, batch = almost_full(plan, config, asked.case, asked.k, asked.v)
    new_k, new_v = (as_rows(x[:, :, -1:]) for x in (asked.k, asked.v))
    ops, layers = tables[""], config.num_layers
    for layer in range(layers):
        ops.store_kv(new_k, new_v, cache, layer, batch)

    @torch.inference_mode()
    def attend(number: int, ops: OpTable) -> Tensor:
        return ops.paged_attention(q, cache, number % layers, batch, scale(config))

    @torch.inference_mode()
    def store(number: int) -> None:
        ops.store_kv(new_k, new_v, cache, number % layers, batch)

    return {ending: partial(attend, ops=table) for ending, table in tables.items()}, store


def almost_full(
    plan: KVPlan, config: ModelConfig, case: Case, k: Tensor, v: Tensor, new: int = 1
) -> tuple[PagedKVCache, Batch]:
    """A cache that holds in every layer all but a case's last token, and the batch of its new tokens."""
    cache, paging = filled(plan, config, case, k, v, new)
    return cache, paging.batch(range(case.batch), [new] * case.batch).to(k.device)


def within(window: int | None, stored: int, new: int, device: torch.device) -> Any:
    """Which keys each query of a prompt behind stored tokens sees, as SDPA takes it; None where it sees all before it."""
    whole = stored + new
    if window is None or window >= whole:
        return causal_lower_right(new, whole) if stored else None
    return torch.ones(new, whole, dtype=torch.bool, device=device).tril(stored).triu(stored + 1 - window)


def prompt_rows(asked: Asked) -> Iterator[CostRow]:
    """Attention of a whole prompt of every side, over its packed cache, then others'; all take turns."""
    config, case, k, v, stored = asked.model.config, asked.case, asked.k, asked.v, asked.stored
    q = random_queries(config, case.batch * case.context, k.device)
    runs: dict[str, Callable[[], object]] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in asked.sides.items():
        costs[who] = prompt_attention_cost(config, case, token_bytes(plan, config)[0], stored)
        cache, batch = almost_full(*first_layer(plan, config), Case(case.batch, stored + 1), k, v, case.context)
        note = "" if executor.ops else NO_OPS
        if cache.most_new_tokens and cache.most_new_tokens < case.context:
            note = f"its cache takes {cache.most_new_tokens} new tokens at a time"
        if executor.ops is None or note:
            yield CostRow("prefill", who, case, costs[who], asked.machine, None, note)
            continue
        executor.ops.store_kv(as_rows(k[:, :, stored:]), as_rows(v[:, :, stored:]), cache, 0, batch)
        given = (q, cache, 0, batch, scale(config))

        @torch.inference_mode()
        def ours(attend: Callable[..., Tensor] = executor.ops.paged_attention, given: tuple[object, ...] = given) -> Tensor:
            return attend(*given)

        runs[who] = ours
    if asked.peers:
        shape = heads(config)
        cost = prompt_attention_cost(config, case, 4.0 * shape.kv * shape.dim, stored)
        rows = q.view(case.batch, case.context, shape.q, shape.dim)
        rows_of_heads = rows.transpose(1, 2).contiguous()
        mask = within(config.layers[0].attention.window, stored, case.context, k.device)

        @torch.inference_mode()
        def theirs() -> Tensor:
            return scaled_dot_product_attention(
                rows_of_heads, k, v, mask, is_causal=mask is None, enable_gqa=True, scale=scale(config)
            )  # fmt: skip

        runs[PROMPT_PEER], costs[PROMPT_PEER] = theirs, cost
        exact = theirs().transpose(1, 2).float()
        for peer in decode_peers.packages(rows, k, v, exact) if k.device.type == "cuda" else ():
            if peer.run is None:
                yield CostRow("prefill", peer.name, case, cost, asked.machine, None, peer.note)
            else:
                runs[peer.name], costs[peer.name] = partial(peer.run, 0), cost
    times = take_turns(runs, k.device, repeats=asked.repeats, warm_up=1, cold=False, on_turn=asked.on_turn)
    for who, taken in times.items():
        yield CostRow("prefill", who, case, costs[who], asked.machine, taken)
