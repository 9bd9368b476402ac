"""Attention of one layer over a whole prompt, by its length, executor and format, beside torch's.

    python -m lab.bench prefill --model random:14b --layers 1 --kv tq4 --contexts 1024,4096,16384 --executor cpu

Storing the prompt is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks import decode
from haarkv.benchmarks.cases import (
    Asked,
    Case,
    almost_full,
    as_rows,
    layers_in_turn,
    random_kv,
    random_queries,
    token_bytes,
)
from haarkv.benchmarks.decode import NO_OPS, Request, model_of, sides_of
from haarkv.benchmarks.decode_cost import Cost, CostRow, attention_flops, pairs_seen
from haarkv.benchmarks.report import Report
from haarkv.benchmarks.timing import Machine, OnTurn, Run, measure_machine, take_turns
from haarkv.models.base import DecoderModel
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError

PROMPT_PEER = "sdpa bf16 causal"
TITLES = {"prefill": "attention of one layer over a whole prompt"}


def measure(
    request: Request, stored: int, peers: bool, progress: Progress | None = None, on_turn: OnTurn = lambda _: None,
    model: DecoderModel | None = None,
) -> tuple[Machine, list[CostRow]]:  # fmt: skip
    """Every row of a request, whose contexts are the prompts' lengths, behind so many `stored` tokens.

    Raises:
        InputError: as `decode.measure`.
    """
    model = model or model_of(request, progress)
    if model.config.state_shapes:
        raise InputError(f"{request.model} has layers with a state, and attention is measured of one kind of layer")
    sides = sides_of(request, model, on_turn)
    device = next(iter(sides.values()))[0].device
    machine, rows = measure_machine(device), list[CostRow]()
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        k, v = random_kv(model.config, Case(case.batch, case.context + stored), device)
        asked = Asked(sides, model, case, k, v, machine, request.beside, request.repeats, on_turn)
        rows += prompt_rows(asked, stored, peers)
    return machine, rows


def report(request: Request, stored: int, machine: Machine, rows: list[CostRow]) -> Report:
    """As `decode.report`, with the number of stored tokens."""
    found = decode.report("prefill", request, machine, rows, TITLES)
    return replace(found, values={**found.values, "stored": stored})


def prompt_attention_cost(config: ModelConfig, case: Case, kv_bytes: float, stored: int = 0) -> Cost:
    """Causal attention of every token of a prompt in the first layer; `kv_bytes` of one token's K and V, all heads.

    Args:
        stored: tokens before the prompt.
    """
    mixer, of = config.layers[0].attention, config.attentions[0].heads
    queries, whole = case.batch * case.context, case.context + stored
    flops = case.batch * attention_flops(mixer, pairs_seen(mixer, whole) - pairs_seen(mixer, stored))
    return Cost(0, case.batch * whole * kv_bytes, 4 * queries * of.num_heads * of.head_dim, flops)


def within(window: int | None, stored: int, new: int, device: torch.device) -> Any:
    """Which keys each query of a prompt behind stored tokens sees, as SDPA takes it; None where it sees all before it."""
    whole = stored + new
    if window is None or window >= whole:
        return causal_lower_right(new, whole) if stored else None
    return torch.ones(new, whole, dtype=torch.bool, device=device).tril(stored).triu(stored + 1 - window)


def prompt_rows(asked: Asked, stored: int, peers: bool) -> Iterator[CostRow]:
    """Attention of a whole prompt of every side, over its packed cache, then others'; all take turns."""
    config, case, k, v = asked.model.config, asked.case, asked.k, asked.v
    q = random_queries(config, case.batch * case.context, k.device)
    runs: dict[str, Run] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in asked.sides.items():
        costs[who] = prompt_attention_cost(config, case, token_bytes(plan, config)[0], stored)
        cache, batch = almost_full(*layers_in_turn(plan, config, 1), Case(case.batch, stored + 1), k, v, case.context)
        note = "" if executor.ops else NO_OPS
        if cache.most_new_tokens and cache.most_new_tokens < case.context:
            note = f"its cache takes {cache.most_new_tokens} new tokens at a time"
        if executor.ops is None or note:
            yield CostRow("prefill", who, case, costs[who], asked.machine, None, note)
            continue
        executor.ops.store_kv(as_rows(k[:, :, stored:]), as_rows(v[:, :, stored:]), cache, 0, batch)
        given = (q, cache, 0, batch, config.layers[0].attention.scale)

        @torch.inference_mode()
        def ours(
            _: int, attend: Callable[..., Tensor] = executor.ops.paged_attention, given: tuple[object, ...] = given
        ) -> Tensor:
            return attend(*given)

        runs[who] = ours
    if peers:
        shape = config.attentions[0].heads
        cost = prompt_attention_cost(config, case, 4.0 * shape.num_kv_heads * shape.head_dim, stored)
        rows_of_heads = q.view(case.batch, case.context, shape.num_heads, shape.head_dim).transpose(1, 2).contiguous()
        mask = within(config.layers[0].attention.window, stored, case.context, k.device)

        @torch.inference_mode()
        def theirs(_: int = 0) -> Tensor:
            return scaled_dot_product_attention(
                rows_of_heads, k, v, mask, is_causal=mask is None, enable_gqa=True, scale=config.layers[0].attention.scale
            )  # fmt: skip

        runs[PROMPT_PEER], costs[PROMPT_PEER] = theirs, cost
    times = take_turns(runs, k.device, repeats=asked.repeats, on_turn=asked.on_turn)
    for who, taken in times.items():
        yield CostRow("prefill", who, case, costs[who], asked.machine, taken, peer=who not in asked.sides)
