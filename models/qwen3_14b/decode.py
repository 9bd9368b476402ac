"""Decode: one new token a sequence."""

from __future__ import annotations

from torch import Tensor

from models.qwen3_14b.layer import Ops
from models.qwen3_14b.model import Qwen3, embed, head, run_layers
from tq_ops.batch import Batch
from tq_ops.cache import PagedKVCache


def decode(model: Qwen3, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: Ops) -> Tensor:
    """Store the K and V of each sequence's next token and predict the one after.

    Args:
        token_ids: [B] int64.
        batch: places of the B tokens, one a sequence.
    Returns:
        [B, vocab] fp32.
    """
    hidden = run_layers(model, embed(model, token_ids), range(model.config.num_layers), batch, cache, ops)
    return head(model, hidden, ops)
