"""The newest tokens of a layer in BF16 beside its packed pages: to vLLM a layer of its own, with a sliding window.

vLLM hands out such a layer's pages by a block table of its own, frees what has left the window, and takes a prefix for known
only where the window before its end is still there. So prefix hits, preemption and reuse of blocks are right as they are for a
model that attends to windows. Every token is stored twice, packed for good and in BF16 for a while; attention reads it in BF16
while it is one of the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend
from haarkv.serving.vllm_plugin.chosen import Pair, content_bytes, exact_pair, tail_tokens
from haarkv.serving.vllm_plugin.tail_blocks import TailSpec
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.kept import KeptBlocks
from haarkv.tq_ops.kv.layer import fields_in, page_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUFFIX = ".tail"
"""Of a tail's name, behind that of its layer."""


@dataclass
class TailMetadata(AttentionMetadata):
    """Where one forward's tokens in BF16 lie.

    Attributes:
        table: [B, n] int32, the blocks of each sequence; what has left the window is block 0.
        joined: the forward's batch, and the same with this table; made once for all layers.
    """

    table: Tensor
    joined: tuple[Batch, Batch] | None = None


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
    """What vLLM asks of a layer without attention: how its pages lie."""

    @staticmethod
    def get_builder_cls() -> Any:
        return TailMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The one in which a block is all layers' pages side by side: groups may then have pages of other sizes, unpadded."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec


class Tail(AttentionLayerBase):
    """One layer's tokens in BF16.

    Args:
        name: vLLM's name of it.
        tokens: R, the newest that a query sees in BF16, itself among them; 0 for sinks alone.
        spec: of its pages.
    """

    def __init__(self, name: str, tokens: int, spec: TailSpec) -> None:
        self.name, self.tokens, self.spec = name, tokens, spec
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[TailBackend]:
        return TailBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.spec

    def kept(self, pair: Pair) -> tuple[KeptBlocks | None, KeptBlocks | None]:
        """Its pages as tokens of K and of V in BF16; None of a side that loses nothing.

        Args:
            pair: the layer's formats.
        """
        num_blocks, heads, block_size, _ = self.kv_cache.shape
        size = page_bytes(exact_pair(), heads, self.spec.head_size, block_size)
        pages = self.kv_cache.view(torch.uint8).as_strided((num_blocks, size), (self.kv_cache.stride(0), 1))
        sides = fields_in(pages, exact_pair(), heads, self.spec.head_size, block_size)
        k, v = (
            KeptBlocks(fields["data"], tail=self.tokens, sink=self.spec.sinks) if kv_format.lossy else None
            for fields, kv_format in zip(sides, pair, strict=True)
        )
        return k, v

    def slots(self) -> Tensor:
        """[T] where the running forward's tokens go; negative for padding."""
        return get_attention_context(self.name)[3]

    def join(self, batch: Batch) -> Batch:
        """The running forward's batch with this group's block table."""
        metadata: TailMetadata = get_attention_context(self.name)[0]
        if metadata.joined is None or metadata.joined[0] is not batch:
            metadata.joined = batch, replace(batch, kept_table=metadata.table)
        return metadata.joined[1]


def tails_beside(specs: dict[str, AttentionSpec], kept: Sequence[str], tokens: int, sinks: int) -> dict[str, Tail]:
    """Tails for some layers, by their own names; in blocks of `tail_tokens`.

    Args:
        specs: packed pages of all layers, by name.
        kept: names of the layers that keep tokens in BF16.
        tokens, sinks: newest and first ones that each keeps.
    """
    packed, block_size = sum(spec.page_size_bytes for spec in specs.values()), specs[kept[0]].block_size
    exact = sum(_spec(specs[name], 1, tokens, sinks).page_size_bytes for name in kept)
    size = tail_tokens(packed, exact, block_size)
    tails = (Tail(name + SUFFIX, tokens, _spec(specs[name], size, tokens, sinks)) for name in kept)
    return {tail.name: tail for tail in tails}


def _spec(packed: AttentionSpec, block_size: int, tokens: int, sinks: int) -> TailSpec:
    # Bytes, as packed pages are: of two dtypes in one pool, vLLM clears every block before it is used. And a window of two
    # tokens at least: for one, vLLM remembers no block, and no prefix would ever be known.
    return TailSpec(
        block_size=block_size, num_kv_heads=packed.num_kv_heads, head_size=packed.head_size, dtype=torch.uint8,
        state_content_bytes=content_bytes(exact_pair(), packed.head_size), sliding_window=max(tokens, 2), sinks=sinks,
    )  # fmt: skip
