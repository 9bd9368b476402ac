"""Pages of each layer: packed pages, whose size differs by layer, and pages of the tail, the newest tokens in BF16.

vLLM's hook for the page size does not get the layer, so workers set the sizes. Layers of different sizes share a group, as in
vLLM.

vLLM sees a tail as an additional layer with a sliding window. It gives the tail a block table, frees blocks that left the
window, and counts a prefix as cached only if its window is. So prefix hits, preemption and reuse work as in models with
windows. A token in the tail is stored twice; attention reads the BF16 copy. Sinks keep a sequence's first blocks as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.gpu_worker import Worker

from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend, with_content
from haarkv.serving.vllm_plugin.kv_choice import (
    Pair,
    content_bytes,
    exact_pair,
    is_of_draft,
    kv_plan,
    layer_formats,
    tail_tokens,
)
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.layer import fields_in, page_bytes
from haarkv.tq_ops.kv.residual_window import ResidualBlocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUFFIX = ".tail"
"""Suffix of a tail's layer name."""


# -- Which blocks vLLM keeps of a sequence ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TailSpec(SlidingWindowSpec):
    """Pages of a sequence's `sliding_window` newest and `sinks` first tokens."""

    sinks: int = 0

    @property
    def first_blocks(self) -> int:
        """Blocks kept for the sinks."""
        return -(-self.sinks // self.block_size)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        return super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len) + self.first_blocks


class TailManager(SlidingWindowManager):
    """vLLM's sliding window manager, which also keeps a sequence's first blocks."""

    def __init__(self, kv_cache_spec: TailSpec, **others: Any) -> None:
        super().__init__(kv_cache_spec, **others)
        self._first = kv_cache_spec.first_blocks

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: BlockHashList, max_length: int, kv_cache_group_ids: list[int], block_pool: Any,
        kv_cache_spec: KVCacheSpec, drop_eagle_block: bool, alignment_tokens: int, dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:  # fmt: skip
        """As vLLM's, with the first blocks in place; no hit where one of them is gone."""
        assert isinstance(kv_cache_spec, TailSpec)
        hits, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens,
            dcp_world_size, pcp_world_size,
        )  # fmt: skip
        hashes = resolve_block_hashes(
            block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup, alignment_tokens=alignment_tokens,
        )  # fmt: skip
        for index in range(min(kv_cache_spec.first_blocks, len(hits[0]))):
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for blocks, block in zip(hits, cached, strict=True):
                blocks[index] = block
        return hits, length

    @classmethod
    def reachable_block_mask(
        cls, start_block: int, end_block: int, alignment_tokens: int | None, kv_cache_spec: KVCacheSpec, **others: Any
    ) -> list[bool] | None:
        mask = super().reachable_block_mask(
            start_block=start_block,
            end_block=end_block,
            alignment_tokens=alignment_tokens,
            kv_cache_spec=kv_cache_spec,
            **others,
        )
        assert isinstance(kv_cache_spec, TailSpec)
        if mask is not None:
            for index in range(start_block, min(end_block, kv_cache_spec.first_blocks)):
                mask[index - start_block] = True
        return mask

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], total_computed_tokens: int,
        *others: Any, **more: Any,
    ) -> int:  # fmt: skip
        count = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *others, **more
        )
        # Known first blocks leave the free ones as they are taken; vLLM counts those behind the skipped ones alone.
        skipped_blocks = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        return count + self._get_num_evictable_blocks(new_computed_blocks[: min(self._first, skipped_blocks)])

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:  # fmt: skip
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        blocks = self.req_to_blocks[request_id]
        for index, block in enumerate(new_computed_blocks[: self._first]):
            if blocks[index] is self._null_block and not block.is_null:
                self.block_pool.touch([block])
                blocks[index] = block

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        super()._remove_blocks_in_range(request_id, max(first_block, self._first), last_block)


def register() -> None:
    """Register the manager, in each process of vLLM."""
    KVCacheSpecRegistry.register(TailSpec, TailManager, uniform_type_base_spec=TailSpec)


# -- A layer's tokens in BF16 -----------------------------------------------------------------------------------------------


@dataclass
class TailMetadata(AttentionMetadata):
    """Block table [B, n] int32 of the BF16 blocks (0: left the window), and the forward's batch without and with it."""

    table: Tensor
    batch_pair: tuple[Batch, Batch] | None = None


class TailMetadataBuilder(AttentionMetadataBuilder[TailMetadata]):
    """Takes the block table of a group of tails."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TailMetadata:
        return TailMetadata(common_attn_metadata.block_table_tensor[: common_attn_metadata.num_reqs].int())


class TailBackend(RotatedAttentionBackend):
    """Page layout of a tail."""

    @staticmethod
    def get_builder_cls() -> Any:
        return TailMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The one in which groups may have pages of other sizes, unpadded."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec


class Tail(AttentionLayerBase):
    """One layer's tokens in BF16: the `tokens` newest that a query sees, itself included (0: sinks alone)."""

    def __init__(self, name: str, tokens: int, spec: TailSpec) -> None:
        self.name, self.tokens, self.spec = name, tokens, spec
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[TailBackend]:
        return TailBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.spec

    def exact_blocks(self, pair: Pair) -> tuple[ResidualBlocks | None, ResidualBlocks | None]:
        """Its pages as BF16 blocks of K and of V; None for a lossless format."""
        num_blocks, heads, block_size, _ = self.kv_cache.shape
        size = page_bytes(exact_pair(), heads, self.spec.head_size, block_size)
        pages = self.kv_cache.view(torch.uint8).as_strided((num_blocks, size), (self.kv_cache.stride(0), 1))
        sides = fields_in(pages, exact_pair(), heads, self.spec.head_size, block_size)
        k, v = (
            ResidualBlocks(fields["data"], tail=self.tokens, sink=self.spec.sinks) if kv_format.lossy else None
            for fields, kv_format in zip(sides, pair, strict=True)
        )
        return k, v

    def slots(self) -> Tensor:
        """[T] slots of the forward's tokens; negative for padding."""
        return get_attention_context(self.name)[3]

    def join(self, batch: Batch) -> Batch:
        """The forward's batch with this group's block table."""
        metadata: TailMetadata = get_attention_context(self.name)[0]
        if metadata.batch_pair is None or metadata.batch_pair[0] is not batch:
            metadata.batch_pair = batch, replace(batch, residual_table=metadata.table)
        return metadata.batch_pair[1]


def tails_beside(specs: dict[str, AttentionSpec], names: Sequence[str], tokens: int, sinks: int) -> dict[str, Tail]:
    """Tails for the layers in `names`, by their own names.

    Args:
        specs: packed pages of all layers, by name.
        tokens, sinks: newest and first tokens that each keeps.
    """
    packed, block_size = sum(spec.page_size_bytes for spec in specs.values()), specs[names[0]].block_size
    exact = sum(_spec(specs[name], 1, tokens, sinks).page_size_bytes for name in names)
    size = tail_tokens(packed, exact, block_size)
    tails = (Tail(name + SUFFIX, tokens, _spec(specs[name], size, tokens, sinks)) for name in names)
    return {tail.name: tail for tail in tails}


def _spec(packed: AttentionSpec, block_size: int, tokens: int, sinks: int) -> TailSpec:
    # Bytes, as packed pages are: of two dtypes in one pool, vLLM clears every block before it is used. And a window of two
    # tokens at least: for one, vLLM remembers no block, and no prefix would ever be known.
    return TailSpec(
        block_size=block_size, num_kv_heads=packed.num_kv_heads, head_size=packed.head_size, dtype=torch.uint8,
        state_content_bytes=content_bytes(exact_pair(), packed.head_size), sliding_window=max(tokens, 2), sinks=sinks,
    )  # fmt: skip


# -- Workers ----------------------------------------------------------------------------------------------------------


class OwnPages:
    """Mixin for vLLM's workers; stands before the worker class among the bases."""

    vllm_config: VllmConfig

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Each layer's pages by name, with tails where the plan keeps tokens in BF16."""
        with set_current_vllm_config(self.vllm_config):
            specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        specs = {name: spec for name, spec in specs.items() if not name.endswith(SUFFIX)}
        for name in filter(self._is_packed, specs):
            content = content_bytes(layer_formats(self.vllm_config, name), specs[name].head_size, specs[name].head_size_v)
            specs[name] = with_content(specs[name], content)
        return fit_windows(self._equal_pages(specs)) | self._tails(specs)

    def _tails(self, specs: dict[str, Any]) -> dict[str, KVCacheSpec]:
        plan, layers = kv_plan(self.vllm_config), self.vllm_config.compilation_config.static_forward_context
        names = [
            name for name in filter(self._is_packed, specs)
            if not is_of_draft(self.vllm_config, name) and any(map(plan.has_window, layer_formats(self.vllm_config, name)))
        ]  # fmt: skip
        if not names:
            return {}
        tails = tails_beside(specs, names, plan.recent or 0, plan.sink)
        for name in names:
            layers[name + SUFFIX] = tails[name + SUFFIX]
            layers[name].impl.keep_newest(tails[name + SUFFIX])
        return {name: tail.spec for name, tail in tails.items()}

    def _equal_pages(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Packed pages of one size beside states: vLLM makes all pages as large as a state, and unequal ones would form
        groups.
        """
        ours = [name for name in specs if self._is_packed(name)]
        if not ours or not any(isinstance(spec, MambaSpec) for spec in specs.values()):
            return specs
        content = max(specs[name].state_content_bytes for name in ours)
        return specs | {name: with_content(specs[name], content) for name in ours}

    def _is_packed(self, name: str) -> bool:
        layer = self.vllm_config.compilation_config.static_forward_context[name]
        return layer.get_attn_backend() is RotatedAttentionBackend


class RotatedGpuWorker(OwnPages, Worker):
    """vLLM's GPU worker with page sizes per layer. It has not run."""


# -- Sliding windows ----------------------------------------------------------------------------------------------------------

_LEAST_TOKENS = 32
"""Least tokens of a block of vLLM's CPU backend."""


def fit_windows(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Sliding-window layers in the largest blocks whose pages fit into packed ones, or the least.

    vLLM keeps these layers in BF16, in groups with their own block tables. All groups share one pool of equal pages.
    """
    packed = max((spec.page_size_bytes for spec in specs.values() if not isinstance(spec, SlidingWindowSpec)), default=0)
    return {name: _fit_window(spec, packed) if isinstance(spec, SlidingWindowSpec) else spec for name, spec in specs.items()}


def _fit_window(spec: SlidingWindowSpec, page_bytes: int) -> SlidingWindowSpec:
    # Halves of a block, so that vLLM finds a number of tokens that are whole blocks of every group.
    while spec.page_size_bytes > page_bytes and spec.block_size % (2 * _LEAST_TOKENS) == 0:
        spec = replace(spec, block_size=spec.block_size // 2)
    return spec
