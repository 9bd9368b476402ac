"""A decoder model, its forward over any op table, and an empty cache for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import ModelConfig, Rope
from haarkv.models.layer import Step, decoder_layer
from haarkv.models.parallel import SINGLE_RANK, Ranks, even_share
from haarkv.models.rope import RopeTable
from haarkv.models.weights import Weights
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import WINDOW_ROOM, blocks_for
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import weight_rows


@dataclass(frozen=True)
class DecoderModel:
    """A model, or one rank's part of it; it has no state between forwards.

    Attributes:
        config: of a rank's part, `models.parallel.Split.part`.
        ropes: a table for each rotary embedding of its layers.
    """

    config: ModelConfig
    weights: Weights
    ropes: Mapping[Rope, RopeTable]
    ranks: Ranks = SINGLE_RANK

    @classmethod
    def from_weights(cls, config: ModelConfig, weights: Weights, ranks: Ranks = SINGLE_RANK) -> DecoderModel:
        """A model on the host."""
        return cls(config, weights, rope_tables(config), ranks)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states: torch.float32 or torch.bfloat16."""
        return self.weights.embedding.dtype

    def to(self, device: torch.device) -> DecoderModel:
        """The same model on another device; itself where it already is."""
        if self.weights.embedding.device == device:
            return self
        return self.with_weights(self.weights.map(lambda weight: weight.to(device)), device)

    def with_weights(self, weights: Weights, device: torch.device) -> DecoderModel:
        """The same model with other weights, which are on a device."""
        is_same = self.weights.embedding.device == device
        return replace(self, weights=weights, ropes=self.ropes if is_same else rope_tables(self.config, device))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [T, hidden] of token ids [T]."""
        embedding, ranks = self.weights.embedding, self.ranks
        if ranks.size == 1:
            rows = weight_rows(embedding, token_ids)
        else:
            # One rank has a token's row, the others add zeros: the sum is exact.
            row = token_ids - even_share(self.config.vocab_size, ranks.rank, ranks.size).start
            in_part = (row >= 0) & (row < len(embedding))
            part = weight_rows(embedding, row.clamp(0, len(embedding) - 1)).float()
            rows = ranks.sum(part.masked_fill(~in_part.unsqueeze(-1), 0.0)).to(embedding.dtype)
        if self.config.embedding_scale == 1.0:
            return rows
        return rows * torch.tensor(self.config.embedding_scale, dtype=rows.dtype)

    def rope_at(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        """cos and sin of positions [T], by rotary embedding."""
        return {rope: table.at(positions) for rope, table in self.ropes.items()}

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        """Run the layers of `span` on hidden [T, hidden] of a ragged batch.

        Attention reads stored (quantized) K and V of new tokens, too: results do not depend on how a prompt is chunked.
        """
        step = Step(ops, cache, batch, self.rope_at(batch.positions))
        for index in span:
            hidden = decoder_layer(hidden, self.weights.layers[index], self.config.layers[index], index, step, self.ranks)
        return hidden

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        """Hidden states [T, hidden] before the final norm of new tokens [T] int64, sequence after sequence.

        Prefill, decode and verification of drafts are all this call.
        """
        return self.layers(self.embed(token_ids), range(self.config.num_layers), batch, cache, ops)

    def head(self, hidden: Tensor, ops: OpTable) -> Tensor:
        """Logits [N, vocab] fp32 of final hidden states [N, hidden]."""
        x = ops.rms_norm(hidden, self.weights.final_norm, self.config.final_norm.eps)
        return self.ranks.gather(ops.linear(x, self.weights.lm_head), self.config.vocab_size)


def rope_tables(config: ModelConfig, device: torch.device | str = "cpu") -> dict[Rope, RopeTable]:
    """A table for each rotary embedding of a model's layers."""
    ropes = dict.fromkeys(mixer.rope for mixer in config.attentions)
    return {rope: RopeTable(rope, config.max_position_embeddings, device) for rope in ropes}


def new_cache(
    config: ModelConfig, plan: KVPlan, *, sequences: int, tokens: int, device: torch.device | str = "cpu",
    room: int | None = WINDOW_ROOM, **more: Any,
) -> tuple[PagedKVCache, PagedSequences]:  # fmt: skip
    """An empty cache for `sequences` of up to `tokens` tokens each, and its paging."""
    blocks = blocks_for(tokens, **({"block_size": more["block_size"]} if "block_size" in more else {}))
    cache = PagedKVCache(
        plan, config.kv_shapes, num_blocks=sequences * blocks, num_rows=sequences, row_blocks=blocks, device=device,
        states=config.state_shapes, room=room, **more,
    )  # fmt: skip
    return cache, PagedSequences(cache.num_blocks, cache.block_size, num_rows=sequences)
