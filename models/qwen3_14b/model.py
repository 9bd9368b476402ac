"""A Qwen3 and the pieces that its prefill and its decode share."""

from __future__ import annotations

from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.qwen3_14b.layer import decoder_layer
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable


def embed(model: DecoderModel, token_ids: Tensor) -> Tensor:
    """Hidden states [T, hidden] of token ids [T]."""
    return model.weights.embedding[token_ids]


def run_layers(model: DecoderModel, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
    """Run the decoder layers of `span` on hidden [T, hidden], storing their K and V."""
    rope = model.rope.at(batch.positions)
    for index in span:
        hidden = decoder_layer(
            hidden, model.weights.layers[index], index,
            config=model.config, ops=ops, cache=cache, batch=batch, rope=rope,
        )  # fmt: skip
    return hidden


def head(model: DecoderModel, hidden: Tensor, ops: OpTable) -> Tensor:
    """Logits [N, vocab] fp32 of final hidden states [N, hidden]."""
    return ops.linear(ops.rms_norm(hidden, model.weights.final_norm, model.config.rms_norm_eps), model.weights.lm_head)
