"""What vLLM's worker holds: layers whose pages lie in one piece of memory, and its description of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from vllm.forward_context import override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from haarkv.serving.vllm_plugin.backend import (
    Buffers,
    RotatedAttention,
    RotatedAttentionBackend,
    RotatedMetadata,
    forward_batch,
    with_content,
)
from haarkv.serving.vllm_plugin.kv_choice import Pair, content_bytes, default_pair
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape


@dataclass(frozen=True)
class Shape:
    """One attention layer, and the pages that vLLM has."""

    head_dim: int = 128
    heads: int = 10
    kv_heads: int = 2
    block_size: int = 16
    num_blocks: int = 12

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5


def configuration(ranks: int = 1, **additional: object) -> SimpleNamespace:
    """As much of vLLM's configuration as says how K and V are stored.

    Args:
        additional: of `--additional-config`.
    """
    shape = Shape()
    model = SimpleNamespace(
        model="a model", is_hybrid=False, hf_text_config=SimpleNamespace(), get_sliding_window=lambda: None,
        get_total_num_hidden_layers=lambda: 6, get_total_num_kv_heads=lambda: shape.kv_heads,
        get_head_size=lambda: shape.head_dim, get_hidden_size=lambda: 256, get_vocab_size=lambda: 4096, max_model_len=128,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=ranks), additional_config=additional,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2), speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(block_size=shape.block_size),
    )  # fmt: skip


def qkv(
    tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16, shape: Shape | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, K and V of tokens, drawn."""
    shape, generator = shape or Shape(), torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = ((2 * torch.randn(qkv_shape, generator=generator)).to(dtype) for qkv_shape in shapes)
    return q, k, v


def packed_spec(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    """What a layer of the model asks for, packed by the backend."""
    return RotatedAttentionBackend.customize_spec(plain_spec(shape, dtype))


def plain_spec(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    """What a layer of the model asks for."""
    return FullAttentionSpec(block_size=shape.block_size, num_kv_heads=shape.kv_heads, head_size=shape.head_dim, dtype=dtype)


class Worker:
    """Some layers over one allocation, every byte of which is random at first.

    Attributes:
        raw: [bytes] int8, the whole allocation.
        views: vLLM's view of each layer's pages, by layer index.
        layer_stride, block_stride: bytes from one layer or block to the next.
        impls: the backend's attention of each layer, by layer index.
    Args:
        pair: K's format and V's of all layers; `tq4` unless given.
    """

    def __init__(self, shape: Shape, indices: tuple[int, ...], layout: KVCacheLayout, pair: Pair | None = None) -> None:
        self.shape, self.indices, self.spec = shape, indices, packed_spec(shape)
        self.pair = pair or default_pair()
        if pair:
            self.spec = with_content(self.spec, content_bytes(pair, shape.head_dim))
        self.layer_stride, self.block_stride, *_ = compute_layout_strides(self.spec, shape.num_blocks, len(indices), layout)
        size = self.spec.page_size_bytes * shape.num_blocks * len(indices)
        self.raw = torch.randint(-128, 128, (size,), dtype=torch.int8, generator=torch.Generator().manual_seed(5))
        self._tensor = KVCacheTensor(
            size=size, layers=[self.name(i) for i in indices], layer_stride=self.layer_stride, block_stride=self.block_stride
        )
        views = create_kv_cache_views(self.raw, self.spec, shape.num_blocks, layout, self._tensor)
        self.views = dict(zip(indices, views, strict=True))
        self.impls = {i: RotatedAttention(shape.heads, shape.head_dim, shape.softmax_scale, shape.kv_heads) for i in indices}
        for impl in self.impls.values() if pair else ():
            impl.store_in(pair)

    @staticmethod
    def name(index: int) -> str:
        return f"model.layers.{index}.self_attn.attn"

    def pages(self, index: int) -> Tensor:
        """[num_blocks, page_bytes] uint8 of a layer, found without vLLM's views."""
        shape = (self.shape.num_blocks, self.spec.page_size_bytes)
        begin = self.indices.index(index) * self.layer_stride
        return self.raw.view(torch.uint8).as_strided(shape, (self.block_stride, 1), begin)

    def store(self, index: int, k: Tensor, v: Tensor, slots: Tensor, metadata: object = None) -> None:
        """
        Args:
            metadata: of the forward; formats that store keys by their positions look there.
        """
        layer = SimpleNamespace(layer_name=self.name(index))
        with in_forward({self.name(index): metadata}):
            self.impls[index].do_kv_cache_update(layer, k, v, self.views[index], slots)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, metadata: object) -> Tensor:
        layer, out = SimpleNamespace(layer_name=self.name(index)), torch.full_like(q, 77.0)
        result = self.impls[index].forward(layer, q, k, v, self.views[index], metadata, out)
        assert result is out
        return out


def in_forward(metadata: Mapping[str, object], slots: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
    """What vLLM's worker says of a forward while layers run, by their names."""
    layers = dict.fromkeys(metadata, SimpleNamespace(kv_cache=None))
    return override_forward_context(
        SimpleNamespace(attn_metadata=metadata, no_compile_layers=layers, slot_mapping=slots or {})
    )  # fmt: skip


def own_cache(pair: Pair, index: int, shape: Shape) -> PagedKVCache:
    """A cache of our own whose layer `index` has the formats of pages."""
    return PagedKVCache(
        KVPlan((pair,) * (index + 1)), KVShape(shape.kv_heads, shape.head_dim), num_blocks=shape.num_blocks,
        block_size=shape.block_size,
    )  # fmt: skip


def rotated_metadata(common: CommonAttentionMetadata) -> RotatedMetadata:
    """What the backend makes of a description, in buffers of its own."""
    return RotatedMetadata(forward_batch(common, Buffers(4, 2, torch.device("cpu"))))


def vllm_metadata(batch: Batch, padding: int = 0) -> CommonAttentionMetadata:
    """A batch of ours as vLLM's worker would describe it.

    Args:
        padding: tokens behind the last, as `slot_mapping` has them where the forward is padded.
    """
    count, tokens = len(batch.seq_lens), len(batch.positions)
    new = batch.query_start_loc.diff()
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc, query_start_loc_cpu=batch.query_start_loc, seq_lens=batch.seq_lens,
        num_reqs=count, num_actual_tokens=tokens, max_query_len=int(new.max()), max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table.clamp(min=0),
        slot_mapping=torch.cat([batch.slot_mapping, torch.full((padding,), -1)]),
    )  # fmt: skip
