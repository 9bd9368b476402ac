"""Whole decode steps as graphs: over packed codes, and the same step with the fastest SDPA over 16-bit K and V.

The bf16 step makes the same launches, norms, rotates and stores in one of them, too, and calls SDPA where the packed one
attends. SDPA may launch several kernels; one more pads its output where the batch is no power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from haarkv.benchmarks import decode_peers
from haarkv.benchmarks.cases import Case, decode, filled, kv_numbers, next_tokens, random_kv, random_queries
from haarkv.benchmarks.cases import token_bytes as bytes_of
from haarkv.benchmarks.decode_cost import step_cost
from haarkv.benchmarks.gpu.attention import BEST
from haarkv.benchmarks.gpu.device import FORMAT, Sizes, captured, time_of
from haarkv.benchmarks.gpu.log import Log, Row
from haarkv.executors.cuda import CudaExecutor
from haarkv.executors.cuda_graph import DecodeStep
from haarkv.models.base import DecoderModel, tables_of
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import ModelConfig
from haarkv.models.fused import FusedModel, fuse
from haarkv.tq_ops.cuda import ops
from haarkv.tq_ops.cuda.fused import CudaFused
from haarkv.tq_ops.cuda.layout import NO_FAULT
from haarkv.tq_ops.fused import Heads
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec

_FEW_LAYERS = 4
_SPARE_BYTES = 12 * 2**30
_SLOTS_LEFT = 4
DENSE = "bf16 sdpa"
Sdpa = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, Hq, D], K and V [B, Hkv, context, D] to [B, Hq, D]."""


def random_model(config: ModelConfig, device: torch.device) -> DecoderModel:
    """A model of these shapes with random bf16 weights, drawn on the device."""
    weights = random_weights(config, torch.bfloat16, device=device)
    return DecoderModel(config, weights, tables_of(config, device))


def layers_that_fit(config: ModelConfig, cases: list[Case], device: torch.device) -> int:
    """All layers, or a few where weights, packed and dense K and V of the largest case do not fit on the device."""
    if device.type != "cuda":
        return config.num_layers
    free, _ = torch.cuda.mem_get_info(device)
    layers = sum(4 * config.hidden_size * (of.heads.q_size + of.heads.kv_size) for of in config.attentions)
    layers += config.num_layers * 2 * 3 * config.hidden_size * config.common.mlp.width
    layers += layers // 2  # the executor packs projections of its own
    # Dense K and V of 16 bits a number, and packed ones of less than 5.
    kv = max(case.batch * case.context for case in cases) * sum(kv_numbers(config)) * (16 + 5) // 8
    tables = 2 * 2 * config.vocab_size * config.hidden_size
    return config.num_layers if layers + kv + tables + _SPARE_BYTES < free else _FEW_LAYERS


class Steps:
    """Steps of one model; each case with its own caches."""

    def __init__(self, sizes: Sizes, device: torch.device, log: Log) -> None:
        self.sizes, self.device, self.log = sizes, device, log
        self.config = sizes.config.with_layers(layers_that_fit(sizes.config, list(sizes.steps), device))
        self.fused = fuse(random_model(self.config, device), device)
        self.model = self.fused.model
        self.executor = CudaExecutor(self.model, interpreted=sizes.dry)

    def run(self) -> None:
        """A row for each way of running a case, and one that compares them."""
        for case in self.sizes.steps:
            name = f"{case.batch} x {case.context}"
            if not self.log.wants(f"{name} {BEST}"):
                continue
            with self.log.attempt(f"{name} {BEST}") as best, torch.inference_mode():
                best |= vars(case)
                self._case(case, name)
                found = {who: self.log.results.get(f"{name} {who}") for who in (FORMAT, DENSE)}
                us = {who: row["us"] for who, row in found.items() if row}
                best |= {"us_of": us}
                if len(us) == len(found):
                    best["gain"] = us[DENSE] / us[FORMAT]
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _case(self, case: Case, name: str) -> None:
        k, v = random_kv(self.config, case, self.device)
        plan = KVSpec(FORMAT).plan(self.config.num_layers)
        cache, paging = filled(plan, self.config, case, k, v, _SLOTS_LEFT)
        batch = paging.batch(range(case.batch), [1] * case.batch).to(self.device)
        tokens = next_tokens(self.config, case.batch, self.device)

        def packed() -> tuple[Callable[[], object], Row]:
            return partial(decode, self.executor, tokens, batch, cache), {"side": "ours"}

        def dense() -> tuple[Callable[[], object], Row]:
            attend, best = self._fastest_sdpa(k, v)
            kv = [(k.clone(), v.clone()) for _ in range(self.config.num_layers)]
            return dense_step(self.fused, cache, batch, tokens, kv, attend), {"attention": best, "side": "dense"}

        packed_bytes, bf16_bytes = bytes_of(plan, self.config), [2.0 * numbers for numbers in kv_numbers(self.config)]
        for who, make, kv_bytes in ((FORMAT, packed, packed_bytes), (DENSE, dense, bf16_bytes)):
            key = f"{name} {who}"
            if not self.log.wants(key):
                continue
            with self.log.attempt(key) as row:
                run, more = make()
                cost = step_cost(self.model, case, kv_bytes)
                row |= {**vars(case), "who": who, "layers": self.config.num_layers, **more, "bytes": cost.nbytes,
                        "weight_bytes": cost.weights, "kv_bytes": cost.kv}  # fmt: skip
                row |= time_of(run, 1, self.device, self.sizes)
                row |= {"tb_s": cost.nbytes / row["us"] / 1e6, "tokens_per_s": 1e6 * case.batch / row["us"]}
                if self.device.type == "cuda":
                    row["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30

    def _fastest_sdpa(self, k: Tensor, v: Tensor) -> tuple[Sdpa, str]:
        """How torch attends fastest to K and V of this shape, and its name."""
        q = random_queries(self.config, len(k), self.device)
        taken = {}
        for peer in decode_peers.attention(q, k, v):
            if "bf16" in peer.name and "sdpa" in peer.name:
                with suppress(RuntimeError):  # a backend that no graph can hold; attention's own part tells why
                    run = captured(peer.run, 2, self.device)
                    taken[peer.name] = time_of(run, 2, self.device, self.sizes)["us"]
        best = min(taken, key=lambda name: taken[name])
        gqa = " gqa" in best
        backend = next(way for word, way in decode_peers.sdpa_backends(self.device).items() if best.endswith(word))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = q.view(len(k), -1, 1, q.shape[-1]) if gqa else q.view(*k.shape[:2], -1, q.shape[-1])
            with sdpa_kernel(backend) if backend is not None else nullcontext():
                return scaled_dot_product_attention(rows, k, v, enable_gqa=gqa).reshape(q.shape)

        return attend, best


@dataclass(frozen=True)
class DenseOps(CudaFused):
    """The executor's fused ops with SDPA over K and V [B, Hkv, context, D] of each layer in place of attention over codes.

    What it computes means nothing: the queries come rotated, and their 16 bits are read as another type. It takes the time
    that such a step takes.
    """

    kv: Sequence[tuple[Tensor, Tensor]] = field(kw_only=True)
    attend: Sdpa = field(kw_only=True)

    def attention(
        self, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], cache: PagedKVCache, layer: int, batch: Batch,
        softmax_scale: float,
    ) -> Tensor:  # fmt: skip
        _, (rotated, _) = ops.rotate_and_append(qkv, heads, rope, cache, layer, batch, self.fault)
        k, v = self.kv[layer]
        # Converted, they would take a launch that a bf16 step does not make.
        out = self.attend(rotated[: len(k)].view(k.dtype), k, v)
        padding = len(rotated) - len(k)
        return (pad(out, (0, 0, 0, 0, 0, padding)) if padding else out).flatten(1)


def dense_step(
    model: FusedModel, cache: PagedKVCache, batch: Batch, tokens: Tensor, kv: Sequence[tuple[Tensor, Tensor]], attend: Sdpa
) -> Callable[[], object]:
    """A captured step of `DenseOps` and its head, over when the host knows that it went well, as an executor's is.

    Args:
        cache, batch: of the packed step, whose codes this one writes, too.
        kv: K and V of every layer.
    """
    dense = DenseOps(ops.new_fault(tokens.device), kv=kv, attend=attend)

    def step(token_ids: Tensor, batch: Batch) -> Tensor:
        return model.forward(token_ids, batch, cache, dense)

    pool = torch.cuda.graph_pool_handle() if tokens.device.type == "cuda" else None
    captured_step = DecodeStep(len(tokens), cache, model.model.config.max_position_embeddings, step, pool)

    @torch.inference_mode()
    def run() -> bool:
        logits = model.head(captured_step(tokens, batch), dense)
        return bool((dense.fault[0] == NO_FAULT) & torch.isfinite(logits).all())

    return run
