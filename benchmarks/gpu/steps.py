"""Whole decode steps as graphs: over packed codes, and the same step with the fastest SDPA over 16-bit K and V.

The bf16 step makes the same launches, norms, rotates and stores in one of them, too, and calls SDPA where the packed one
attends. SDPA may launch several kernels; one more pads its output where the batch is no power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from haarkv.benchmarks import decode_peers
from haarkv.benchmarks.caches import filled
from haarkv.benchmarks.decode_cost import Case, step_cost
from haarkv.benchmarks.gpu.attention import BEST, FORMAT
from haarkv.benchmarks.gpu.data import kv_of
from haarkv.benchmarks.gpu.device import captured, time_of
from haarkv.benchmarks.gpu.log import Log, Row
from haarkv.benchmarks.gpu.sizes import Sizes
from haarkv.executors.cuda import CudaExecutor
from haarkv.executors.cuda_graph import DecodeStep
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.checkpoint import random_weights
from haarkv.models.fused import FusedModel, fuse
from haarkv.models.rope import RopeTable
from haarkv.tq_ops.cuda import ops
from haarkv.tq_ops.cuda.fused import CudaFused
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
    return DecoderModel(config, weights, RopeTable(config, device))


def layers_that_fit(config: ModelConfig, cases: list[Case], device: torch.device) -> int:
    """All layers, or a few where weights, packed and dense K and V of the largest case do not fit on the device."""
    if device.type != "cuda":
        return config.num_layers
    free, _ = torch.cuda.mem_get_info(device)
    layer = 2 * config.hidden_size * (2 * config.heads.num_heads * config.heads.head_dim + 2 * config.heads.num_kv_heads * config.heads.head_dim)
    layer += 2 * 3 * config.hidden_size * config.common.mlp.width
    layer += layer // 2  # the executor packs projections of its own
    # Dense K and V of 16 bits a number, and packed ones of less than 5.
    kv = max(case.batch * case.context for case in cases) * 2 * config.heads.num_kv_heads * config.heads.head_dim * (16 + 5) // 8
    tables = 2 * 2 * config.vocab_size * config.hidden_size
    return config.num_layers if config.num_layers * (layer + kv) + tables + _SPARE_BYTES < free else _FEW_LAYERS


class Steps:
    """Steps of one model; each case with its own caches."""

    def __init__(self, sizes: Sizes, device: torch.device, log: Log) -> None:
        self.sizes, self.device, self.log = sizes, device, log
        self.config = replace(sizes.config, num_layers=layers_that_fit(sizes.config, list(sizes.steps), device))
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
        k, v = kv_of(self.config, case.batch, case.context, self.device)
        plan = KVSpec(FORMAT).plan(self.config.num_layers)
        cache, paging = filled(plan, self.config, case, k, v, _SLOTS_LEFT)
        batch = paging.batch(range(case.batch), [1] * case.batch).to(self.device)
        tokens = torch.arange(case.batch, device=self.device) % self.config.vocab_size

        def packed() -> tuple[Callable[[], object], Row]:
            return partial(self.executor.decode, tokens, batch, cache), {}

        def dense() -> tuple[Callable[[], object], Row]:
            attend, best = self._fastest_sdpa(k, v)
            kv = [(k.clone(), v.clone()) for _ in range(self.config.num_layers)]
            step = DenseStep(self.fused, kv, cache, batch, tokens, attend)
            return step.run, {"attention": best}

        bf16_bytes = 4.0 * self.config.num_layers * self.config.heads.num_kv_heads * self.config.heads.head_dim
        packed_bytes = plan.bytes_per_token(self.config.heads.num_kv_heads, self.config.heads.head_dim)
        for who, make, kv_bytes in ((FORMAT, packed, packed_bytes), (DENSE, dense, bf16_bytes)):
            key = f"{name} {who}"
            if not self.log.wants(key):
                continue
            with self.log.attempt(key) as row:
                row |= {**vars(case), "who": who, "layers": self.config.num_layers}
                run, more = make()
                cost = step_cost(self.model, case, kv_bytes)
                row |= {**more, "bytes": cost.nbytes, "weight_bytes": cost.weights, "kv_bytes": cost.kv}
                row |= time_of(run, 1, self.device, self.sizes)
                row |= {"tb_s": cost.nbytes / row["us"] / 1e6, "tokens_per_s": 1e6 * case.batch / row["us"]}
                if self.device.type == "cuda":
                    row["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30

    def _fastest_sdpa(self, k: Tensor, v: Tensor) -> tuple[Sdpa, str]:
        """How torch attends fastest to K and V of this shape, and its name."""
        q = torch.randn(len(k), self.config.heads.num_heads, self.config.heads.head_dim, device=self.device).to(torch.bfloat16)
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

    Attributes:
        kv: K and V of every layer.
        attend: SDPA.
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


class DenseStep:
    """A captured step of `DenseOps`.

    Args:
        kv: K and V of every layer.
        cache, batch: of the packed step, whose codes this one writes, too.
    """

    def __init__(
        self, model: FusedModel, kv: Sequence[tuple[Tensor, Tensor]], cache: PagedKVCache, batch: Batch, tokens: Tensor,
        attend: Sdpa,
    ) -> None:  # fmt: skip
        self._batch, self._tokens = batch, tokens
        dense = DenseOps(ops.new_fault(tokens.device), kv=kv, attend=attend)

        def step(token_ids: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            logits = model.decode(token_ids, batch, cache, dense)
            return logits, torch.isfinite(logits).all()

        pool = torch.cuda.graph_pool_handle() if tokens.device.type == "cuda" else None
        self._step = DecodeStep(len(tokens), cache, model.model.config.max_position_embeddings, step, pool)

    @torch.inference_mode()
    def run(self) -> bool:
        """One step, over when the host knows that it went well, as an executor's is."""
        return bool(self._step(self._tokens, self._batch)[1])
