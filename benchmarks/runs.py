"""What `decode` times: calls of one layer's attention and of storing, whole steps and prompts; the place of others' calls.

A model reads another layer's K and V with every call of attention, so they come from memory, while code, query and rotation
stay warm. Here the same holds: copies of a layer take turns, enough of them to exceed any processor's cache; of a plan whose
layers differ, its layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.benchmarks.cases import (
    Case,
    as_rows,
    filled,
    layers_in_turn,
    new_pages,
    random_kv,
    random_queries,
    seen,
    token_bytes,
)
from haarkv.benchmarks.timing import MOST_COPIES, Machine, OnTurn, Run
from haarkv.engine.generation import prefill_in_chunks, tail_chunk
from haarkv.executors.base import Executor, verify
from haarkv.models.base import DecoderModel
from haarkv.models.caches import new_cache
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable, with_ops

COUNTED = {"attention": 5, "step": 3, "prompt": 1}
"""Runs of a turn that count."""
_COLD_BYTES = 128 * 2**20  # far more than a processor's cache holds, a GPU's included

Sides = dict[str, tuple[Executor, KVPlan]]


class Variant(NamedTuple):
    """Another program's way of computing what a case asks for.

    Attributes:
        run: None for the reason in `note`.
        kv_bytes: of one token's K and V in each layer, all heads; of attention alone, in the one layer.
        about: its version, and how it was built.
    """

    name: str
    run: Run | None
    kv_bytes: Sequence[float]
    note: str = ""
    about: str = ""


Beside = Callable[[str, "Asked"], Iterable[Variant]]
"""What takes turns with ours, by kind: attention, step or prompt."""


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


def steps_of(repeats: int) -> int:
    """Tokens that a measurement of steps appends to each sequence."""
    return (repeats + 1) * (1 + COUNTED["step"])


def copies(layer_bytes: float) -> int:
    """How many copies of a layer's K and V take turns."""
    return max(1, min(MOST_COPIES, int(_COLD_BYTES // layer_bytes)))


def attention_runs(executor: Executor, plan: KVPlan, asked: Asked) -> tuple[Run | None, Run | None, list[float]]:
    """Attention over layers that take turns, storing their last token again and again, and bytes of a token's K and V."""
    config, case, q = asked.model.config, asked.case, asked.queries
    if executor.ops is None:
        return None, None, [0.0]
    first = case.batch * seen(config.layers[0].attention.window, case.context) * token_bytes(plan, config)[0]
    plan, config = layers_in_turn(plan, config, copies(first))
    ops, layers, scale = step_table(executor.ops, asked.k.device), config.num_layers, config.layers[0].attention.scale
    cache, batch = almost_full(plan, config, case, asked.k, asked.v)
    new_k, new_v = (as_rows(x[:, :, -1:]) for x in (asked.k, asked.v))
    for layer in range(layers):
        ops.store_kv(new_k, new_v, cache, layer, batch)

    @torch.inference_mode()
    def attend(number: int) -> Tensor:
        return ops.paged_attention(q, cache, number % layers, batch, scale)

    @torch.inference_mode()
    def store(number: int) -> None:
        ops.store_kv(new_k, new_v, cache, number % layers, batch)

    return attend, store, [statistics.mean(token_bytes(plan, config))]


def step_table(ops: OpTable, device: torch.device) -> OpTable:
    """The op table of a decode step: nothing in it waits for the device."""
    if device.type != "cuda":
        return ops
    from haarkv.tq_ops.cuda import ops as cuda

    return with_ops(ops, {"store_kv": partial(cuda.append, fault=cuda.new_fault(device))})


def almost_full(
    plan: KVPlan, config: ModelConfig, case: Case, k: Tensor, v: Tensor, new: int = 1
) -> tuple[PagedKVCache, Batch]:
    """A cache that holds in every layer all but a case's last token, and the batch of its new tokens."""
    cache, paging = filled(plan, config, case, k, v, new)
    return cache, paging.batch(range(case.batch), [new] * case.batch).to(k.device)


def forward_run(kind: str, executor: Executor, plan: KVPlan, case: Case, repeats: int) -> Run:
    """A whole step of one new token a sequence, each behind the one before, or a whole prompt into an empty cache.

    Raises:
        InputError: when it is run for the first time, if its logits are all of one value.
    """
    config, device, sound = executor.config, executor.device, False
    if kind == "step":
        cache, paging = filled(plan, config, case, *random_kv(config, case, device), steps_of(repeats))
        tokens = torch.arange(case.batch, device=device) % config.vocab_size
    else:
        cache, _ = new_cache(
            config, plan, sequences=case.batch, tokens=case.context, device=device, chunk=tail_chunk(executor)
        )
        prompts = random_prompts(config, case)

    def logits() -> Tensor:
        if kind == "step":
            return verify(executor, tokens, paging.batch(range(case.batch), [1] * case.batch).to(device), cache)
        empty = new_pages(cache)
        return prefill_in_chunks(executor, prompts, [empty.add() for _ in prompts], empty, cache)

    def run(_: int) -> None:
        nonlocal sound
        found = logits()
        # A sampler reads the token on the host, so a forward is over when it is there.
        found.argmax(-1).tolist()
        if not sound:
            if found.amin() == found.amax():
                value = found.flatten()[0].item()
                raise InputError(f"a {kind} in {plan.describe()} at {case.context} tokens gives nothing but {value}")
            sound = True

    return run


def random_prompts(config: ModelConfig, case: Case) -> list[list[int]]:
    """Prompts of random ids."""
    draw = torch.Generator().manual_seed(case.context)
    prompts: list[list[int]] = torch.randint(config.vocab_size, (case.batch, case.context), generator=draw).tolist()
    return prompts
