"""Ranks as processes over gloo, for tests: they start as quickly as a fork, from a server that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from small_models import new_cache, new_paging, small_model

from haarkv.engine.ranks import join
from haarkv.executors import catalog
from haarkv.executors.base import Executor, prefill, verify
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import SINGLE_RANK, Alone, Ranks, Split
from haarkv.models.weights import Weights, assemble, checkpoint_tensors
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.layers.ranks import follow, multi_rank_executor
from haarkv.validation.layers.runner import validate

_TIMEOUT_S = 300
_PROCESSES = multiprocessing.get_context("forkserver")
# Modules of the package alone: the server does not know this folder.
_PROCESSES.set_forkserver_preload(["haarkv.engine.ranks", "haarkv.executors.cpu", "haarkv.models.catalog"])


def on_ranks(size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What `job(ranks, *args)` returns on each of several ranks. The job is a function of this module."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ends = [_PROCESSES.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _PROCESSES.Process(target=_run, args=(rank, size, port, sender, job, args)) for rank, (_, sender) in enumerate(ends)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in ends:
            sender.close()
        results = [pickle.loads(r.recv_bytes()) if r.poll(_TIMEOUT_S) else ("silent", None) for r, _ in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, (problem, _) in enumerate(results):
        assert not problem, f"rank {rank}: {problem}"
    return [result for _, result in results]


def _run(rank: int, size: int, port: int, sender: Any, job: Callable[..., Any], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    # As torchrun has it.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with join(timeout_s=60) as ranks:
            result = ("", job(ranks, *args))
    except Exception as error:
        result = (f"{type(error).__name__}: {error}", None)
    # As bytes: torch would hand tensors over in memory that this process owns.
    sender.send_bytes(pickle.dumps(result))


# -- Models and jobs ---------------------------------------------------------------------------------------------------------


def rank_part(whole: DecoderModel, ranks: Ranks) -> DecoderModel:
    """A rank's part of a model that is here whole."""
    split, tensor_specs = Split(whole.config, ranks.rank, ranks.size), checkpoint_tensors(whole.config)
    tensors = dict(whole.weights.named_tensors())
    weights: Weights = assemble(split.part, lambda name: tensors[name][split.slices(tensor_specs[name].axes)].clone())
    return DecoderModel.from_weights(split.part, weights, ranks)


def run_small(
    ranks: Ranks, executor: str, config: ModelConfig, dtype: torch.dtype, kv: str, lengths: Sequence[int], steps: int
) -> dict[str, Any]:
    """Prefill prompts of these lengths and decode some fixed tokens, with a rank's part of a small random model.

    Returns:
        logits [1 + steps, B, vocab], the last hidden states, what the caches hold by layer, side and field, and bytes.
    """
    model = rank_part(small_model(config, seed=3, dtype=dtype), ranks)
    config, one = model.config, open_executor(executor, model, KVSpec(kv).plan(config.num_layers))
    cache = new_cache(config, kv, num_blocks=8, block_size=128)
    paging = new_paging(cache, [5, 2, 7, 0, 1, 3, 4, 6])
    sequences = [paging.add() for _ in lengths]
    generator = torch.Generator().manual_seed(11)
    tokens = [torch.randint(config.vocab_size, (n,), generator=generator) for n in lengths]
    logits = [prefill(one, torch.cat(tokens), paging.batch(sequences, list(lengths)), cache)]
    for _ in range(steps):
        token = torch.randint(config.vocab_size, (len(lengths),), generator=generator)
        logits.append(verify(one, token, paging.batch(sequences, [1] * len(lengths)), cache))
    last = torch.randn(len(lengths), config.hidden_size, generator=generator).to(model.dtype)
    batch = paging.batch(sequences, [1] * len(lengths))
    hidden = one.layers(last, range(config.num_layers), batch, cache)
    fields = [
        {
            side: {name: t.clone() for name, t in side_fields.items()}
            for side, side_fields in (("k", cache.kv[i].k.fields), ("v", cache.kv[i].v.fields))
        }
        for i in range(config.num_layers)
    ]
    return {
        "logits": torch.stack(logits),
        "hidden": hidden,
        "fields": fields,
        "kv": cache.nbytes,
    }


def open_executor(name: str, model: DecoderModel, plan: Any) -> Executor:
    if name == "cuda":
        from haarkv.executors.cuda import CudaExecutor

        return CudaExecutor(model, interpreted=True)
    return catalog.create(name, model, plan)


def alone(*args: Any) -> dict[str, Any]:
    """`run_small` in this process, on one rank."""
    return run_small(SINGLE_RANK, *args)


class Faulty:
    """Ranks of which one does something wrong; see `Ranks`."""

    def __init__(self, ranks: Ranks, fault: str) -> None:
        self._ranks, self._fault, self._sums = ranks, fault, 0
        self.rank, self.size, self.local = ranks.rank, ranks.size, ranks.local
        self.gather, self.share, self.collect = ranks.gather, ranks.share, ranks.collect

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        total = self._ranks.sum(partial.clone())
        return partial if self._fault == "a sum is left out" else total


def rank_validation(
    ranks: Ranks, executor: str, config: ModelConfig, dtype: torch.dtype, lengths: Sequence[int], steps: int, fault: str = ""
) -> Any:
    """The report of `validate` on a small random model with a `tq4` cache; None on other ranks than 0."""
    whole, plan = small_model(config, seed=3, dtype=dtype), KVSpec("tq4").plan(config.num_layers)
    part = rank_part(whole, Faulty(ranks, fault) if fault else ranks)
    if fault == "a rank has another's keys":
        first_layers = rank_part(whole, Alone(0, ranks.size)).weights.layers
        layers = tuple(
            ours.map(lambda field, tensor, first=first: first[field] if field == "k_proj" else tensor)
            for ours, first in zip(part.weights.layers, first_layers, strict=True)
        )
        part = replace(part, weights=replace(part.weights, layers=layers))
    on_trial = open_executor(executor, part, plan)
    if ranks.rank:
        return follow(on_trial, ranks, config, plan)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    with multi_rank_executor(on_trial, ranks, config, plan) as candidate:
        return validate(catalog.create("reference", whole, plan), candidate, whole, prompts, steps, plan)
