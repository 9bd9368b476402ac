"""The ops that a KV format adds to a layer, one by one: quantizing, storing, attending.

tq bench ops --model random:14b --contexts 4096 --kv tq4,q8_0 --executor cpu
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from haarkv.benchmarks.caches import filled, random_kv
from haarkv.benchmarks.decode import Request, sides_of
from haarkv.benchmarks.decode_cost import Case
from haarkv.benchmarks.timing import Machine, OnTurn, measure_machine, take_turns
from haarkv.executors.base import Executor
from haarkv.models.config import ModelConfig
from haarkv.models.catalog import load_model
from haarkv.models.checkpoint import Progress
from haarkv.tq_ops.kv.plan import KVPlan

PREFILL_TOKENS = 64
"""New tokens of a sequence in the rows that are no decode step."""


@dataclass(frozen=True)
class OpRow:
    """One op of one executor and format in one case.

    Attributes:
        op: `quantize` (the format in plain torch), `store_kv` (quantize and append) or `paged_attention`.
        new_tokens: of each sequence.
        ms, low, high: median and extremes, in milliseconds, of one layer.
    """

    op: str
    who: str
    batch: int
    context: int
    new_tokens: int
    ms: float
    low: float
    high: float

    def as_json(self) -> dict[str, Any]:
        """For a JSON line."""
        return asdict(self)


def measure(
    request: Request, progress: Progress | None = None, on_turn: OnTurn = lambda _: None
) -> tuple[Machine, list[OpRow]]:
    """Every op of a request, case by case, one layer at a time.

    Raises:
        InputError: as `benchmarks.decode.measure`; an executor without an op table has no ops to measure.
    """
    model = load_model(request.model, request.dtype, request.layers, progress)
    sides = {who: side for who, side in sides_of(request, model).items() if side[0].ops is not None}
    device = next(iter(sides.values()))[0].device
    rows: list[OpRow] = []
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        runs: dict[tuple[str, str, int], Callable[[], object]] = {}
        for who, (executor, plan) in sides.items():
            for new_tokens in (1, PREFILL_TOKENS):
                if new_tokens < case.context:
                    for op, run in _runs(executor, plan, model.config, case, new_tokens).items():
                        runs[op, who, new_tokens] = run
        named = {" ".join(map(str, key)): run for key, run in runs.items()}
        times = take_turns(named, device, repeats=request.repeats, on_turn=on_turn)
        for (op, who, new_tokens), taken in zip(runs, times.values(), strict=True):
            rows.append(OpRow(op, who, case.batch, case.context, new_tokens, taken.ms, taken.low, taken.high))
    return measure_machine(device), rows


def _runs(
    executor: Executor, plan: KVPlan, config: ModelConfig, case: Case, new_tokens: int
) -> dict[str, Callable[[], object]]:
    """The ops of one layer for so many new tokens of each sequence; storing writes the same slots again and again."""
    assert executor.ops is not None
    k, v = random_kv(config, case, executor.device)
    one = KVPlan(plan.layers[:1], plan.recent, plan.sink)
    cache, paging = filled(one, config, Case(case.batch, case.context - new_tokens + 1), k, v, new_tokens)
    batch = paging.batch(range(case.batch), [new_tokens] * case.batch).to(executor.device)
    new_k, new_v = (x[:, :, -new_tokens:].transpose(1, 2).flatten(0, 1).float().contiguous() for x in (k, v))
    q = torch.randn(len(new_k), config.heads.num_heads, config.heads.head_dim, generator=torch.Generator().manual_seed(1))
    q = q.to(executor.device, torch.bfloat16)

    def quantize() -> None:
        for kv_format, x in ((one.k(0), new_k), (one.v(0), new_v)):
            if kv_format.group_tokens == 1:
                kv_format.quantize(x, 0)

    runs: dict[str, Callable[[], object]] = {
        "quantize": quantize,
        "store_kv": partial(executor.ops.store_kv, new_k, new_v, cache, 0, batch),
        "paged_attention": partial(executor.ops.paged_attention, q, cache, 0, batch, config.attentions[0].scale),
    }
    return {op: torch.inference_mode()(run) for op, run in runs.items()}
