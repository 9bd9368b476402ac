"""The CUDA executor: layers over fused ops where those know them, else over the Triton op table; steps captured as graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.executors.reference import blame, not_finite_among_ranks
from haarkv.models import fused
from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.config import Attention, ModelConfig
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.cuda.available import triton_missing
from haarkv.tq_ops.cuda.block_planes import placed
from haarkv.tq_ops.cuda.layout import NO_FAULT, READS, fault_place
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kernel_support import unsupported
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.recurrent import UNSEEN
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.table import OpTable, with_ops

_AHEAD = 512, 20, 16, 2, 1  # new tokens that launch kernels of their own; 16 fit beside a tail without more memory


class CudaExecutor(Executor):
    """Runs a model on one NVIDIA GPU, in bf16 or fp32, with a cache that `READS` takes.

    A model that `models.fused` takes runs in few launches on one rank. Others, and parts of a model on several ranks, run op
    by op over `step_ops`, with the same rounding points.

    Nothing inside a step waits for the device. Vectors that are not finite, and missing recurrent states, are noted on the
    device; `head` then raises an error that names the weight.

    Attributes:
        ops: the table for single ops, which the validator replays.
        step_ops: the table of a step, whose ops do not wait to look for faults, so that a graph can hold them.
    """

    name = "cuda"
    compiled: Mapping[str, float] = MappingProxyType({})
    ops: OpTable

    def __init__(self, model: DecoderModel, device: str | None = None, *, interpreted: bool = False) -> None:
        self.device = torch.device("cpu") if interpreted else open_gpu(device)
        if reason := triton_missing():
            raise InputError(f"executor cuda cannot run this: {reason}")
        from haarkv.tq_ops.cuda import decode, delta, experts, ops

        self.config = model.config
        self.ops = cast(OpTable, ops)
        name = "Triton's interpreter" if interpreted else torch.cuda.get_device_name(self.device)
        slower = None if interpreted else decode.nvrtc_missing()
        self.description = f"cuda ({name})" if slower is None else f"cuda ({name}; decode attention by Triton: {slower})"
        self.simulated = interpreted
        self._fault = ops.new_fault(self.device)
        self._raise_fault = partial(ops.raise_fault, self._fault)
        waitless: dict[str, Callable[..., Any]] = {"store_kv": ops.append, "gated_delta": delta.advance}
        in_step = {name: partial(op, fault=self._fault) for name, op in waitless.items()}
        self.step_ops: OpTable = with_ops(self.ops, {**in_step, "experts": experts.run_experts})
        self._model: DecoderModel
        self._table: Any = self.step_ops
        if model.ranks.size == 1 and fused.unsupported(model.config) is None:
            self._model, self._table = fused.fuse(model, self.device, placed), ops.CudaFusedOps(self._fault)
        else:
            weights = fused.with_stacks(model.weights, model.config, self.device, placed)
            self._model = model.with_weights(weights, self.device)
        # A graph that holds sums over ranks was never tried: with several, steps are launched op by op.
        self._graphs = self.device.type == "cuda" and self._model.ranks.size == 1
        # Of each cache the memory pool of its graphs, None without them, and its decode steps by batch size.
        self._steps: WeakKeyDictionary[PagedKVCache, tuple[Any, dict[int, DecodeStep]]] = WeakKeyDictionary()

    @staticmethod
    def supports(config: ModelConfig, plan: KVPlan) -> str | None:
        others = {type(layer.mixer) for layer in config.layers} - {Attention, DeltaNet}
        if others:
            return f"it has no kernels for a layer that mixes tokens by {min(kind.__name__ for kind in others)}"
        return unsupported(READS, plan, config.kv_shapes)

    @torch.inference_mode()
    def compile_ahead(self, plan: KVPlan, on_program: Callable[[str], object]) -> None:
        """Compile the kernels of prompts of one sequence and of steps after them, in threads; those of other batches wait.

        Learned keys have kernels for each layer's bits: one by one, a small model's took longer than a minute. Triton keeps
        them on disk for the next time.
        """
        if self.simulated or self._model.ranks.size > 1:
            return
        from haarkv.tq_ops.cuda.available import compiled_ahead

        cache, paging = new_cache(self.config, plan, sequences=1, tokens=_AHEAD[0], device=self.device)
        sequence, began, count = paging.add(), time.perf_counter(), 0

        def report_kernels(kernels: int) -> None:
            nonlocal count
            count = kernels
            on_program(f"{kernels} kernels")

        with self._current(), compiled_ahead(report_kernels):
            most = min(cache.most_new_tokens or _AHEAD[0], self.config.max_position_embeddings)
            for new in (min(new, most) for new in _AHEAD):
                batch = paging.batch([sequence], [new]).to(self.device)
                paging.take_back([sequence], [new])
                tokens = torch.zeros(new, dtype=torch.int64, device=self.device)
                self._model.head(self._model.forward(tokens, batch, cache, self._table)[-1:], self._table)
        if count:
            self.compiled = {f"{count} kernels": time.perf_counter() - began}

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        """As `Executor.forward`, without waiting for the device; `head` raises its faults. Of one new token a sequence the
        result is a graph's own memory, valid until the next forward."""
        with self._current():
            if len(token_ids) > len(batch.seq_lens):
                cache.require_room(batch)
                return self._model.forward(token_ids, batch, cache, self._table)
            if cache not in self._steps:
                # A pool of its own: one that outlives its last graph takes no other.
                self._steps[cache] = torch.cuda.graph_pool_handle() if self._graphs else None, {}
            pool, by_size = self._steps[cache]
            if (size := padded_batch_size(len(token_ids))) not in by_size:
                by_size[size] = DecodeStep(size, cache, self.config.max_position_embeddings, self._step_on(cache), pool)
            return by_size[size](token_ids, batch)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        with self._current():
            logits = self._model.head(hidden, self._table)
            # The one wait for the device of a step.
            if bool(self._sound(logits)):
                return logits
            key = int(self._fault)
            self._fault.fill_(NO_FAULT)
            if self._model.ranks.size > 1:
                raise not_finite_among_ranks()
            raise self._blame(key)

    def _sound(self, logits: Tensor) -> Tensor:
        """Whether there is no fault and logits are finite: a scalar on the device."""
        return (self._fault[0] == NO_FAULT) & torch.isfinite(logits).all()

    def _step_on(self, cache: PagedKVCache) -> Callable[[Tensor, Batch], Tensor]:
        # A step keeps neither its cache, which keeps the step, nor this executor.
        weakly, model, table = ref(cache), self._model, self._table
        return lambda token_ids, batch: model.forward(token_ids, batch, cast(PagedKVCache, weakly()), table)

    def _blame(self, key: int) -> Exception:
        """The error of a fault."""
        if key == NO_FAULT:
            return blame(self._model.weights)
        layer, side, *_ = fault_place(key)
        if side == "state":
            return ValueError(UNSEEN)
        return blame(self._model.weights, f"layer {layer}: {side} was not finite or too large for its format")

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        with self._current():
            hidden = self._model.layers(hidden, span, batch, cache, self._table)
            self._raise_fault(cache, batch)
            return hidden

    def _current(self) -> AbstractContextManager[object]:
        """Makes its GPU the current one, whose launches, streams and graphs Triton uses."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def open_gpu(device: str | None) -> torch.device:
    """The GPU that a name means."""
    kind, _, number = (device or "cuda").partition(":")
    if kind != "cuda" or not (number.isdecimal() or (not number and ":" not in (device or ""))):
        raise InputError(f"executor cuda runs on cuda or cuda:N, not on {device!r}")
    count = torch.cuda.device_count()
    if not count:
        raise InputError("executor cuda needs an NVIDIA GPU and a PyTorch built for it; this machine has none")
    if int(number or 0) >= count:
        raise InputError(f"there is no cuda:{number}; this machine has {count} GPU{'s' * (count > 1)}")
    return torch.device("cuda", int(number or 0))


# -- Decode steps ------------------------------------------------------------------------------------------------------
Step = Callable[[Tensor, Batch], Tensor]
"""From token ids [B] and their batch to hidden states [B, hidden]."""

_LARGEST_POWER = 64


def padded_batch_size(sequences: int) -> int:
    """The batch size that a decode step is padded to: the next power of two, from 64 on the next multiple."""
    if sequences > _LARGEST_POWER:
        return -(-sequences // _LARGEST_POWER) * _LARGEST_POWER
    return 1 << (sequences - 1).bit_length()


class DecodeStep:
    """One decode step of at most `size` sequences on a cache, captured as a graph in `pool`, or without one if that is None.

    Padding sequences have slot -1, so nothing is stored, and length 0, so nothing is read. The cache must live as long.
    """

    def __init__(self, size: int, cache: PagedKVCache, max_context: int, step: Step, pool: Any) -> None:
        device, width = cache.device, min(cache.num_blocks, blocks_for(max_context, cache.block_size))
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._batch = Batch(
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
            block_table=torch.zeros(size, width, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
            rows=torch.zeros(size, dtype=torch.int64, device=device),
        )
        self._has_rows = cache.has_rows
        self._step = step  # what it reads must live as long as a graph that reads it
        self._run = self._capture(step, pool) if pool is not None else lambda: step(self._token_ids, self._fresh())

    def _capture(self, step: Step, pool: Any) -> Callable[[], Tensor]:
        # First calls compile and allocate; all sequences are padding, so nothing is stored.
        aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                step(self._token_ids, self._fresh())
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = step(self._token_ids, self._fresh())

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _fresh(self) -> Batch:
        """The batch without cached results, which a graph computes each time."""
        return Batch(**self._batch.tensors)

    def __call__(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """Hidden states [B, hidden] of a batch of one new token a sequence; valid until the next call."""
        count, blocks = len(token_ids), min(batch.block_table.shape[1], self._batch.block_table.shape[1])
        self._token_ids[:count] = token_ids
        if count < len(self._token_ids):
            self._token_ids[count:] = 0  # padding is alike: all of it chooses the same experts
            self._batch.slot_mapping[count:] = -1
            self._batch.seq_lens[count:] = 0
        self._batch.positions[:count] = batch.positions
        self._batch.slot_mapping[:count] = batch.slot_mapping
        self._batch.seq_lens[:count] = batch.seq_lens
        # Entries beyond a sequence's blocks, -1 or another sequence's, are never read.
        self._batch.block_table[:count, :blocks] = batch.block_table[:, :blocks]
        if self._has_rows:
            self._batch.rows[:count] = batch.rows
        return self._run()[:count]
