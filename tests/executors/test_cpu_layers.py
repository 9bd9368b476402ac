"""Dense layers of few tokens run in one call a stretch: to the bits of the ops one by one, and not where ops are observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from at_length import MORE, pairwise_cases
from block_weights import random_blocks
from small_models import (
    CONFIGS,
    SMALL,
    cache_tensors,
    decode,
    new_cache,
    new_paging,
    prefill,
    random_tokens,
    resize_config,
    small_model,
)

from haarkv.executors.cpu import CpuExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import Attention, Dense, Layer, ModelConfig, Norm, Rope
from haarkv.models.families import FAMILIES
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.cpu import layers as dense_layers
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OP_NAMES, with_ops
from haarkv.tq_ops.weight import Weight

LLAMA = resize_config(CONFIGS["mha_d64"], model_type="llama", num_heads=6, num_kv_heads=1)
"""Here Q and K are cut into different numbers of items."""
BIASED = resize_config(SMALL, model_type="qwen2", bias=True)
TAIL = KVSpec("tq3", layers={0: "k=tq8,v=bf16"}, tail=5, sink=2)
_SEES_ALL = Layer(
    Attention(4, 1, 256, Rope(1e6, 256), 0.05, head_norms=True), Dense(80, "gelu_tanh"), Norm(1e-5, plus_one=True),
    post_norms=True,
)  # fmt: skip
_LOCAL = replace(_SEES_ALL, mixer=replace(_SEES_ALL.attention, window=40, rope=Rope(1e4, 256), scale=256**-0.5))
GEMMA = ModelConfig(
    "gemma3_text", (_LOCAL, _LOCAL, replace(_SEES_ALL, mlp=Dense(112, "gelu_tanh"), norm=Norm(1e-6, plus_one=True)), _LOCAL),
    48, 61, Norm(1e-6, plus_one=True), embedding_scale=48**0.5, max_position_embeddings=512,
)  # fmt: skip
"""Layers that differ in all that a declaration may say: windows, RoPE, scale, widths and eps."""
_PARTLY_TURNED = replace(_LOCAL, mixer=replace(_LOCAL.attention, rope=Rope(1e4, 64)))
MIXED = replace(GEMMA, layers=(_LOCAL, _SEES_ALL, _PARTLY_TURNED, _LOCAL, _PARTLY_TURNED))
"""Among them such as no call runs."""


def one_by_one(executor: CpuExecutor) -> CpuExecutor:
    """The same executor, which calls each op by itself."""
    model = executor._model
    executor._model = DecoderModel(model.config, model.weights, model.ropes, model.ranks)
    assert executor.whole is None
    return executor


def forwards(executor: CpuExecutor, kv: KVSpec) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of a ragged prompt, of steps of two sequences and of one; and all that is stored."""
    cache = new_cache(executor.config, kv, num_blocks=8, block_size=32)
    paging = new_paging(cache)
    ids = [paging.add(), paging.add()]
    tokens = [random_tokens(executor.config, n, seed=n) for n in (19, 6)]
    logits = [prefill(executor, cache, paging, ids, tokens)]
    logits += [decode(executor, cache, paging, ids, [step, 7 - step]) for step in range(4)]
    logits.append(decode(executor, cache, paging, ids[1:], [3]))
    return logits, [tensor for *_, tensor in cache_tensors(cache)]


def whole_calls(executor: CpuExecutor) -> list[range]:
    """The layers of each call that runs several in one, from now on; none of a call that was refused."""
    calls, run = list[range](), executor.whole.run

    def record_call(hidden: torch.Tensor, part: range, *args: Any) -> torch.Tensor | None:
        result = run(hidden, part, *args)
        if result is not None:
            calls.append(part)
        return result

    executor.whole.run = record_call
    return calls


def require_same_bits(model: DecoderModel, run: Callable, kv: KVSpec) -> None:
    """In one call and op by op, by the plainest instructions and the newest."""
    for isa in library.isas()[:1] + library.isas()[1:][-1:]:
        whole = CpuExecutor(model, isa)
        calls = whole_calls(whole)
        ours, stored_fields = run(whole, kv)
        theirs, expected = run(one_by_one(CpuExecutor(model, isa)), kv)
        assert all(torch.equal(a, b) for a, b in zip([*ours, *stored_fields], [*theirs, *expected], strict=True))
        assert calls


def past_windows(executor: CpuExecutor, kv: KVSpec) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states of two sequences that outgrow their windows and the rings behind them; and all that is stored."""
    cache = PagedKVCache(
        kv.plan(executor.config.num_layers), executor.config.kv_shapes, num_blocks=16, num_rows=2, row_blocks=8, block_size=32,
        ring_chunk=40, chunk=40,
    )  # fmt: skip
    assert {cache.kv[i].num_slots // 2 for i, layer in enumerate(executor.config.layers) if layer.attention.window} == {128}
    paging = PagedSequences(cache.num_blocks, cache.block_size, num_rows=2)
    ids, hidden = [paging.add(), paging.add()], []
    for step, sizes in enumerate([(40, 9), (24, 40), (1, 1), (3, 40), (40, 24), (40, 1), (40, 1), *[(1, 1)] * 3]):
        tokens = random_tokens(executor.config, sum(sizes), seed=step)
        hidden.append(executor.forward(torch.tensor(tokens), paging.batch(ids, sizes), cache))
    return hidden, [tensor for *_, tensor in cache_tensors(cache)]


# The rest runs with `make test-long`.
@pytest.mark.parametrize(
    ("config", "kv", "dtype", "run"),
    [
        *pairwise_cases(MORE, [SMALL, BIASED, LLAMA], [KVSpec("tq4"), TAIL], [torch.bfloat16, torch.float32], [forwards]),
        *pairwise_cases(MORE, [GEMMA, MIXED], [KVSpec("tq4"), TAIL], [torch.bfloat16, torch.float32], [past_windows]),
    ],
    ids=lambda of: getattr(of, "model_type", getattr(of, "__name__", str(of))),
)
def test_bits_are_those_of_the_ops_one_by_one(config, kv, dtype, run):
    require_same_bits(small_model(config, dtype=dtype), run, kv)


def test_stretches_are_as_long_as_can_be():
    config = MIXED
    executor = CpuExecutor(small_model(config))
    cache = new_cache(config, KVSpec("tq4", layers={1: "tq4_seed"}))
    parts = [(in_one, list(part)) for in_one, part in executor.whole.parts(range(1, 5), cache)]
    assert parts == [(False, [1, 2]), (True, [3]), (False, [4])]  # the reference's ops run tq4_seed
    parts = [(in_one, list(part)) for in_one, part in executor.whole.parts(range(5), new_cache(config))]
    assert parts == [(True, [0, 1]), (False, [2]), (True, [3]), (False, [4])]


def test_more_new_tokens_than_a_ring_has_room_for_are_refused():
    executor = CpuExecutor(small_model(GEMMA))
    cache = PagedKVCache(KVSpec("tq4").plan(4), GEMMA.kv_shapes, num_blocks=8, block_size=32, ring_chunk=40)
    paging = new_paging(cache)
    with pytest.raises(ValueError, match="at most 40 new tokens"):
        executor.forward(torch.tensor([1] * 41), paging.batch([paging.add()], [41]), cache)


HYBRIDS = {kind for kind, family in FAMILIES.items() if family.layers is FAMILIES["qwen3_next"].layers}


def test_every_family_runs_in_one_call_or_says_why_not():
    # A mixture of experts chooses what it multiplies with as it runs; layers with a state, and gated attention, are not known.
    calls = {kind for kind in FAMILIES if CpuExecutor(small_model(_family_config(kind))).whole is not None}
    assert set(FAMILIES) - calls == {"qwen3_moe"} | HYBRIDS


def _family_config(kind):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind.endswith("moe") else {}
    config = resize_config(SMALL, model_type=kind, **experts)
    if kind not in HYBRIDS:
        return config
    layer = config.common
    gated_layer = replace(layer, mixer=replace(layer.attention, gated=True))
    return replace(config, layers=(replace(layer, mixer=DeltaNet(1, 2, 16, 16)), gated_layer))


def test_who_looks_on_sees_every_op():
    op_names: list[str] = []

    def watch(op, name, *args):
        op_names.append(name)
        return op(*args)

    def observe(ops):
        return with_ops(ops, {name: partial(watch, getattr(ops, name), name) for name in OP_NAMES})

    executor = CpuExecutor(small_model())
    expected, _ = forwards(executor, KVSpec("tq4"))
    assert not op_names
    logits, _ = forwards(executor.with_ops(observe), KVSpec("tq4"))
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    assert op_names.count("store_kv") == SMALL.num_layers * len(logits)


def test_prompts_of_many_tokens_run_op_by_op(monkeypatch):
    executor = CpuExecutor(small_model())
    cache = new_cache(SMALL, num_blocks=24)
    paging = new_paging(cache)
    calls = whole_calls(executor)
    prefill(executor, cache, paging, [paging.add()], [random_tokens(SMALL, dense_layers.FEW + 1)])
    assert not calls
    prefill(executor, cache, paging, [paging.add()], [random_tokens(SMALL, dense_layers.FEW)])
    assert calls == [range(SMALL.num_layers)]


@pytest.mark.parametrize("field", ["k_proj", "v_proj", "down_proj", "blocks"])
def test_the_weight_behind_what_is_not_finite_is_named(field):
    model = model_in_blocks(torch.float32) if field == "blocks" else small_model()
    if field == "blocks":
        field = "down_proj"
        blocks = model.weights.layers[1].matrix(field)
        blocks.data[3, 18:20] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # an infinite scale
    else:
        model.weights.layers[1][field][3, 5] = float("nan")
    executor = CpuExecutor(model)
    assert executor.whole is not None
    with pytest.raises(NonFiniteError, match=rf"layers\.1\.\S*{field}\.weight holds \S+ at \[3, \d+\]"):
        forwards(executor, KVSpec("tq4"))


def test_slots_outside_the_cache_are_refused():
    executor = CpuExecutor(small_model())
    cache = new_cache(SMALL, num_blocks=2)
    paging = new_paging(new_cache(SMALL, num_blocks=9))
    with pytest.raises(IndexError):
        prefill(executor, cache, paging, [paging.add()], [random_tokens(SMALL, 60)])


IN_BLOCKS = resize_config(SMALL, hidden_size=256, intermediate_size=256)
BLOCK_TYPES = {
    "q_proj": "Q4_K", "k_proj": "Q8_0", "v_proj": "Q6_K", "o_proj": "Q5_1", "gate_proj": "MXFP4", "up_proj": "Q5_K",
    "down_proj": "Q4_0",
}  # fmt: skip


def model_in_blocks(dtype: torch.dtype, config: ModelConfig = IN_BLOCKS, leave: str = "") -> DecoderModel:
    """Each projection in blocks of another type, with scales of rows and columns where balance has them."""
    model = small_model(config, dtype=dtype)

    def change(field: str, weight: Weight) -> Weight:
        if field not in BLOCK_TYPES or field == leave:
            return weight
        blocks = random_blocks(BLOCK_TYPES[field], *weight.shape, dtype=dtype)
        if field == "o_proj":
            return blocks * torch.full((weight.shape[1],), 0.5)
        return blocks * torch.full((len(weight), 1), 0.25) if field in ("v_proj", "gate_proj") else blocks

    layers = tuple(layer.map(change) for layer in model.weights.layers)
    return replace(model, weights=replace(model.weights, layers=layers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("leave", ["", "k_proj"])
def test_layers_in_blocks_run_in_one_call_to_the_bits_of_the_ops_one_by_one(dtype, leave):
    model = model_in_blocks(dtype, leave=leave)
    require_same_bits(model, forwards, TAIL)


def test_blocks_without_a_kernel_run_op_by_op():
    model = model_in_blocks(torch.float32)
    unknown = random_blocks("Q8_0", 256, 256)
    unknown = replace(unknown, type=replace(unknown.type, name="other"))
    layers = [*model.weights.layers]
    layers[1] = layers[1].map(lambda field, weight: unknown if field == "down_proj" else weight)
    executor = CpuExecutor(replace(model, weights=replace(model.weights, layers=tuple(layers))))
    parts = list(executor.whole.parts(range(3), new_cache(IN_BLOCKS)))
    assert parts == [(True, range(1)), (False, range(1, 2)), (True, range(2, 3))]
