"""Dense layers of few tokens run in one call: to the bits of the ops one by one, and not at all where somebody looks on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import CONFIGS, SMALL, decode, new_cache, new_paging, prefill, random_tokens, resized, small_model

from haarkv.executors.cpu import CpuExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.registry import FAMILIES
from haarkv.tq_ops.cpu import layers as dense_layers
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OP_NAMES, with_ops

LLAMA = resized(CONFIGS["mha_d64"], model_type="llama", num_heads=6, num_kv_heads=1)
"""Here Q and K are cut into different numbers of items."""
BIASED = resized(SMALL, model_type="qwen2", qkv_bias=True)
TAIL = KVSpec("tq3", layers={0: "k=tq8,v=bf16"}, tail=5, sink=2)


def one_by_one(executor: CpuExecutor) -> CpuExecutor:
    """The same executor, which calls each op by itself."""
    model = executor._model
    executor._model = DecoderModel(model.config, model.weights, model.rope, model.ranks)
    assert executor.whole is None
    return executor


def forwards(executor: CpuExecutor, kv: KVSpec) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of a ragged prompt, of steps of two sequences and of one; and all that is stored."""
    cache = new_cache(executor.config, kv, num_blocks=8, block_size=32)
    paging = new_paging(cache)
    ids = [paging.add(), paging.add()]
    tokens = [random_tokens(executor.config, n, seed=n) for n in (19, 6)]
    found = [prefill(executor, cache, paging, ids, tokens)]
    found += [decode(executor, cache, paging, ids, [step, 7 - step]) for step in range(4)]
    found.append(decode(executor, cache, paging, ids[1:], [3]))
    layers = range(executor.config.num_layers)
    return found, [field for i in layers for of in (cache.k_fields(i), cache.v_fields(i)) for field in of.values()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv", [KVSpec("tq4"), TAIL, KVSpec("kivi4", tail=40)], ids=str)
@pytest.mark.parametrize("config", [SMALL, BIASED, LLAMA], ids=lambda c: c.model_type)
def test_bits_are_those_of_the_ops_one_by_one(config, kv, dtype):
    for isa in library.isas()[:1] + library.isas()[1:][-1:]:
        model = small_model(config, dtype=dtype)
        whole = CpuExecutor(model, isa)
        assert whole.whole is not None
        ours, stored = forwards(whole, kv)
        theirs, expected = forwards(one_by_one(CpuExecutor(model, isa)), kv)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(stored, expected, strict=True))


def test_every_family_runs_in_one_call_or_says_why_not():
    # A mixture of experts chooses what it multiplies with as it runs.
    calls = {kind for kind in FAMILIES if CpuExecutor(small_model(replace(SMALL, **_asked(kind)))).whole is not None}
    assert set(FAMILIES) - calls == {"qwen3_moe"}


def _asked(kind: str) -> dict[str, object]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind.endswith("moe") else {}
    return {"model_type": kind, **experts}


def test_who_looks_on_sees_every_op():
    seen: list[str] = []

    def watched(ops):
        def watch(name):
            def run(*args, **kwargs):
                seen.append(name)
                return getattr(ops, name)(*args, **kwargs)

            return run

        return with_ops(ops, {name: watch(name) for name in OP_NAMES})

    executor = CpuExecutor(small_model())
    expected, _ = forwards(executor, KVSpec("tq4"))
    assert not seen
    found, _ = forwards(executor.over(watched), KVSpec("tq4"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert seen.count("store_kv") == SMALL.num_layers * len(found)


def test_prompts_of_many_tokens_run_op_by_op(monkeypatch):
    executor = CpuExecutor(small_model())
    cache = new_cache(SMALL, num_blocks=24)
    paging = new_paging(cache)
    spent = executor.whole.spent = torch.zeros(len(library.PARTS), dtype=torch.int64)
    prefill(executor, cache, paging, [paging.add()], [random_tokens(SMALL, dense_layers.FEW + 1)])
    assert not spent.any()
    prefill(executor, cache, paging, [paging.add()], [random_tokens(SMALL, dense_layers.FEW)])
    assert (spent > 0).all()


@pytest.mark.parametrize("field", ["k_proj", "v_proj", "down_proj"])
def test_the_weight_behind_what_is_not_finite_is_named(field):
    model = small_model()
    getattr(model.weights.layers[1], field)[3, 5] = float("nan")
    executor = CpuExecutor(model)
    assert executor.whole is not None
    with pytest.raises(NonFiniteError, match=rf"layers\.1\.\S*{field}\.weight holds nan at \[3, 5\]"):
        forwards(executor, KVSpec("tq4"))


def test_a_cache_of_one_layer_is_served_op_by_op():
    """As the validator hands it over."""
    model, hidden = small_model(), torch.randn(1, SMALL.hidden_size)
    found = []
    for executor in (CpuExecutor(model), one_by_one(CpuExecutor(model))):
        cache = new_cache(SMALL)
        paging = new_paging(cache)
        prefill(executor, cache, paging, [paging.add()], [random_tokens(SMALL, 9)])
        fields = cache.k_fields(1), cache.v_fields(1)
        other = PagedKVCache.over(cache.plan.layers[1], 1, fields, (None, None), SMALL.heads.head_dim)
        found.append(executor.layers(hidden, range(1, 2), paging.batch([0], [1]), other))
    assert torch.equal(*found)


def test_slots_outside_the_cache_are_refused():
    executor = CpuExecutor(small_model())
    cache = new_cache(SMALL, num_blocks=2)
    paging = new_paging(new_cache(SMALL, num_blocks=9))
    with pytest.raises(IndexError):
        prefill(executor, cache, paging, [paging.add()], [random_tokens(SMALL, 60)])
