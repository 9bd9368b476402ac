"""Decode latency: attention alone and whole steps, ours beside torch's SDPA and transformers' caches, on the same tensors.

    tq bench decode --model random:0.6b --contexts 4096,16384 --kv bf16,tq4 --executor cpu

A row says what was measured, how many bytes it must move (weights, KV, rest) and how far it is from the floor of this machine,
measured in the same run: the longer of moving those bytes at a copy's speed and doing the operations at a matrix product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from haarkv.benchmarks import decode_peers, whole
from haarkv.executors.base import verify
from haarkv.benchmarks.attention import Sides, attention_rows
from haarkv.benchmarks.caches import filled, random_kv
from haarkv.benchmarks.decode_cost import Case, Cost, CostRow, Kind, layer_cost, row, step_cost
from haarkv.benchmarks.decode_peers import LLAMA, SDPA, TRANSFORMERS, HFCache
from haarkv.benchmarks.llama_process import LlamaKV
from haarkv.benchmarks.plans import plan_of
from haarkv.benchmarks.timing import Machine, OnTurn, measure_machine, take_turns
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.catalog import load_model
from haarkv.models.checkpoint import Progress
from haarkv.models.parallel import ALONE, Ranks
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        model, dtype, layers, device: as in `engine.loading.load`.
        executors, kvs: each executor is run with each cache that it supports; caches as `benchmarks.plans` reads them.
        peers: of `decode_peers.PEERS`. transformers' caches are measured where they are installed; llama.cpp must be.
        llama_kvs: kinds of llama.cpp's KV cache.
        hf_caches: other caches for transformers' model, measured beside its own.
        kinds: attention alone, one call of a layer, whole prompts, whole steps, or several of them.
        isa: the instruction set of the CPU executor's kernels; the best unless given.
        resume: a file that keeps the times of whole prompts and of the steps after them, and has them already if it exists.
        ranks: who runs each step together. Of several, all figures are of one: its share of weights and cache.
    """

    model: str
    executors: Sequence[str]
    kvs: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int]
    dtype: str = "bfloat16"
    layers: int | None = None
    device: str | None = None
    peers: Sequence[str] = (SDPA, TRANSFORMERS)
    llama_kvs: Sequence[LlamaKV] = ()
    hf_caches: Callable[[ModelConfig], Sequence[HFCache]] = lambda _: ()
    kinds: Sequence[Kind] = ("attention", "layer", "step")
    repeats: int = 7
    isa: str | None = None
    resume: Path | None = None
    ranks: Ranks = ALONE


# -- Measuring -------------------------------------------------------------------------------------------------------------


def measure(
    request: Request, progress: Progress | None = None, on_turn: OnTurn = lambda _: None
) -> tuple[Machine, list[CostRow]]:
    """Every row of a request, case by case.

    Raises:
        InputError: a model, executor, format or device that is not there, or a case that the model's context does not hold.
    """
    if request.ranks.size > 1 and (request.peers or tuple(request.kinds) != ("step",)):
        raise InputError("ranks run whole steps together; attention alone and peers are measured on one")
    model = load_model(request.model, request.dtype, request.layers, progress, request.ranks)
    config, longest = model.config, max(request.contexts)
    if {"layer", "prompt", "step"} & set(request.kinds) and longest + _steps(request) > config.max_position_embeddings:
        limit = config.max_position_embeddings - _steps(request)
        raise InputError(
            f"{request.model} has room for {limit} tokens before the steps that are measured, not {longest}; lower --contexts"
        )
    sides = sides_of(request, model, on_turn)
    on_prompts = LLAMA in request.peers or "prompt" in request.kinds
    if on_prompts:
        whole.check(request, model, sides)
    device = next(iter(sides.values()))[0].device
    machine = measure_machine(device)
    rows: list[CostRow] = []
    for case in (Case(batch, context) for batch in request.batches for context in request.contexts):
        k, v = random_kv(config, case, device)
        if "attention" in request.kinds:
            peers = SDPA in request.peers
            rows += attention_rows(sides, model, case, k, v, machine, peers=peers, repeats=request.repeats, on_turn=on_turn)
        own_steps: tuple[Literal["layer", "step"], ...] = ("layer",) if on_prompts else ("layer", "step")
        for kind in own_steps:
            if kind in request.kinds:
                rows += _call_rows(kind, request, model, sides, case, k, v, machine, on_turn)
    if on_prompts:
        rows += whole.measure(request, model, sides, machine, on_turn)
    return machine, rows


def _steps(request: Request) -> int:
    """Tokens that a whole-step measurement appends to each sequence."""
    return request.repeats + 2


def sides_of(request: Request, model: DecoderModel, on_turn: OnTurn = lambda _: None) -> Sides:
    """Every executor with every plan that it supports, by the name of its rows; `on_turn` is told what is compiled."""
    sides: Sides = {}
    refused = ""
    for name in request.executors:
        executor: Executor | None = None
        for kv in request.kvs:
            plan = plan_of(kv, model.config)
            try:
                executor = executor or _executor(request, name, model, plan, on_turn)
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


def _executor(request: Request, name: str, model: DecoderModel, plan: KVPlan, on_turn: OnTurn) -> Executor:
    if request.isa is None:
        device = None if name == "reference" else request.device
        return catalog.create(name, model, plan, device, lambda program: on_turn(f"the compilation of {program}"))
    if name != CpuExecutor.name:
        raise InputError(f"executor {name} has no instruction sets to choose from; leave out --isa")
    return CpuExecutor(model, request.isa)


def _call_rows(
    kind: Literal["layer", "step"], request: Request, model: DecoderModel, sides: Sides, case: Case, k: Tensor, v: Tensor,
    machine: Machine, on_turn: OnTurn,
) -> Iterator[CostRow]:  # fmt: skip
    """One call of a layer, or a whole step, of every side in a case; beside steps those of transformers."""
    config = model.config
    runs: dict[str, Callable[[], object]] = {}
    costs: dict[str, Cost] = {}
    for who, (executor, plan) in sides.items():
        held = plan if kind == "step" else KVPlan(plan.layers[:1], plan.recent, plan.sink)
        token_bytes = held.bytes_per_token(config.heads.num_kv_heads, config.heads.head_dim)
        cost = step_cost(model, case, token_bytes) if kind == "step" else layer_cost(model, case, token_bytes)
        if executor.simulated:
            yield row(kind, who, case, cost, machine, None, SIMULATED)
            continue
        cache, paging = filled(held, config, case, k, v, _steps(request))
        if kind == "step":
            runs[who] = decode_step(executor, cache, paging, case)
        else:
            runs[who] = layer_call(executor, model, cache, paging, case)
        costs[who] = cost
    if TRANSFORMERS in request.peers and kind == "step":
        for peer in decode_peers.transformers_steps(model, case.batch, k, v, request.hf_caches(config)):
            size = config.num_layers * config.heads.num_kv_heads * config.heads.head_dim * 2 * peer.bits / 8
            costs[peer.name] = step_cost(model, case, size)
            if peer.run is None:
                yield row(kind, peer.name, case, costs[peer.name], machine, None, peer.note)
            else:
                runs[peer.name] = peer.run
    # Weights and caches of a step leave no cache warm.
    for who, taken in take_turns(runs, k.device, repeats=request.repeats, cold=False, on_turn=on_turn).items():
        compiled = dict(sides[who][0].compiled) if who in sides else None
        yield replace(row(kind, who, case, costs[who], machine, taken), compiled=compiled or None)


SIMULATED = "simulated: its times mean nothing, so that none is given"


def decode_step(executor: Executor, cache: PagedKVCache, paging: PagedSequences, case: Case) -> Callable[[], Tensor]:
    """A whole decode step of one new token a sequence, ready to be called again and again; it gives the logits [B, vocab]."""
    tokens = torch.arange(case.batch, device=cache.device) % executor.config.vocab_size

    def run() -> Tensor:
        batch = paging.batch(range(case.batch), [1] * case.batch).to(cache.device)
        logits = verify(executor, tokens, batch, cache)
        # A sampler reads the token on the host, so a step is over when it is there.
        logits.argmax(-1).tolist()
        return logits

    return run


def layer_call(
    executor: Executor, model: DecoderModel, cache: PagedKVCache, paging: PagedSequences, case: Case
) -> Callable[[], Tensor]:
    """One call of the first layer for one new token a sequence, always the same; it gives the hidden states [B, hidden]."""
    batch = paging.batch(range(case.batch), [1] * case.batch).to(cache.device)
    hidden = model.embed(torch.arange(case.batch) % model.config.vocab_size).to(cache.device)

    @torch.inference_mode()
    def run() -> Tensor:
        return executor.layers(hidden, range(1), batch, cache)

    return run
