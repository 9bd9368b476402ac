"""The attention backend: pages that hold codes and scales, written and read by the kernels of vLLM's device.

A page of vLLM is one block of one layer, of as many bytes as `kv.layer` needs: in `tq4`, 132 for K and V of one token and KV
head of 128. vLLM allocates it, hands it out, shares it between requests and takes it back; here it is looked at as a
`PagedKVCache`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from haarkv.serving.vllm_plugin import CPU_WORKER, GPU_WORKER
from haarkv.serving.vllm_plugin.kernels import kernels_on, to_store
from haarkv.serving.vllm_plugin.kv_choice import (
    Pair,
    content_bytes,
    default_pair,
    is_of_draft,
    kv_plan,
    layer_formats,
    state_layers,
)
from haarkv.serving.vllm_plugin.limits import blocks_misfit, reads_here, require_supported, scales_here
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.layer import fields_in, page_bytes
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE

if TYPE_CHECKING:
    from haarkv.serving.vllm_plugin.tails import Tail


@dataclass
class RotatedMetadata(AttentionMetadata):
    """One batch, the same for all layers: its tokens, without those that pad it."""

    batch: Batch


class RotatedMetadataBuilder(AttentionMetadataBuilder[RotatedMetadata]):
    """Makes a `Batch` of what vLLM tells all backends, without waiting for the device.

    vLLM may capture a decode step as a graph, and replay it for batches that it describes anew in the same buffers. What is
    computed here therefore lies in buffers that stay as well; all else is vLLM's own tensors.
    """

    # One new token a sequence, padded with sequences of length 0. Launches of a prompt depend on how its tokens are spread.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        require_supported(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        pairs = {name: layer_formats(vllm_config, name) for name in layer_names if name in layers}
        # vLLM gives some groups other blocks than were asked for, where pages of several sizes share a pool.
        keys = ((extract_layer_index(name), k) for name, (k, _) in pairs.items())
        if reason := blocks_misfit(keys, kv_cache_spec.block_size):
            raise ValueError(reason)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler, scales = vllm_config.scheduler_config, scales_here(vllm_config)
        for name, pair in pairs.items():
            layers[name].impl.store_in(pair)
            # A draft's weights are others, and its channels stay as they are.
            k, v = (None, None) if is_of_draft(vllm_config, name) else scales.get(extract_layer_index(name), (None, None))
            if k is not None or v is not None:
                layers[name].impl.balance(k, v, device)
        self._buffers = Buffers(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RotatedMetadata:
        kernels_on(self.device).next_batch()
        return RotatedMetadata(forward_batch(common_attn_metadata, self._buffers))


class Buffers:
    """Tensors that stay where they are, for what is computed of a batch; they grow if a batch is larger than promised."""

    def __init__(self, tokens: int, sequences: int, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, Tensor] = {}
        self._sizes = {"positions": tokens, "slot_mapping": tokens, "query_start_loc": sequences + 1}
        self._sizes |= {"seq_lens": sequences, "rows": sequences}

    def keep(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of a field in its buffer, from the buffer's beginning."""
        count = len(values)
        buffer = self._kept.get(name)
        if buffer is None or len(buffer) < count or buffer.dtype != dtype:
            buffer = torch.zeros(max(count, self._sizes[name]), dtype=dtype, device=self.device)
            self._kept[name] = buffer
        return buffer[:count].copy_(values)

    def as_is(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """vLLM's own tensor, which stays where it is, if it is of this dtype; else as `keep`."""
        return values if values.dtype == dtype else self.keep(name, values, dtype)


def forward_batch(common: CommonAttentionMetadata, buffers: Buffers) -> Batch:
    """vLLM's description of a forward as a `Batch`: new tokens stand at the end of their sequences.

    Nothing here waits for the device. A batch may be padded with sequences of no token, and with tokens behind the last one,
    whose positions mean nothing.

    Raises:
        NotImplementedError: a batch whose tokens also see later ones.
    """
    if common.causal is not True:
        raise NotImplementedError("attention to later tokens is not supported by a packed KV cache")
    count, tokens = common.num_reqs, common.num_actual_tokens
    starts, lengths = common.query_start_loc[: count + 1], common.seq_lens[:count]
    token = torch.arange(tokens, device=starts.device)
    # A token is of the first sequence that ends behind it; those that pad are given to the last.
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=count - 1)
    # The i-th new token of a sequence stands at (length before) + i.
    first = (lengths - starts.diff() - starts[:-1]).long()
    table = common.block_table_tensor[:count]
    return Batch(
        positions=buffers.keep("positions", token + first[sequence], torch.int64),
        slot_mapping=buffers.as_is("slot_mapping", common.slot_mapping[:tokens], torch.int64),
        block_table=table if table.dtype == torch.int32 else table.int(),
        seq_lens=buffers.as_is("seq_lens", lengths, torch.int32),
        query_start_loc=buffers.as_is("query_start_loc", starts, torch.int32),
        rows=buffers.keep("rows", torch.arange(count, device=starts.device), torch.int64),
    )


class RotatedAttention(AttentionImpl[RotatedMetadata]):
    """One layer's attention over its pages; arguments are vLLM's. None but causal attention to all tokens is built."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, **others: object,
    ) -> None:  # fmt: skip
        unusual = {
            "ALiBi": alibi_slopes, "a sliding window": sliding_window, "capped logits": logits_soft_cap,
            "K and V of another layer": kv_sharing_target_layer_name, **others,
        }  # fmt: skip
        if unsupported := [name for name, value in unusual.items() if isinstance(value, Tensor) or value]:
            raise NotImplementedError(f"attention with {' and '.join(unsupported)} is not supported by a packed KV cache")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._pair = default_pair()
        self._pages: Tensor | None = None
        self._cache: PagedKVCache | None = None
        self._index: int | None = None
        self._balance: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._newest: Tail | None = None

    def keep_newest(self, newest: Tail) -> None:
        """Also keep tokens in BF16 there; before any page is seen."""
        self._newest = newest

    def store_in(self, pair: Pair) -> None:
        """Take formats for K and V of this rank's KV heads; before any page is seen."""
        self._pair = pair

    def balance(self, k: Tensor | None, v: Tensor | None, device: torch.device) -> None:
        """Multiply K and V by scales [Hkv, D] before they are stored, and by their inverse what meets them; None is 1."""
        one = torch.ones(self.num_kv_heads, self.head_size)
        # Powers of two: BF16 holds them, and takes no other dtype's digits away.
        k, v = (side.to(device, torch.bfloat16) for side in (one if k is None else k, one if v is None else v))
        group = self.num_heads // self.num_kv_heads
        self._balance = k, v, (1 / k).repeat_interleave(group, dim=0), (1 / v).repeat_interleave(group, dim=0)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Quantize and store the new K and V [T, Hkv, D]; a token whose slot is negative pads the batch."""
        tokens, index = slot_mapping.shape[0], self._layer_index(layer)
        k, v = _to_kernel_dtype(key[:tokens]), _to_kernel_dtype(value[:tokens])
        if self._balance:
            k, v = k * self._balance[0], v * self._balance[1]
        batch = to_store(
            slot_mapping.long(), _token_positions(layer, slot_mapping) if self._pair[0].rope_shift(index) else None,
            None if self._newest is None else self._newest.slots()[:tokens].long(),
        )  # fmt: skip
        kernels_on(kv_cache.device).store(k, v, self._view(kv_cache, index), index, batch)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: RotatedMetadata | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of the new tokens over their sequences' pages; query and output [T, Hq, D]."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantized attention output is not supported by a packed KV cache")
        if attn_metadata is None:  # vLLM measures its memory
            return output.zero_()
        batch, index = attn_metadata.batch, self._layer_index(layer)
        tokens = batch.positions.shape[0]
        cache = self._view(kv_cache, index)
        batch = batch if self._newest is None else self._newest.join(batch)
        q = _to_kernel_dtype(query[:tokens])
        out = kernels_on(kv_cache.device).attend(q * self._balance[2] if self._balance else q, cache, index, batch, self.scale)
        if self._balance:
            out = out * self._balance[3]
        output[:tokens].copy_(out)
        return output

    def _layer_index(self, layer: Any) -> int:
        """The layer's number in the whole model, which chooses its rotation; one instance serves one layer."""
        if self._index is None:
            self._index = extract_layer_index(layer.layer_name)
        return self._index

    def _view(self, kv_cache: Tensor, index: int) -> PagedKVCache:
        """vLLM's pages of this layer as a cache, made once for as long as they stay where they are, if they have the room."""
        if self._cache is None or self._pages is not kv_cache:
            num_blocks, heads, block_size, content = kv_cache.shape
            # A page may be larger than what it holds, which then lies at its beginning.
            page_size, room = page_bytes(self._pair, heads, self.head_size, block_size), heads * block_size * content
            if page_size > room:
                names = " and ".join(dict.fromkeys(kv_format.name for kv_format in self._pair))
                raise ValueError(
                    f"a page of layer {index} has {room} bytes, and {names} takes {page_size}; serve with tq serve, or give "
                    f"--worker-cls {CPU_WORKER if kv_cache.device.type == 'cpu' else GPU_WORKER}"
                )
            pages = kv_cache.as_strided((num_blocks, page_size), (kv_cache.stride(0), 1))
            self._cache = PagedKVCache.over(
                self._pair, index, fields_in(pages, self._pair, heads, self.head_size, block_size),
                (None, None) if self._newest is None else self._newest.exact_blocks(self._pair), self.head_size,
            )  # fmt: skip
            self._pages = kv_cache
        return self._cache


class RotatedAttentionBackend(AttentionBackend):
    """Packed pages for any vLLM model of full attention with a head_dim that the kernels have."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RotatedAttention]:
        return RotatedAttention

    @staticmethod
    def get_builder_cls() -> type[RotatedMetadataBuilder]:
        return RotatedMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(reads_here().head_dims)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return BLOCK_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those in which a block is one piece of memory."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pages of bytes that have room for K and V of any layer; which one it is, vLLM does not say here.

        The workers of `page_sizes` give each layer its own.
        """
        pairs, config = [default_pair()], get_current_vllm_config_or_none()
        if config is not None and config.model_config is not None:
            states = state_layers(config.model_config)
            layers = [pair for layer, pair in enumerate(kv_plan(config).layers) if layer not in states]
            pairs = layers + pairs if config.speculative_config is not None else layers
        return with_content(spec, max(content_bytes(pair, spec.head_size, spec.head_size_v) for pair in pairs))


def with_content(spec: AttentionSpec, content: int) -> AttentionSpec:
    """Pages in which one token and KV head takes so many bytes."""
    return replace(spec, dtype=torch.uint8, state_content_bytes=content)


def _token_positions(layer: Any, slots: Tensor) -> Tensor:
    """Positions [T] int64 of the running forward's tokens, whose slots [T] are given; 0 for padding."""
    metadata: RotatedMetadata | None = get_attention_context(layer.layer_name)[0]
    positions = torch.zeros_like(slots, dtype=torch.int64)
    if metadata is not None:
        real = metadata.batch.positions[: len(slots)]
        positions[: len(real)] = real
    return positions


def _to_kernel_dtype(x: Tensor) -> Tensor:
    """What the kernels take: BF16 or FP32 as it is, FP16 widened."""
    return x.float() if x.dtype == torch.float16 else x
