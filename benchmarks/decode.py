"""Decode latency: attention alone and whole steps, ours beside torch's SDPA and transformers' caches, on the same tensors.

    tq bench decode --model random:0.6b --contexts 4096,16384 --kv bf16,tq4 --executor cpu

A row says what was measured, how many bytes it must move (weights, KV, rest) and how far it is from the floor of this machine,
measured in the same run: the longer of moving those bytes at a copy's speed and doing the operations at a matrix product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.benchmarks import decode_peers
from haarkv.benchmarks.decode_cost import Case, Cost, CostRow, Kind, attention_cost, row, step_cost
from haarkv.benchmarks.timing import Machine, measure_machine, take_turns
from haarkv.engine.session import plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.checkpoint import Progress
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, blocks_for
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

OnTurn = Callable[[str], None]
_FILL = 4096


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        model, dtype, layers, device: as in `engine.session.load`.
        executors, kvs: each executor is run with each KV format that it supports.
        peers: SDPA, and transformers' caches where they are installed.
        kinds: attention alone, whole steps, or both.
    """

    model: str
    executors: Sequence[str]
    kvs: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int]
    dtype: str = "bfloat16"
    layers: int | None = None
    device: str | None = None
    peers: bool = True
    kinds: Sequence[Kind] = ("attention", "step")
    repeats: int = 7


# -- Caches of random K and V ----------------------------------------------------------------------------------------------


def random_kv(config: DecoderConfig, case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V of one layer, each [B, Hkv, context, D] bf16: what every variant of a case stores."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (case.batch, config.num_kv_heads, case.context, config.head_dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in "kv")
    return k, v


def filled(
    plan: KVPlan, config: DecoderConfig, case: Case, k: Tensor, v: Tensor, steps: int
) -> tuple[PagedKVCache, PagedSequences]:
    """A cache that holds all but the last token of a case in every layer, with room for so many steps.

    Layer 0 is quantized; the others hold the same bytes where they have its formats, since no time depends on them.
    """
    blocks = blocks_for(case.context + steps)
    cache = PagedKVCache(
        plan, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, num_blocks=case.batch * blocks,
        num_rows=case.batch, device=k.device,
    )  # fmt: skip
    paging = PagedSequences(cache.num_blocks, cache.block_size, num_rows=case.batch)
    for sequence in [paging.add() for _ in range(case.batch)]:
        for begin in range(0, case.context - 1, cache.most_new_tokens or _FILL):
            end = min(begin + (cache.most_new_tokens or _FILL), case.context - 1)
            batch = paging.batch([sequence], [end - begin]).to(k.device)
            new_k, new_v = (x[sequence, :, begin:end].transpose(0, 1) for x in (k, v))
            for layer in range(len(plan.layers)):
                if layer == 0 or plan.layers[layer] != plan.layers[0] or plan.windowed:
                    cache.write(layer, new_k, new_v, batch)
    for layer in range(1, len(plan.layers)):
        if plan.layers[layer] == plan.layers[0] and not plan.windowed:
            for fields in (PagedKVCache.k_fields, PagedKVCache.v_fields):
                for name, tensor in fields(cache, layer).items():
                    tensor.copy_(fields(cache, 0)[name])
    return cache, paging


# -- Measuring -------------------------------------------------------------------------------------------------------------


def measure(
    request: Request, progress: Progress | None = None, on_turn: OnTurn = lambda _: None
) -> tuple[Machine, list[CostRow]]:
    """Every row of a request, case by case.

    Raises:
        InputError: a model, executor, format or device that is not there, or a case that the model's context does not hold.
    """
    model = load_model(request.model, request.dtype, request.layers, progress)
    config, longest = model.config, max(request.contexts)
    if "step" in request.kinds and longest + _steps(request) > config.max_position_embeddings:
        limit = config.max_position_embeddings - _steps(request)
        raise InputError(f"{request.model} has room for {limit} tokens before the steps that are measured, not {longest}")
    sides = sides_of(request, model)
    device = next(iter(sides.values()))[0].device
    machine = measure_machine(device)
    rows: list[CostRow] = []
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        k, v = random_kv(config, case, device)
        if "attention" in request.kinds:
            rows += _attention_rows(request, model, sides, case, k, v, machine, on_turn)
        if "step" in request.kinds:
            rows += _step_rows(request, model, sides, case, k, v, machine, on_turn)
    return machine, rows


def _steps(request: Request) -> int:
    """Tokens that a whole-step measurement appends to each sequence."""
    return request.repeats + 2


def sides_of(request: Request, model: DecoderModel) -> dict[str, tuple[Executor, KVPlan]]:
    """Every executor with every plan that it supports, by the name of its rows."""
    sides: dict[str, tuple[Executor, KVPlan]] = {}
    refused = ""
    for name in request.executors:
        executor: Executor | None = None
        for kv in request.kvs:
            plan = plan_for(KVSpec(kv), model.config)
            try:
                executor = executor or catalog.create(name, model, plan, None if name == "reference" else request.device)
            except InputError as error:
                refused = str(error)
                continue
            if reason := executor.supports(model.config, plan):
                refused = f"executor {name} cannot run {kv}: {reason}"
            else:
                sides[f"{name} {kv}"] = (executor, plan)
    if not sides:
        raise InputError(refused)
    return sides


Sides = dict[str, tuple[Executor, KVPlan]]


def _attention_rows(
    request: Request, model: DecoderModel, sides: Sides, case: Case, k: Tensor, v: Tensor, machine: Machine, on_turn: OnTurn
) -> Iterator[CostRow]:
    config, item = model.config, model.dtype.itemsize
    q = torch.randn(case.batch, config.num_heads, config.head_dim, generator=torch.Generator().manual_seed(1))
    q = q.to(k.device, model.dtype)
    runs: dict[str, Callable[[], object]] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in sides.items():
        if executor.ops is None:
            yield row(
                "attention", who, case, attention_cost(config, case, 0, item), machine, None, "its layers are whole programs"
            )
            continue
        one = KVPlan(plan.layers[:1], plan.recent, plan.sink)
        cache, paging = filled(one, config, case, k, v, 1)
        batch = paging.batch(range(case.batch), [1] * case.batch).to(k.device)
        cache.write(0, k[:, :, -1], v[:, :, -1], batch)
        runs[who] = _attend(executor, q, cache, batch, config.softmax_scale)
        costs[who] = attention_cost(config, case, one.bytes_per_token(config.num_kv_heads, config.head_dim), item)
    if request.peers:
        for who, run in decode_peers.sdpa(q, k, v).items():
            runs[who] = run
            costs[who] = attention_cost(config, case, 4 * config.num_kv_heads * config.head_dim, item)
    for who, taken in take_turns(runs, k.device, repeats=request.repeats, on_turn=on_turn).items():
        yield row("attention", who, case, costs[who], machine, taken)


def _attend(executor: Executor, q: Tensor, cache: PagedKVCache, batch: Batch, scale: float) -> Callable[[], object]:
    assert executor.ops is not None
    attention = executor.ops.paged_attention

    @torch.inference_mode()
    def run() -> object:
        return attention(q, cache, 0, batch, scale)

    return run


def _step_rows(
    request: Request, model: DecoderModel, sides: Sides, case: Case, k: Tensor, v: Tensor, machine: Machine, on_turn: OnTurn
) -> Iterator[CostRow]:
    config = model.config
    runs: dict[str, Callable[[], object]] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in sides.items():
        cache, paging = filled(plan, config, case, k, v, _steps(request))
        runs[who] = _step(executor, cache, paging, case)
        costs[who] = step_cost(model, case, plan.bytes_per_token(config.num_kv_heads, config.head_dim))
    if request.peers:
        for peer in decode_peers.transformers_steps(model, case.batch, k, v):
            size = config.num_layers * config.num_kv_heads * config.head_dim * 2 * peer.bits / 8
            costs[peer.name] = step_cost(model, case, size)
            if peer.run is None:
                yield row("step", peer.name, case, costs[peer.name], machine, None, peer.note)
            else:
                runs[peer.name] = peer.run
    # Weights and caches of a step leave no cache warm.
    for who, taken in take_turns(runs, k.device, repeats=request.repeats, cold=False, on_turn=on_turn).items():
        yield row("step", who, case, costs[who], machine, taken)


def _step(executor: Executor, cache: PagedKVCache, paging: PagedSequences, case: Case) -> Callable[[], object]:
    tokens = torch.arange(case.batch, device=cache.device) % executor.config.vocab_size

    def run() -> object:
        batch = paging.batch(range(case.batch), [1] * case.batch).to(cache.device)
        # A sampler reads the token on the host, so a step is over when it is there.
        return executor.decode(tokens, batch, cache).argmax(-1).tolist()

    return run
