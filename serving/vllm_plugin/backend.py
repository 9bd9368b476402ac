"""The attention backend: pages of codes and scales, written and read by this project's kernels.

A page of vLLM is one block of one layer, with the bytes that `kv.layer` needs: in `tq4`, 132 for K and V of one token and KV
head of 128. vLLM allocates, shares and frees it; this module views it as a `PagedKVCache`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
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
from haarkv.tq_ops.cuda.layout import NO_FAULT
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.layer import fields_in, page_bytes
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE

if TYPE_CHECKING:
    from haarkv.serving.vllm_plugin.pages import Tail


@dataclass
class RotatedMetadata(AttentionMetadata):
    """One forward's batch for all layers, without padding tokens."""

    batch: Batch


class RotatedMetadataBuilder(AttentionMetadataBuilder[RotatedMetadata]):
    """Makes a `Batch` without waiting for the device, in buffers that stay: vLLM may replay a captured decode step."""

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
    """Tensors with stable addresses for computed fields; they grow if a batch is larger than promised."""

    def __init__(self, tokens: int, sequences: int, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, Tensor] = {}
        self._sizes = {"positions": tokens, "slot_mapping": tokens, "query_start_loc": sequences + 1}
        self._sizes |= {"seq_lens": sequences, "rows": sequences}

    def keep(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values in the field's buffer, from its beginning."""
        count = len(values)
        buffer = self._kept.get(name)
        if buffer is None or len(buffer) < count or buffer.dtype != dtype:
            buffer = torch.zeros(max(count, self._sizes[name]), dtype=dtype, device=self.device)
            self._kept[name] = buffer
        return buffer[:count].copy_(values)

    def as_is(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """vLLM's own tensor if it has this dtype; else as `keep`."""
        return values if values.dtype == dtype else self.keep(name, values, dtype)


def forward_batch(common: CommonAttentionMetadata, buffers: Buffers) -> Batch:
    """vLLM's metadata of a forward as a `Batch`; new tokens are the last of their sequences.

    Never waits for the device. The batch may be padded with empty sequences and trailing tokens, whose positions mean nothing.

    Raises:
        NotImplementedError: non-causal attention.
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
    """One layer's causal attention over its pages; arguments are vLLM's."""

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
        """Keep tokens in BF16 there; before any page is seen."""
        self._newest = newest

    def store_in(self, pair: Pair) -> None:
        """Set formats for K and V; before any page is seen."""
        self._pair = pair

    def balance(self, k: Tensor | None, v: Tensor | None, device: torch.device) -> None:
        """Scale K and V [Hkv, D] before storing, queries and output by the inverse; None is 1."""
        one = torch.ones(self.num_kv_heads, self.head_size)
        # Powers of two: BF16 holds them, and takes no other dtype's digits away.
        k, v = (side.to(device, torch.bfloat16) for side in (one if k is None else k, one if v is None else v))
        group = self.num_heads // self.num_kv_heads
        self._balance = k, v, (1 / k).repeat_interleave(group, dim=0), (1 / v).repeat_interleave(group, dim=0)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Quantize and store new K and V [T, Hkv, D]; negative slots are padding."""
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
        """Attention of the new tokens; query and output [T, Hq, D]."""
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
        """The layer's number in the model, which selects its rotation; read from its name once."""
        if self._index is None:
            self._index = extract_layer_index(layer.layer_name)
        return self._index

    def _view(self, kv_cache: Tensor, index: int) -> PagedKVCache:
        """vLLM's pages of this layer as a cache; cached while they stay in place."""
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
    """Packed pages for full attention with a head_dim that the kernels have."""

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
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pages large enough for any layer, for vLLM does not say which one it asks for; workers set each layer's own size."""
        pairs, config = [default_pair()], get_current_vllm_config_or_none()
        if config is not None and config.model_config is not None:
            states = state_layers(config.model_config)
            layers = [pair for layer, pair in enumerate(kv_plan(config).layers) if layer not in states]
            pairs = layers + pairs if config.speculative_config is not None else layers
        return with_content(spec, max(content_bytes(pair, spec.head_size, spec.head_size_v) for pair in pairs))


def with_content(spec: AttentionSpec, content: int) -> AttentionSpec:
    """Pages with `content` bytes a token and KV head."""
    return replace(spec, dtype=torch.uint8, state_content_bytes=content)


def _token_positions(layer: Any, slots: Tensor) -> Tensor:
    """Positions [T] int64 of the forward's tokens; 0 for padding."""
    metadata: RotatedMetadata | None = get_attention_context(layer.layer_name)[0]
    positions = torch.zeros_like(slots, dtype=torch.int64)
    if metadata is not None:
        real = metadata.batch.positions[: len(slots)]
        positions[: len(real)] = real
    return positions


def _to_kernel_dtype(x: Tensor) -> Tensor:
    """FP16 as FP32; other dtypes as they are."""
    return x.float() if x.dtype == torch.float16 else x


# -- Kernels ----------------------------------------------------------------------------------------------------------
#
# K or V that are not finite become zeros, so that one request does not end the others, and the log names the first. A CPU logs
# at once. On a GPU nothing may wait for the device: the kernel notes the fault there, and a later batch logs it.

logger = init_logger(f"vllm.{__name__}")
STAND_IN = "zeros stand in for what is not finite"


def to_store(slots: Tensor, positions: Tensor | None = None, residual_slots: Tensor | None = None) -> Batch:
    """A batch with the fields that storing T tokens needs: slots, positions (if K's format needs them) and BF16 slots, each
    [T] int64.
    """
    nothing = slots.new_zeros(0)
    return Batch(
        positions=nothing if positions is None else positions, slot_mapping=slots, block_table=nothing, seq_lens=nothing,
        query_start_loc=nothing, rows=nothing, residual_slots=residual_slots,
    )  # fmt: skip


class CpuKernels:
    """The C++ kernels."""

    def __init__(self) -> None:
        from haarkv.tq_ops.cpu.ops import CpuOps

        self._ops = CpuOps()

    def store(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        """Quantize and store k, v [T, Hkv, D] by a batch of `to_store`."""
        real = batch.slot_mapping >= 0
        if not real.all():
            positions, exact_slots = (
                x if x is None or not len(x) else x[real] for x in (batch.positions, batch.residual_slots)
            )
            k, v, batch = k[real], v[real], to_store(batch.slot_mapping[real], positions, exact_slots)
        try:
            self._ops.store_kv(k, v, cache.view(layer, batch))
        except NonFiniteError as error:
            logger.error("%s; %s", error, STAND_IN)
            k, v = (torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in (k, v))
            self._ops.store_kv(k, v, cache.view(layer, batch))

    def attend(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
        """Attention of q [T, Hq, D], of q's shape and dtype."""
        return self._ops.paged_attention(q, cache.view(layer, batch), scale)

    def next_batch(self) -> None:
        """Called before each forward; does nothing here."""


class GpuKernels:
    """The Triton kernels (on a CPU: in Triton's interpreter); no call waits for the device."""

    def __init__(self, device: torch.device) -> None:
        # Triton is imported where its kernels are to run, and nowhere else.
        from haarkv.tq_ops.cuda import ops

        self._ops: Any = ops
        self._fault = ops.new_fault(device)
        on_cuda = device.type == "cuda"
        self._seen = torch.full((1,), NO_FAULT, dtype=torch.int64, pin_memory=on_cuda)
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def store(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        """As `CpuKernels.store`."""
        self._ops.append(k, v, cache.view(layer, batch), self._fault, stand_in=True)

    def attend(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
        """As `CpuKernels.attend`."""
        out: Tensor = self._ops.paged_attention(q, cache.view(layer, batch), scale)
        return out

    def next_batch(self) -> None:
        """Log the fault that an earlier copy brought, if it has arrived, and start another copy; each fault is seen once."""
        if self._copied is not None and not self._copied.query():
            return  # the device has not come so far; the fault waits there
        if (key := int(self._seen)) != NO_FAULT:
            layer, side, token, head = self._ops.fault_place(key)
            logger.error(
                "layer %d: %s of token %d of an earlier batch, KV head %d is not finite; %s", layer, side, token, head,
                STAND_IN,
            )  # fmt: skip
        self._seen.copy_(self._fault, non_blocking=True)
        self._fault.fill_(NO_FAULT)
        if self._copied is not None:
            self._copied.record()


@cache
def kernels_on(device: torch.device) -> CpuKernels | GpuKernels:
    """The kernels of a device."""
    return CpuKernels() if device.type == "cpu" else GpuKernels(device)
