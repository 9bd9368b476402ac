"""Prefill: new tokens of several sequences at once, ragged, each attending to what its sequence has stored so far.

Attention reads the *stored* K and V, quantized, also those of the tokens that have just come in: what a token sees does not
depend on how its prompt was cut into chunks. A prompt is prefilled in chunks by calling this once a chunk.
"""

from __future__ import annotations

from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.qwen3_14b.model import embed, head, run_layers
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable


def prefill(model: DecoderModel, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
    """Store the K and V of T tokens of B sequences and predict what follows each sequence.

    Args:
        token_ids: [T] int64, the sequences' new tokens one after the other.
        batch: places of the T tokens.
    Returns:
        [B, vocab] fp32, logits of each sequence's last new token.
    """
    hidden = run_layers(model, embed(model, token_ids), range(model.config.num_layers), batch, cache, ops)
    return head(model, hidden[batch.query_start_loc[1:].long() - 1], ops)
