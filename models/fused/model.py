"""The forward of a dense model over fused ops, the same for prefill and decode: it sees tokens, not phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.tq_ops.fused import FusedOps, Heads
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache


@dataclass(frozen=True)
class Packed:
    """What a fused layer multiplies with in one product.

    Attributes:
        qkv_proj: [(Hq + 2 Hkv) * D, hidden], the projections to Q, K and V.
        gate_up_proj: [2 * intermediate, hidden].
        heads: what becomes of the first product.
    """

    qkv_proj: Tensor
    gate_up_proj: Tensor
    heads: Heads


@dataclass(frozen=True)
class FusedModel:
    """A dense model of whatever family, run in 4 products and 5 other ops a layer; `models.fused.fuse` makes one.

    Its layers compute what the families' own `decoder_layer` computes, rounded at the same points.

    Attributes:
        model: shapes, weights and tables; its projections are views of `packed`.
        packed: by layer.
    """

    model: DecoderModel
    packed: tuple[Packed, ...]

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> Tensor:
        """As `DecoderModel.layers`."""
        return self._run(hidden, span, batch, cache, ops)[0]

    def prefill(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> Tensor:
        """As `DecoderModel.prefill`."""
        return self._head(self._normed(token_ids, batch, cache, ops)[batch.query_start_loc[1:].long() - 1], ops)

    def decode(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> Tensor:
        """As `DecoderModel.decode`."""
        return self.verify(token_ids, batch, cache, ops)

    def verify(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> Tensor:
        """As `DecoderModel.verify`."""
        return self._head(self._normed(token_ids, batch, cache, ops), ops)

    def _normed(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> Tensor:
        span = range(self.model.config.num_layers)
        return self._run(self.model.embed(token_ids), span, batch, cache, ops)[1]

    def _head(self, normed: Tensor, ops: FusedOps) -> Tensor:
        return ops.linear(normed, self.model.weights.lm_head)

    def _run(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> tuple[Tensor, Tensor]:
        """Hidden states after the layers of `span`, and their norm by what comes next: a layer's first norm, or the final one.

        A layer begins with the norm of its input, which stands at the end of the layer before, in one op with its residual.
        """
        config, weights, rope = self.model.config, self.model.weights, self.model.rope.at(batch.positions)
        layers: Any = weights.layers  # of a family, whose fields `LayerWeights` does not declare
        norms = [*(layer.input_norm for layer in layers), weights.final_norm]
        x = ops.rms_norm(hidden, norms[span.start], config.rms_norm_eps)
        for index in span:
            layer, packed = layers[index], self.packed[index]
            qkv = ops.linear(x, packed.qkv_proj)
            attended = ops.attention(qkv, packed.heads, rope, cache, index, batch, config.softmax_scale)
            hidden, x = ops.add_norm(hidden, ops.linear(attended, layer.o_proj), layer.post_norm, config.rms_norm_eps)
            gate, up = ops.linear(x, packed.gate_up_proj).chunk(2, dim=-1)
            product = ops.silu_mul(gate, up, hidden.dtype)
            hidden, x = ops.add_norm(hidden, ops.linear(product, layer.down_proj), norms[index + 1], config.rms_norm_eps)
        return hidden, x
