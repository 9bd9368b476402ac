"""Which blocks of tokens in BF16 vLLM keeps of a sequence: those of its newest tokens, and the first ones.

vLLM's own manager of sliding windows keeps the newest. The first tokens, which every query sees, are one more reason to keep a
block: it stays with the sequence, and a prefix is known only where it is still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class TailSpec(SlidingWindowSpec):
    """Pages of a sequence's newest tokens, `sliding_window` of them, and of its first `sinks`."""

    sinks: int = 0

    @property
    def first_blocks(self) -> int:
        """Those that stay for the sinks."""
        return -(-self.sinks // self.block_size)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        return super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len) + self.first_blocks


class TailManager(SlidingWindowManager):
    """vLLM's manager of sliding windows, which does not let go of a sequence's first blocks."""

    def __init__(self, kv_cache_spec: TailSpec, **others: Any) -> None:
        super().__init__(kv_cache_spec, **others)
        self._first = kv_cache_spec.first_blocks

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: BlockHashList, max_length: int, kv_cache_group_ids: list[int], block_pool: Any,
        kv_cache_spec: KVCacheSpec, drop_eagle_block: bool, alignment_tokens: int, dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:  # fmt: skip
        """As vLLM's, with the first blocks in their places; nothing is known where one of them is gone."""
        assert isinstance(kv_cache_spec, TailSpec)
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens,
            dcp_world_size, pcp_world_size,
        )  # fmt: skip
        hashes = resolve_block_hashes(
            block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup, alignment_tokens=alignment_tokens,
        )  # fmt: skip
        for index in range(min(kv_cache_spec.first_blocks, len(found[0]))):
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[index] = block
        return found, length

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
        needed = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *others, **more
        )
        # Known first blocks leave the free ones as they are taken; vLLM counts those behind the skipped ones alone.
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        return needed + self._get_num_evictable_blocks(new_computed_blocks[: min(self._first, skipped)])

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:  # fmt: skip
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        held = self.req_to_blocks[request_id]
        for index, block in enumerate(new_computed_blocks[: self._first]):
            if held[index] is self._null_block and not block.is_null:
                self.block_pool.touch([block])
                held[index] = block

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        super()._remove_blocks_in_range(request_id, max(first_block, self._first), last_block)


def register() -> None:
    """Tell vLLM who manages those blocks, in each of its processes."""
    KVCacheSpecRegistry.register(TailSpec, TailManager, uniform_type_base_spec=TailSpec)
