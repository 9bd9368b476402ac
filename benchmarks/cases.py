"""Benchmark cases and caches: `--kv` lists, and the calls that are timed.

A model reads another layer's K and V with every call of attention, so they come from memory while code and query stay warm.
Here copies of a layer take turns, enough to exceed any processor's cache; of a plan with unequal layers, its layers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from haarkv.benchmarks.timing import MOST_COPIES, Limits, OnTurn, Run
from haarkv.engine.generation import prefill_in_chunks, tail_chunk
from haarkv.engine.plans import plan_for
from haarkv.executors.base import Executor, verify
from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.learned import LearnedFormat
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.recurrent import Recurrent
from haarkv.tq_ops.kv.shapes import RING_CHUNK
from haarkv.tq_ops.table import OpTable, with_ops

_FILL = 4096


@dataclass(frozen=True)
class Case:
    """Sequences, and tokens that each has stored after the step."""

    batch: int
    context: int


def visible_tokens(window: int | None, context: int) -> int:
    """Tokens that the last query of a context sees."""
    return context if window is None else min(context, window)


def token_bytes(plan: KVPlan, config: ModelConfig) -> list[float]:
    """Bytes of K and V of one token in each layer of a plan, all heads, scales included."""
    pairs = zip(plan.layers, config.kv_shapes, strict=True)
    return [
        sum(shape.num_kv_heads * f.bytes_per_vector(shape.head_dim) for f in pair) if shape else 0.0 for pair, shape in pairs
    ]


def layers_in_turn(plan: KVPlan, config: ModelConfig, copies: int) -> tuple[KVPlan, ModelConfig]:
    """Plan and config of the layers that take turns: copies of the first, or all layers like it where caches or learned keys
    differ.
    """
    like = [index for index, layer in enumerate(config.layers) if layer == config.layers[0]]
    layer_formats = [plan.layers[index] for index in like]
    if len(set(layer_formats)) == 1 and not any(isinstance(side, LearnedFormat) for side in layer_formats[0]):
        return KVPlan(plan.layers[:1] * copies, plan.recent, plan.sink), replace(config, layers=config.layers[:1] * copies)
    return KVPlan(tuple(layer_formats), plan.recent, plan.sink), replace(config, layers=tuple(config.layers[i] for i in like))


def random_kv(config: ModelConfig, case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V of one layer, each [B, Hkv, context, D] bf16."""
    generator = torch.Generator(device=device).manual_seed(0)
    _, kv, dim = config.attentions[0].heads
    shape = (case.batch, kv, case.context, dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in "kv")
    return k, v


def random_queries(config: ModelConfig, rows: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[rows, Hq, D] of one layer."""
    q, _, dim = config.attentions[0].heads
    return torch.randn(rows, q, dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def as_rows(x: Tensor) -> Tensor:
    """K or V [B, Hkv, T, D] as an op table stores it: [B * T, Hkv, D] fp32."""
    return x.transpose(1, 2).flatten(0, 1).float().contiguous()


def filled_cache(
    plan: KVPlan, config: ModelConfig, case: Case, k: Tensor, v: Tensor, steps: int
) -> tuple[PagedKVCache, PagedSequences]:
    """A cache that holds all but the last token of a case in every layer, with room for `steps` more.

    Of equal layers the first is quantized, the others copy its bytes. Recurrent states are zeros.
    """
    cache, paging = new_cache(
        config, plan, sequences=case.batch, tokens=case.context + steps, device=k.device, ring_chunk=max(RING_CHUNK, steps)
    )
    kinds = list(zip(plan.layers, cache.shapes, strict=True))
    source = [layer if plan.has_windows else kinds.index(kind) for layer, kind in enumerate(kinds)]
    for sequence in [paging.add() for _ in range(case.batch)]:
        for begin in range(0, case.context - 1, cache.most_new_tokens or _FILL):
            end = min(begin + (cache.most_new_tokens or _FILL), case.context - 1)
            batch = paging.batch([sequence], [end - begin]).to(k.device)
            new_k, new_v = (x[sequence, :, begin:end].transpose(0, 1) for x in (k, v))
            for layer in set(source) - config.state_shapes.keys():
                with cache.open(layer, batch) as at:
                    at.write(new_k, new_v)
    for layer in config.state_shapes:
        cast(Recurrent, cache.states[layer]).counts[: case.batch, 0] = case.context - 1
    for layer, first in enumerate(source):
        if layer != first and cache.shapes[layer]:
            for to, like in zip(cache.kv[layer].fields, cache.kv[first].fields, strict=True):
                for name, tensor in to.items():
                    tensor.copy_(like[name])
    return cache, paging


_PAIR = r"(?:k=[^,+/]+,v=[^,+/]+|[^,+/=]+)"
_CACHE = rf"(?P<pairs>{_PAIR}(?:/{_PAIR})*)(?P<beside>(?:\+(?:tail|sink)\d{{1,9}})*)"


def parse_caches(specs: Sequence[str]) -> list[str]:
    """Caches from lists of them, each once.

        list := cache {"," cache}
        cache := FILE of a plan | pair {"/" pair} {"+tail" N | "+sink" N}
        pair := NAME | "k=" NAME ",v=" NAME

    >>> parse_caches(["tq4,k=tq4,v=tq3+tail128", "k=tq4,v=tq3/bf16"])
    ['tq4', 'k=tq4,v=tq3+tail128', 'k=tq4,v=tq3/bf16']
    """
    caches: dict[str, None] = {}
    for spec in specs:
        parts = iter(part.strip() for part in spec.split(","))
        for whole in parts:
            while not is_file(whole) and whole.count("k=") != whole.count("v="):
                whole = f"{whole},{next(parts, '')}"
                if whole.endswith(","):
                    raise _unreadable(spec)
            for pair in [] if is_file(whole) else _split(whole)[0]:
                if not formats.needs_calibration(pair):
                    formats.parse(pair)
            caches[whole] = None
    return list(caches)


def is_file(kv: str) -> bool:
    """Whether a cache is the file of a plan."""
    return kv.endswith((".json", ".safetensors"))


def benchmark_plan(kv: str, config: ModelConfig) -> KVPlan:
    """The plan of a cache for a model; learned keys get synthetic coordinates."""
    if is_file(kv):
        return plan_for(plan_file.load(kv), config)
    pairs, tail, sink = _split(kv)
    pair_by_layer = {layer: pairs[layer % len(pairs)] for layer in range(config.num_layers)}
    if not any(map(formats.needs_calibration, pairs)):
        return plan_for(KVSpec(tail=tail, sink=sink, layers=pair_by_layer), config)
    calibration = synthetic.calibration(max(config.num_layers, MOST_COPIES), *config.attentions[0].heads[1:])
    formats_by_pair = {pair: formats.parse(pair, calibration) for pair in pairs}
    return KVPlan(tuple(formats_by_pair[pair] for pair in pair_by_layer.values()), tail, sink)


def _split(kv: str) -> tuple[list[str], int | None, int]:
    """Pairs, tail and sink."""
    read = re.fullmatch(_CACHE, kv)
    if read is None:
        raise _unreadable(kv)
    bf16_counts = {name: int(count) for name, count in re.findall(r"\+(tail|sink)(\d+)", read["beside"])}
    return read["pairs"].split("/"), bf16_counts.get("tail"), bf16_counts.get("sink", 0)


def _unreadable(spec: str) -> InputError:
    return InputError(
        f"cannot read --kv {spec!r}; write caches with commas between, each NAME or k=NAME,v=NAME, or several with / between "
        "for layers that take turns, then +tailN and +sinkN; or the file of a plan"
    )


# -- What is timed -----------------------------------------------------------------------------------------------------------

RUNS_PER_TURN = {"attention": 5, "step": 3, "prompt": 1}
_COLD_BYTES = 128 * 2**20  # far more than a processor's cache holds, a GPU's included

Sides = dict[str, tuple[Executor, KVPlan]]


class Variant(NamedTuple):
    """Another program's run of a case.

    Attributes:
        run: None for the reason in `note`.
        kv_bytes: of one token's K and V in each layer; for attention in one layer.
    """

    name: str
    run: Run | None
    kv_bytes: Sequence[float]
    note: str = ""


PeerVariants = Callable[[str, "Measurement"], Iterable[Variant]]
"""Other programs' variants of a kind: attention, step or prompt."""


@dataclass(frozen=True)
class Measurement:
    """Arguments of a measurement; k, v [B, Hkv, context, D] bf16."""

    sides: Sides
    model: DecoderModel
    case: Case
    k: Tensor
    v: Tensor
    limits: Limits
    peer_variants: PeerVariants
    repeats: int
    on_turn: OnTurn

    @property
    def queries(self) -> Tensor:
        """[B, Hq, D] of a decode step."""
        return random_queries(self.model.config, self.case.batch, self.k.device, self.model.dtype)


def appended_tokens(repeats: int) -> int:
    """Tokens that a measurement of steps appends to each sequence."""
    return (repeats + 1) * (1 + RUNS_PER_TURN["step"])


def copies(layer_bytes: float) -> int:
    """Copies of a layer's K and V that take turns."""
    return max(1, min(MOST_COPIES, int(_COLD_BYTES // layer_bytes)))


def attention_runs(executor: Executor, plan: KVPlan, measurement: Measurement) -> tuple[Run | None, Run | None, list[float]]:
    """Calls for attention and for storing over layers that take turns, and bytes of a token's K and V."""
    config, case, q = measurement.model.config, measurement.case, measurement.queries
    if executor.ops is None:
        return None, None, [0.0]
    first = case.batch * visible_tokens(config.layers[0].attention.window, case.context) * token_bytes(plan, config)[0]
    plan, config = layers_in_turn(plan, config, copies(first))
    ops, layers, scale = step_table(executor.ops, measurement.k.device), config.num_layers, config.layers[0].attention.scale
    cache, batch = almost_full(plan, config, case, measurement.k, measurement.v)
    new_k, new_v = (as_rows(x[:, :, -1:]) for x in (measurement.k, measurement.v))
    for layer in range(layers):
        ops.store_kv(new_k, new_v, cache.view(layer, batch))

    @torch.inference_mode()
    def attend(number: int) -> Tensor:
        return ops.paged_attention(q, cache.view(number % layers, batch), scale)

    @torch.inference_mode()
    def store(number: int) -> None:
        ops.store_kv(new_k, new_v, cache.view(number % layers, batch))

    return attend, store, [statistics.mean(token_bytes(plan, config))]


def step_table(ops: OpTable, device: torch.device) -> OpTable:
    """The op table of a decode step, which never waits for the device."""
    if device.type != "cuda":
        return ops
    from haarkv.tq_ops.cuda import ops as cuda

    return with_ops(ops, {"store_kv": partial(cuda.append, fault=cuda.new_fault(device))})


def almost_full(
    plan: KVPlan, config: ModelConfig, case: Case, k: Tensor, v: Tensor, new: int = 1
) -> tuple[PagedKVCache, Batch]:
    """A cache that holds all but a case's last tokens in every layer, and the batch of these."""
    cache, paging = filled_cache(plan, config, case, k, v, new)
    return cache, paging.batch(range(case.batch), [new] * case.batch).to(k.device)


def forward_run(kind: str, executor: Executor, plan: KVPlan, case: Case, repeats: int) -> Run:
    """A decode step of one token a sequence, or a prompt into an empty cache.

    Raises:
        InputError: at the first run, if all logits are equal.
    """
    config, device, sound = executor.config, executor.device, False
    if kind == "step":
        cache, paging = filled_cache(plan, config, case, *random_kv(config, case, device), appended_tokens(repeats))
        tokens = torch.arange(case.batch, device=device) % config.vocab_size
    else:
        cache, _ = new_cache(
            config, plan, sequences=case.batch, tokens=case.context, device=device, chunk=tail_chunk(executor, plan)
        )
        prompts = random_prompts(config, case)

    def logits() -> Tensor:
        if kind == "step":
            return verify(executor, tokens, paging.batch(range(case.batch), [1] * case.batch).to(device), cache)
        empty = PagedSequences(cache.num_blocks, cache.block_size, num_rows=cache.num_rows)
        return prefill_in_chunks(executor, prompts, [empty.add() for _ in prompts], empty, cache)

    def run(_: int) -> None:
        nonlocal sound
        scores = logits()
        # A sampler reads the token on the host, so a forward is over when it is there.
        scores.argmax(-1).tolist()
        if not sound:
            if scores.amin() == scores.amax():
                value = scores.flatten()[0].item()
                raise InputError(f"a {kind} in {plan.describe()} at {case.context} tokens gives nothing but {value}")
            sound = True

    return run


def random_prompts(config: ModelConfig, case: Case) -> list[list[int]]:
    """Prompts of random ids."""
    draw = torch.Generator().manual_seed(case.context)
    prompts: list[list[int]] = torch.randint(config.vocab_size, (case.batch, case.context), generator=draw).tolist()
    return prompts
