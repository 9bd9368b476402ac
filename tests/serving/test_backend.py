"""The attention backend on vLLM's own objects: what it makes of a batch, and what lands in the pages and comes back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import vllm_paged
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm_paged import Shape, Worker, configuration, own_cache, packed_spec, rotated_metadata, vllm_metadata

from haarkv.serving.vllm_plugin import backend
from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend, RotatedMetadata
from haarkv.tq_ops import formats
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.layer import fields_in, page_bytes
from haarkv.tq_ops.kv.plan import KVSpec

pytestmark = pytest.mark.vllm_short

LAYERS = (0, 3, 7)
LONG = "stretches"
SHAPES = {
    "d128": Shape(),
    "d64": Shape(head_dim=64, heads=3, kv_heads=3, block_size=32),
    "d256": Shape(head_dim=256, heads=4, kv_heads=1, block_size=128, num_blocks=4),
    LONG: Shape(heads=4, block_size=64, num_blocks=60),
}
# New tokens of each sequence, forward by forward; 0 sits a forward out.
FORWARDS = {
    "decode": [(17, 1, 40), (1, 1, 1), (1, 1, 1)],
    "prefill": [(16, 33, 7)],
    "mixed": [(20, 0, 0), (1, 30, 0), (1, 1, 25)],
    "chunks": [(15, 5, 0), (15, 9, 16), (15, 1, 17)],
    # Across borders of a stretch of 1,024, a sequence far behind another, and a short one.
    "stretches": [(1000, 7, 0), (50, 900, 0), (1030, 300, 0), (1, 1, 9), (1, 0, 1)],
}


def batches(forwards: list[tuple[int, ...]], shape: Shape = SHAPES["d128"]) -> list[Batch]:
    """Those forwards over blocks in an order of no meaning."""
    order = torch.randperm(shape.num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    paging = PagedSequences(shape.num_blocks, shape.block_size, order)
    ids = [paging.add() for _ in forwards[0]]
    return [paging.batch([i for i, n in zip(ids, new, strict=True) if n], [n for n in new if n]) for new in forwards]


def qkv(batch: Batch, shape: Shape, dtype: torch.dtype, padding: int = 0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, K and V of a forward, and of tokens that pad it."""
    return vllm_paged.qkv(len(batch.positions) + padding, seed, dtype, shape)


# -- The batch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", [name for name in FORWARDS if name != LONG])
def test_a_batch_is_what_our_own_bookkeeping_would_say(name, padding):
    for expected in batches(FORWARDS[name]):
        batch = rotated_metadata(vllm_metadata(expected, padding)).batch
        for field in ("positions", "slot_mapping", "seq_lens", "query_start_loc"):
            assert torch.equal(getattr(batch, field), getattr(expected, field)), field
            assert getattr(batch, field).dtype == getattr(expected, field).dtype, field
        entries = expected.block_table >= 0
        assert torch.equal(batch.block_table[entries], expected.block_table[entries])
        assert len(set(batch.rows.tolist())) == len(expected.seq_lens)


def test_what_stands_behind_the_batch_in_vllms_buffers_is_not_read():
    expected = batches(FORWARDS["mixed"])[1]
    common = vllm_metadata(expected)
    longer: CommonAttentionMetadata = replace(
        common,
        query_start_loc=torch.cat([common.query_start_loc, torch.tensor([999])]),
        seq_lens=torch.cat([common.seq_lens, torch.tensor([555])]),
        block_table_tensor=torch.cat([common.block_table_tensor, torch.full_like(common.block_table_tensor[:1], 11)]),
    )
    batch = rotated_metadata(longer).batch
    assert torch.equal(batch.positions, expected.positions)
    assert batch.seq_lens.tolist() == expected.seq_lens.tolist()
    assert len(batch.block_table) == len(expected.block_table)


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])])
def test_a_batch_that_sees_later_tokens_is_refused(causal):
    with pytest.raises(NotImplementedError, match=r"^attention to later tokens is not supported by a packed KV cache$"):
        rotated_metadata(replace(vllm_metadata(batches(FORWARDS["prefill"])[0]), causal=causal))


# -- What lands in the pages and comes back ------------------------------------------------------------------------------
def copied_cache(worker: Worker, index: int) -> PagedKVCache:
    """A cache of our own, in memory of its own, that begins with what the pages hold."""
    cache = own_cache(worker.pair, index, worker.shape)
    for ours, theirs in zip((cache.kv[index].k.fields, cache.kv[index].v.fields), in_pages(worker, index), strict=True):
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
    return cache


def in_pages(worker: Worker, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """K's and V's fields as a layer's pages hold them."""
    shape = worker.shape
    return fields_in(worker.pages(index), worker.pair, shape.kv_heads, shape.head_dim, shape.block_size)


def assert_holds(worker: Worker, index: int, cache: PagedKVCache) -> None:
    """Every byte of a layer's pages, written or not, is that of the cache."""
    for actual, expected in zip(in_pages(worker, index), (cache.kv[index].k.fields, cache.kv[index].v.fields), strict=True):
        for name, tensor in expected.items():
            assert torch.equal(actual[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


def wide(x: Tensor) -> Tensor:
    """FP16 as the kernels take it."""
    return x.float() if x.dtype == torch.float16 else x


LAYOUTS, DTYPES = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC), (torch.bfloat16, torch.float32, torch.float16)
CASES = [
    *product(
        ["tq4"], DTYPES, LAYOUTS,
        [*(("d128", name) for name in FORWARDS if name != LONG), ("d64", "mixed"), ("d256", "chunks")],
    ),
    *((kv, torch.bfloat16, KVCacheLayout.BLHNC, ("d128", "mixed")) for kv in (
        "tq2", "tq3", "tq5", "tq6", "tq8", "bf16", "k=tq8,v=tq3", "k=bf16,v=tq3", "k=lr4,v=tq3")),
    ("k=lr4,v=tq3", torch.bfloat16, KVCacheLayout.BLHNC, (LONG, LONG)),
]  # fmt: skip


@pytest.mark.parametrize(("kv", "dtype", "layout", "forwards"), CASES, ids=str)
def test_pages_hold_and_return_exactly_what_a_cache_of_our_own_does(kv, dtype, layout, forwards):
    shape, ops, padding = SHAPES[forwards[0]], CpuOps(), 3
    pair = formats.parse(kv, synthetic.calibration(max(LAYERS) + 1, shape.kv_heads, shape.head_dim))
    worker = Worker(shape, LAYERS, layout, pair)
    assert worker.spec.page_size_bytes == page_bytes(pair, shape.kv_heads, shape.head_dim, shape.block_size)
    assert packed_spec(shape, dtype).state_content_size_bytes == 2 * (shape.head_dim // 2 + 2)  # of any dtype
    caches = {index: copied_cache(worker, index) for index in LAYERS}
    for step, batch in enumerate(batches(FORWARDS[forwards[1]], shape)):
        tokens, metadata = len(batch.positions), rotated_metadata(vllm_metadata(batch, padding))
        for index in LAYERS:
            q, k, v = qkv(batch, shape, dtype, padding, seed=10 * step + index)
            worker.store(index, k, v, torch.cat([batch.slot_mapping, torch.full((padding,), -1)]), metadata)
            ops.store_kv(wide(k[:tokens]), wide(v[:tokens]), caches[index].view(index, batch))
            for each in LAYERS:  # the other layers' pages, too, and with them every byte there is
                assert_holds(worker, each, caches[each])
            out = worker.attend(index, q, k, v, metadata)
            expected = ops.paged_attention(wide(q[:tokens]), caches[index].view(index, batch), shape.softmax_scale)
            assert torch.equal(out[:tokens], expected.to(dtype))
            assert (out[tokens:] == 77.0).all()


def test_a_layers_rotation_is_that_of_the_index_in_its_name():
    shape, [batch] = SHAPES["d128"], batches(FORWARDS["prefill"])
    worker = Worker(shape, LAYERS, KVCacheLayout.LBHNC)
    _, k, v = qkv(batch, shape, torch.float32)
    for index in LAYERS:
        worker.store(index, k, v, batch.slot_mapping)
    block, offset = batch.slot_mapping // shape.block_size, batch.slot_mapping % shape.block_size
    fields = KVSpec("tq4").plan(1).layers[0][0]
    for index in LAYERS:
        codes = in_pages(worker, index)[0]["codes"][block, :, offset]
        same = {other: torch.equal(codes, fields.quantize(k, other)["codes"]) for other in LAYERS}
        assert same == {other: other == index for other in LAYERS}


def test_pages_that_vllm_allocates_anew_are_seen():
    shape, [batch] = SHAPES["d128"], batches(FORWARDS["prefill"])
    first, second = (Worker(shape, (3,), KVCacheLayout.LBHNC) for _ in range(2))
    _, k, v = qkv(batch, shape, torch.bfloat16)
    first.store(3, k, v, batch.slot_mapping)
    first_before, second_before = first.raw.clone(), second.raw.clone()
    first.views = second.views
    first.store(3, v, k, batch.slot_mapping)
    assert torch.equal(first.raw, first_before)
    assert not torch.equal(second.raw, second_before)


def test_while_vllm_measures_its_memory_attention_is_zero_and_reads_nothing():
    shape, [batch] = SHAPES["d128"], batches(FORWARDS["prefill"])
    worker = Worker(shape, (0,), KVCacheLayout.LBHNC)
    worker.views[0] = torch.tensor([])
    out = worker.attend(0, *qkv(batch, shape, torch.bfloat16), None)
    assert not out.any()


@pytest.mark.parametrize(("side", "value"), [("k", float("nan")), ("k", float("inf")), ("v", -float("inf"))])
def test_one_requests_numbers_do_not_reach_another(monkeypatch, side, value):
    """A K or V that is not finite is told of, and zeros stand in for it; all other pages and answers keep their bits."""
    shape, [batch] = SHAPES["d128"], batches([(9, 20, 4)])
    messages: list[str] = []
    monkeypatch.setattr(backend.logger, "error", lambda message, *args: messages.append(message % args))
    q, k, v = qkv(batch, shape, torch.bfloat16)
    bad = {"k": k.clone(), "v": v.clone()}
    bad[side][13, 1, 5] = value  # of the second request
    clean = {"k": k.clone(), "v": v.clone()}
    clean[side][13, 1, 5] = 0.0
    outs, raws = [], []
    for tensors in (clean, bad):
        worker = Worker(shape, (3,), KVCacheLayout.BLHNC)
        worker.store(3, tensors["k"], tensors["v"], batch.slot_mapping)
        outs.append(worker.attend(3, q, k, v, rotated_metadata(vllm_metadata(batch))))
        raws.append(worker.raw)
    assert torch.equal(raws[0], raws[1])
    assert torch.equal(outs[0], outs[1])
    assert torch.isfinite(outs[1]).all()
    assert len(messages) == 1
    assert messages[0].startswith(f"layer 3: {side.upper()} of token 13 of the batch")
    assert "KV head 1 is not finite" in messages[0]


# -- What a layer may ask for --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"alibi_slopes": [0.5] * 10}, "ALiBi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"logits_soft_cap": 50.0}, "capped logits"),
        ({"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}, "K and V of another layer"),
        ({"sinks": torch.zeros(10)}, "sinks"),
        ({"use_irope": True}, "use_irope"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_of_another_kind_is_refused_by_name(options, name):
    make = RotatedAttentionBackend.get_impl_cls()
    with pytest.raises(NotImplementedError) as error:
        make(10, 128, 128**-0.5, 2, **options)
    assert str(error.value) == f"attention with {name} is not supported by a packed KV cache"
    make(10, 128, 128**-0.5, 2, **dict.fromkeys(options))


def test_a_quantized_output_is_refused():
    shape, [batch] = SHAPES["d128"], batches(FORWARDS["prefill"])
    worker = Worker(shape, (0,), KVCacheLayout.LBHNC)
    q, k, v = qkv(batch, shape, torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"^a quantized attention output is not supported by a packed KV cache$"):
        worker.impls[0].forward(None, q, k, v, worker.views[0], None, q.clone(), output_scale=torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_balanced_channels_are_stored_scaled_and_met_by_the_inverse(dtype):
    shape, [batch] = SHAPES["d128"], batches([(16, 33, 7)])
    scales = torch.ones(2, shape.kv_heads, shape.head_dim)
    scales[0, :, 5], scales[0, 1, 69], scales[1, 0, 3] = 2.0**-5, 2.0**-4, 2.0**-6
    query_scales, output_scales = (s.repeat_interleave(shape.heads // shape.kv_heads, dim=0).to(dtype) for s in scales)
    q, k, v = qkv(batch, shape, dtype)
    metadata = RotatedMetadata(batch)
    ours, plain = (Worker(shape, (0,), KVCacheLayout.LBHNC) for _ in range(2))
    ours.impls[0].balance(scales[0], scales[1], torch.device("cpu"))
    ours.store(0, k, v, batch.slot_mapping)
    scaled_kv = k * scales[0].to(dtype), v * scales[1].to(dtype)
    plain.store(0, *scaled_kv, batch.slot_mapping)
    assert torch.equal(ours.pages(0), plain.pages(0))
    expected = plain.attend(0, q / query_scales, *scaled_kv, metadata) / output_scales
    assert torch.equal(ours.attend(0, q, k, v, metadata), expected)


def test_layers_of_a_draft_are_neither_scaled_nor_stored_as_the_models_own(monkeypatch):
    """Those of a draft model are numbered from 0, too; those of an EAGLE head come behind the model's."""
    scaled_names, formats_by_name = [], {}

    def layer(name):
        impl = SimpleNamespace(
            balance=lambda *_: scaled_names.append(name), store_in=lambda pair: formats_by_name.update({name: pair})
        )
        return SimpleNamespace(impl=impl)

    names = [f"{model}.layers.{n}.self_attn.attn" for model, n in (("model", 0), ("draft_model.model", 0), ("model", 6))]
    config = configuration(haarkv_kv="k=tq8,v=tq3")
    config.compilation_config.static_forward_context |= {name: layer(name) for name in names}
    ones = torch.ones(2, 128), None
    monkeypatch.setattr(backend, "require_supported", lambda _: None)
    monkeypatch.setattr(backend, "scales_here", lambda _: {0: ones, 6: ones})
    backend.RotatedMetadataBuilder(packed_spec(SHAPES["d128"]), names, config, torch.device("cpu"))
    assert scaled_names == names[:1]
    assert [formats.describe(*formats_by_name[name]) for name in names] == ["k=tq8,v=tq3", "tq4", "tq4"]
