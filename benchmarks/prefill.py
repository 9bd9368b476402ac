"""Attention of a whole prompt in one layer: ours over the packed cache, beside torch's causal attention over the same K and V.

    tq bench prefill --model random:14b --layers 1 --kv tq4 --contexts 1024,4096,16384 --executor cpu

Storing the prompt is not timed: `tq bench ops` times it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks.attention import Sides
from haarkv.benchmarks.caches import filled, random_kv
from haarkv.benchmarks.decode import Request, sides_of
from haarkv.benchmarks.decode_cost import Case, Cost, CostRow, row
from haarkv.benchmarks.decode_peers import SDPA
from haarkv.benchmarks.timing import Machine, OnTurn, measure_machine, take_turns
from haarkv.models.config import ModelConfig
from haarkv.models.catalog import load_model
from haarkv.models.checkpoint import Progress
from haarkv.tq_ops.kv.plan import KVPlan

PEER = "sdpa bf16 causal"
Call = Callable[[], object]


def measure(
    request: Request, progress: Progress | None = None, on_turn: OnTurn = lambda _: None
) -> tuple[Machine, list[CostRow]]:
    """Every side of a request and torch, case by case; all of a case take turns.

    Raises:
        InputError: as `benchmarks.decode.measure`; an executor without an op table has no attention to measure.
    """
    model = load_model(request.model, request.dtype, request.layers, progress)
    sides = {who: side for who, side in sides_of(request, model, on_turn).items() if side[0].ops is not None}
    device = next(iter(sides.values()))[0].device
    machine = measure_machine(device)
    rows: list[CostRow] = []
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        rows += _rows(request, model.config, sides, case, machine, device, on_turn)
    return machine, rows


def prompt_cost(config: ModelConfig, case: Case, kv_bytes: float) -> Cost:
    """Causal attention of every token of a prompt in one layer.

    Args:
        kv_bytes: of one token, K and V of all heads.
    """
    numbers = case.batch * case.context * config.heads.num_heads * config.heads.head_dim
    return Cost(0, case.batch * case.context * kv_bytes, 4 * numbers, 2 * numbers * (case.context + 1))


def _rows(
    request: Request, config: ModelConfig, sides: Sides, case: Case, machine: Machine, device: torch.device, on_turn: OnTurn
) -> Iterator[CostRow]:
    k, v = random_kv(config, case, device)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(case.batch, case.context, config.heads.num_heads, config.heads.head_dim, generator=generator).to(
        device, torch.bfloat16
    )
    runs: dict[str, Call] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in sides.items():
        assert executor.ops is not None
        one = KVPlan(plan.layers[:1], plan.recent, plan.sink)
        costs[who] = prompt_cost(config, case, one.bytes_per_token(config.heads.num_kv_heads, config.heads.head_dim))
        cache, paging = filled(one, config, Case(case.batch, 1), k, v, case.context)
        if cache.most_new_tokens and cache.most_new_tokens < case.context:
            note = f"its cache takes {cache.most_new_tokens} new tokens at a time"
            yield row("prefill", who, case, costs[who], machine, None, note)
            continue
        batch = paging.batch(range(case.batch), [case.context] * case.batch).to(device)
        new_k, new_v = (x.transpose(1, 2).flatten(0, 1).float().contiguous() for x in (k, v))
        executor.ops.store_kv(new_k, new_v, cache, 0, batch)
        arguments = (q.flatten(0, 1), cache, 0, batch, config.attentions[0].scale)

        @torch.inference_mode()
        def ours(
            attend: Callable[..., Tensor] = executor.ops.paged_attention, given: tuple[object, ...] = arguments
        ) -> Tensor:
            return attend(*given)

        runs[who] = ours
    if SDPA in request.peers:
        costs[PEER] = prompt_cost(config, case, 4.0 * config.heads.num_kv_heads * config.heads.head_dim)
        rows_of_heads = q.transpose(1, 2).contiguous()

        @torch.inference_mode()
        def theirs() -> Tensor:
            return scaled_dot_product_attention(
                rows_of_heads, k, v, is_causal=True, enable_gqa=True, scale=config.attentions[0].scale
            )  # fmt: skip

        runs[PEER] = theirs
    for who, taken in take_turns(runs, device, repeats=request.repeats, warm_up=1, cold=False, on_turn=on_turn).items():
        yield row("prefill", who, case, costs[who], machine, taken)
