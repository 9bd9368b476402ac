"""A whole decode step with the fastest SDPA over 16-bit K and V, beside the same step over packed codes.

It makes the same launches, norms, rotates and stores in one of them, too, and calls SDPA where the packed one attends. SDPA
may launch several kernels; one more pads its output where the batch is no power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from haarkv.benchmarks.cases import Case, Measurement, Variant, filled_cache, random_queries
from haarkv.benchmarks.timing import take_turns
from haarkv.executors.cuda import DecodeStep
from haarkv.models.base import DecoderModel, rope_tables
from haarkv.models.config import ModelConfig
from haarkv.models.fused import FusedModel, fuse
from haarkv.models.weights import assemble, checkpoint_tensors
from haarkv.tq_ops.cuda import ops
from haarkv.tq_ops.cuda.layout import NO_FAULT
from haarkv.tq_ops.cuda.ops import CudaFusedOps
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import Heads
from lab.bench import peers

_SLOTS_LEFT = 4
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, Hq, D], K and V [B, Hkv, context, D] to [B, Hq, D]."""


def random_model(config: ModelConfig, device: torch.device) -> DecoderModel:
    """A model of these shapes with random bf16 weights, the same in every run; drawn on the device, and packed so that an
    executor takes them as they are."""
    specs, generator = checkpoint_tensors(config), torch.Generator(device).manual_seed(0)

    def draw(name: str) -> Tensor:
        spec, is_norm = specs[name], len(specs[name].shape) == 1 and not name.endswith(".bias")
        weight = torch.ones(spec.shape, dtype=spec.memory_dtype(torch.bfloat16), device=device)
        return weight if is_norm else weight.normal_(0.0, 0.02, generator=generator)

    weights = assemble(config, draw)
    return fuse(DecoderModel(config, weights, rope_tables(config, device)), device)


def sdpa_step(model: DecoderModel, case: Case, k: Tensor, v: Tensor) -> Iterator[Variant]:
    """The step as a peer, of a model from `random_model`; K and V [B, Hkv, context, D] bf16 are copied for each layer."""
    device, layers = k.device, model.config.num_layers
    cache, paging = filled_cache(KVSpec("tq4").plan(layers), model.config, case, k, v, _SLOTS_LEFT)
    attend, form = _fastest_sdpa(model.config, k, v)
    kv = [(k.clone(), v.clone()) for _ in range(layers)]
    tokens = torch.arange(case.batch, device=device) % model.config.vocab_size
    run = dense_step(fuse(model, device), cache, paging, tokens, kv, attend)
    yield Variant(f"{form} in our step", lambda _: run(), [2.0 * numbers for numbers in peers.kv_numbers(model.config)])


def sdpa(kind: str, args: Measurement) -> Iterator[Variant]:
    """SDPA beside ours: attention in every way that there is, and the fastest in our step."""
    yield from peers.attention(args) if kind == "attention" else sdpa_step(args.model, args.case, args.k, args.v)


def _fastest_sdpa(config: ModelConfig, k: Tensor, v: Tensor) -> tuple[Attend, str]:
    """How torch attends fastest to K and V of this shape, and its name."""
    every = peers.forms(random_queries(config, len(k), k.device), k, v)
    forms = {peer.name: peer.run for peer in every if peer.run and peer.name.startswith("sdpa bf16")}
    timings = take_turns(forms, k.device, repeats=2, counted_runs=5, capture=True)
    best = min(timings, key=lambda name: timings[name].ms)
    backend = next(way for word, way in peers.sdpa_backends(k.device).items() if best.endswith(word))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = " gqa" in best
        rows = q.view(len(k), -1, 1, q.shape[-1]) if gqa else q.view(*k.shape[:2], -1, q.shape[-1])
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return scaled_dot_product_attention(rows, k, v, enable_gqa=gqa).reshape(q.shape)

    return attend, best


@dataclass(frozen=True)
class DenseOps(CudaFusedOps):
    """The executor's fused ops with SDPA over K and V [B, Hkv, context, D] of each layer in place of attention over codes.

    What it computes means nothing: the queries come rotated, and their 16 bits are read as another type. It takes the time
    that such a step takes.
    """

    kv: Sequence[tuple[Tensor, Tensor]] = field(kw_only=True)
    attend: Attend = field(kw_only=True)

    def attention(self, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], at: LayerView, softmax_scale: float) -> Tensor:
        queries, ahead = ops.rotate_and_append(qkv, heads, rope, at, self.fault)
        query_rows = (ahead.queries if ahead else queries).view(-1, *queries.shape[1:])[: len(queries)]
        k, v = self.kv[at.layer]
        # Converted, they would take a launch that a bf16 step does not make.
        out = self.attend(query_rows[: len(k)].view(k.dtype), k, v)
        padding = len(query_rows) - len(k)
        return (pad(out, (0, 0, 0, 0, 0, padding)) if padding else out).flatten(1)


def dense_step(
    model: FusedModel, cache: PagedKVCache, paging: PagedSequences, tokens: Tensor, kv: Sequence[tuple[Tensor, Tensor]],
    attend: Attend,
) -> Callable[[], object]:  # fmt: skip
    """A captured step of `DenseOps` and its head; as `decode_step` it is over when the host has its tokens.

    Args:
        cache, paging: of the packed step, whose codes this one writes, too; always those of the same token.
        kv: K and V of every layer.
    """
    dense: Any = DenseOps(ops.new_fault(tokens.device), kv=kv, attend=attend)

    def step(token_ids: Tensor, batch: Batch) -> Tensor:
        return model.forward(token_ids, batch, cache, dense)

    pool = torch.cuda.graph_pool_handle() if tokens.device.type == "cuda" else None
    captured_step = DecodeStep(len(tokens), cache, model.config.max_position_embeddings, step, pool)

    each = range(len(tokens)), [1] * len(tokens)

    @torch.inference_mode()
    def run() -> bool:
        batch = paging.batch(*each).to(tokens.device)
        paging.take_back(*each)
        logits = model.head(captured_step(tokens, batch), dense)
        sound = bool((dense.fault[0] == NO_FAULT) & torch.isfinite(logits).all())
        logits.argmax(-1).tolist()
        return sound

    return run
