"""Attention of one layer in a decode step, with storing its new token.

A model reads another layer's K and V with every call, so they come from memory, while code, query and rotation stay warm.
Here the same holds of a decode step: copies of the layer take turns, enough of them to exceed any processor's cache; of a
plan whose layers differ, its layers.
On a GPU the calls are captured as graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from haarkv.benchmarks.beside import Beside
from haarkv.benchmarks.cases import Case, as_rows, filled, layers_in_turn, random_queries, scale, token_bytes
from haarkv.benchmarks.decode_cost import Cost, CostRow, attention_cost, store_cost
from haarkv.benchmarks.timing import MOST_COPIES, Machine, OnTurn, take_rested_turns
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable, with_ops

Sides = dict[str, tuple[Executor, KVPlan]]
Call = Callable[[int], object]

NO_OPS = "its layers are whole programs"
NO_GRAPH = "no CUDA graph can hold it"
_COLD_BYTES = 128 * 2**20  # far more than a processor's cache holds, a GPU's included


def copies(layer_bytes: float) -> int:
    """How many copies of a layer's K and V take turns."""
    return max(1, min(MOST_COPIES, int(_COLD_BYTES // layer_bytes)))


@dataclass(frozen=True)
class Asked:
    """What a measurement is told; k, v [B, Hkv, context, D] bf16, the context with tokens that were stored before it."""

    sides: Sides
    model: DecoderModel
    case: Case
    k: Tensor
    v: Tensor
    machine: Machine
    beside: Beside
    repeats: int
    on_turn: OnTurn

    @property
    def queries(self) -> Tensor:
        """[B, Hq, D] of a decode step."""
        return random_queries(self.model.config, self.case.batch, self.k.device, self.model.dtype)


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
    """Decode attention and storing of every side, then others' attention; all take turns."""
    config, case, k, item = asked.model.config, asked.case, asked.k, asked.model.dtype.itemsize
    q = asked.queries
    runs: dict[tuple[str, str], Call] = {}
    costs: dict[tuple[str, str], Cost] = {}
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
    for other in asked.beside.attention(asked):
        cost = attention_cost(config, case, other.kv_bytes[0], item)
        if other.run is None:
            yield CostRow("attention", other.name, case, cost, asked.machine, None, other.note, peer=True)
        else:
            runs["attention", other.name], costs["attention", other.name] = other.run, cost
    ours = {f"{who}{ending}" for who in asked.sides for ending in ("", " triton")}
    named = {f"{kind} {who}": run for (kind, who), run in runs.items()}
    times = take_rested_turns(named, k.device, repeats=asked.repeats, on_turn=asked.on_turn)
    for kind, who in runs:
        taken = times.get(f"{kind} {who}")
        note = "" if taken else NO_GRAPH
        yield CostRow(kind, who, case, costs[kind, who], asked.machine, taken, note, peer=who not in ours)


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
