"""Latency of an executor by context and format: a prompt, a decode step and one call of a layer, by the device's own clock.

In a simulator each is called once, so that it is known to run; its times mean nothing and are not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from haarkv.benchmarks.caches import filled, random_kv
from haarkv.benchmarks.decode import decode_step, layer_call
from haarkv.benchmarks.decode_cost import Case
from haarkv.benchmarks.timing import OnTurn, take_turns
from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KVPlan

REPEATS, WARM_UP = 7, 2

Kind = Literal["prefill", "step", "layer"]


@dataclass(frozen=True)
class LatencyRow:
    """One call in one format at one context.

    Attributes:
        kind: a prompt of `context` tokens, a decode step behind so many, or a layer's call in such a step.
        tokens: that the call takes in, of all sequences.
        ms, low, high: median and extremes; None in a simulator.
        first_ms: the very first call, which may compile; counted in none of them.
    """

    kind: Kind
    kv: str
    context: int
    tokens: int
    ms: float | None
    low: float | None
    high: float | None
    first_ms: float | None

    @property
    def ms_per_token(self) -> float | None:
        """Of a prompt or a step."""
        return None if self.ms is None or self.kind == "layer" else self.ms / self.tokens


def measure_latency(
    executor: Executor,
    model: DecoderModel,
    plans: Mapping[str, KVPlan],
    contexts: Sequence[int],
    *,
    batch: int = 1,
    on_turn: OnTurn = lambda _: None,
) -> Iterator[LatencyRow]:
    """Every call, format and context; the formats of a case take turns over the same K and V.

    Raises:
        InputError: a call whose result is not finite, or all of one value.
    """
    for case in (Case(batch, context) for context in contexts):
        k, v = random_kv(model.config, case, executor.device)
        for kind in ("prefill", "step", "layer"):
            runs = {kv: _run(kind, executor, model, plan, case, k, v) for kv, plan in plans.items()}
            named = {f"{kind} {kv} {case.context}": _checked(run, f"{kind} {kv}") for kv, run in runs.items()}
            tokens = case.batch * (case.context if kind == "prefill" else 1)
            if executor.simulated:
                for name, run in named.items():
                    on_turn(name)
                    run()
                yield from (LatencyRow(kind, kv, case.context, tokens, None, None, None, None) for kv in runs)
                continue
            times = take_turns(named, executor.device, repeats=REPEATS, warm_up=WARM_UP, cold=False, on_turn=on_turn)
            for kv, t in zip(runs, times.values(), strict=True):
                yield LatencyRow(kind, kv, case.context, tokens, t.ms, t.low, t.high, t.first_ms)


def _run(
    kind: Kind, executor: Executor, model: DecoderModel, plan: KVPlan, case: Case, k: Tensor, v: Tensor
) -> Callable[[], Tensor]:
    """A call that can be repeated; it gives logits or hidden states."""
    if kind == "prefill":
        return _prompt(executor, model, plan, case)
    cache, paging = filled(plan, model.config, case, k, v, REPEATS + WARM_UP)
    if kind == "layer":
        return layer_call(executor, model, cache, paging, case)
    return decode_step(executor, cache, paging, case)


def _prompt(executor: Executor, model: DecoderModel, plan: KVPlan, case: Case) -> Callable[[], Tensor]:
    config = model.config
    cache = PagedKVCache(
        plan, config.kv_shapes,
        num_blocks=case.batch * blocks_for(case.context), num_rows=case.batch, device=executor.device,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(config.vocab_size, (case.batch, case.context), generator=generator).tolist()

    def run() -> Tensor:
        paging = PagedSequences(cache.num_blocks, cache.block_size, num_rows=case.batch)
        return prefill_in_chunks(executor, prompts, [paging.add() for _ in prompts], paging, cache)

    return run


def _checked(run: Callable[[], Tensor], name: str) -> Callable[[], None]:
    """The call, refused if its first result, which counts in no figure, is none."""
    sound = False

    def call() -> None:
        nonlocal sound
        result = run()
        if not sound:
            low, high = result.amin().item(), result.amax().item()
            if not -math.inf < low < high < math.inf:
                raise InputError(f"{name} gives no numbers: from {low} to {high}")
            sound = True

    return call
