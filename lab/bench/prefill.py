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
    Case,
    Measurement,
    almost_full,
    as_rows,
    layers_in_turn,
    random_kv,
    random_queries,
    token_bytes,
)
from haarkv.benchmarks.decode import NO_OPS, Request, load_request_model, open_executors
from haarkv.benchmarks.decode_cost import Cost, CostRow, attention_flops, pairs_seen
from haarkv.benchmarks.report import Report
from haarkv.benchmarks.timing import Limits, Machine, OnTurn, Run, take_turns
from haarkv.models.base import DecoderModel
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from lab.bench.peers import beside_peers

PROMPT_PEER = "sdpa bf16 causal"
TITLES = {"prefill": "attention of one layer over a whole prompt"}


def measure(
    request: Request, prefix_tokens: int, peers: bool, progress: Progress | None = None, on_turn: OnTurn = lambda _: None,
    model: DecoderModel | None = None,
) -> tuple[Machine, list[CostRow]]:  # fmt: skip
    """Every row of a request, whose contexts are the prompts' lengths, behind `prefix_tokens` tokens.

    Raises:
        InputError: as `decode.measure`.
    """
    model = model or load_request_model(request, progress)
    if model.config.state_shapes:
        raise InputError(f"{request.model} has layers with a state, and attention is measured of one kind of layer")
    sides = open_executors(request, model, on_turn)
    device = next(iter(sides.values()))[0].device
    limits, rows = Limits(device), list[CostRow]()
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        k, v = random_kv(model.config, Case(case.batch, case.context + prefix_tokens), device)
        args = Measurement(sides, model, case, k, v, limits, request.peer_variants, request.repeats, on_turn)
        rows += prompt_rows(args, prefix_tokens, peers)
    return limits.machine, [replace(row, machine=limits.machine) for row in rows]


def report(request: Request, prefix_tokens: int, machine: Machine, rows: list[CostRow]) -> Report:
    """As `decode.report`, with the number of stored tokens and speed-ups over peers."""
    result = beside_peers(decode.report("prefill", request, machine, rows, TITLES), rows, TITLES)
    return replace(result, values={**result.values, "stored": prefix_tokens})


def prompt_attention_cost(config: ModelConfig, case: Case, kv_bytes: float, prefix_tokens: int = 0) -> Cost:
    """Causal attention of every token of a prompt in the first layer; `kv_bytes` of one token's K and V, all heads.

    Args:
        prefix_tokens: before the prompt.
    """
    mixer, heads = config.layers[0].attention, config.attentions[0].heads
    queries, whole = case.batch * case.context, case.context + prefix_tokens
    flops = case.batch * attention_flops(mixer, pairs_seen(mixer, whole) - pairs_seen(mixer, prefix_tokens))
    return Cost(0, case.batch * whole * kv_bytes, 4 * queries * heads.num_heads * heads.head_dim, flops)


def causal_mask(window: int | None, prefix_tokens: int, new: int, device: torch.device) -> Any:
    """Which keys each query of a prompt behind stored tokens sees, as SDPA takes it; None where it sees all before it."""
    whole = prefix_tokens + new
    if window is None or window >= whole:
        return causal_lower_right(new, whole) if prefix_tokens else None
    return torch.ones(new, whole, dtype=torch.bool, device=device).tril(prefix_tokens).triu(prefix_tokens + 1 - window)


def prompt_rows(args: Measurement, prefix_tokens: int, peers: bool) -> Iterator[CostRow]:
    """Attention of a whole prompt of every side, over its packed cache, then others'; all take turns."""
    config, case, k, v = args.model.config, args.case, args.k, args.v
    q = random_queries(config, case.batch * case.context, k.device)
    runs: dict[str, Run] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in args.sides.items():
        costs[who] = prompt_attention_cost(config, case, token_bytes(plan, config)[0], prefix_tokens)
        cache, batch = almost_full(*layers_in_turn(plan, config, 1), Case(case.batch, prefix_tokens + 1), k, v, case.context)
        note = "" if executor.ops else NO_OPS
        if cache.most_new_tokens and cache.most_new_tokens < case.context:
            note = f"its cache takes {cache.most_new_tokens} new tokens at a time"
        if executor.ops is None or note:
            yield CostRow("prefill", who, case, costs[who], args.limits.machine, None, note)
            continue
        executor.ops.store_kv(as_rows(k[:, :, prefix_tokens:]), as_rows(v[:, :, prefix_tokens:]), cache.view(0, batch))
        inputs = (q, cache.view(0, batch), config.layers[0].attention.scale)

        @torch.inference_mode()
        def ours(
            _: int, attend: Callable[..., Tensor] = executor.ops.paged_attention, operands: tuple[object, ...] = inputs
        ) -> Tensor:
            return attend(*operands)

        runs[who] = ours
    if peers:
        shape = config.attentions[0].heads
        cost = prompt_attention_cost(config, case, 4.0 * shape.num_kv_heads * shape.head_dim, prefix_tokens)
        rows_of_heads = q.view(case.batch, case.context, shape.num_heads, shape.head_dim).transpose(1, 2).contiguous()
        mask = causal_mask(config.layers[0].attention.window, prefix_tokens, case.context, k.device)

        @torch.inference_mode()
        def theirs(_: int = 0) -> Tensor:
            return scaled_dot_product_attention(
                rows_of_heads, k, v, mask, is_causal=mask is None, enable_gqa=True, scale=config.layers[0].attention.scale
            )  # fmt: skip

        runs[PROMPT_PEER], costs[PROMPT_PEER] = theirs, cost
    times = take_turns(runs, k.device, repeats=args.repeats, on_turn=args.on_turn, before_turn=args.limits.measure)
    for who, timing in times.items():
        yield CostRow("prefill", who, case, costs[who], args.limits.machine, timing, peer=who not in args.sides)
