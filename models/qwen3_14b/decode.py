"""Decode: one new token a sequence."""

from __future__ import annotations

from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.qwen3_14b.model import embed, head, run_layers
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable


def decode(model: DecoderModel, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
    """Store the K and V of each sequence's next token and predict the one after.

    Args:
        token_ids: [B] int64.
        batch: places of the B tokens, one a sequence.
    Returns:
        [B, vocab] fp32.
    """
    hidden = run_layers(model, embed(model, token_ids), range(model.config.num_layers), batch, cache, ops)
    return head(model, hidden, ops)
