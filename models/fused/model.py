"""The forward of a model over fused ops, the same for prefill and decode: it sees tokens, not phases."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.tq_ops.fused import FusedOps, Heads
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.weight import Weight


@dataclass(frozen=True)
class Packed:
    """What a fused layer multiplies with in one product.

    Attributes:
        qkv_proj: [(Hq + 2 Hkv) * D, hidden], the projections to Q, K and V; those themselves where they lie in blocks of
            different types.
        gate_up_proj: [2 * intermediate, hidden], likewise; None of a layer with experts, which are in its `stack`.
        heads: what becomes of the first product.
    """

    qkv_proj: Weight | tuple[Weight, ...]
    gate_up_proj: Weight | tuple[Weight, ...] | None
    heads: Heads


@dataclass(frozen=True)
class FusedModel:
    """A model whose layers attend, run in few ops, of a dense layer 4 products and 5 others; `models.fused.fuse` makes one.

    Its layers compute what `models.layer.decoder_layer` computes, rounded at the same points.

    Attributes:
        model: declaration, weights and tables; its projections are views of `packed`.
        packed: by layer.
    """

    model: DecoderModel
    packed: tuple[Packed, ...]

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> Tensor:
        """As `DecoderModel.forward`."""
        return self.layers(self.model.embed(token_ids), range(self.model.config.num_layers), batch, cache, ops)

    def head(self, hidden: Tensor, ops: FusedOps) -> Tensor:
        """As `DecoderModel.head`."""
        normed = ops.rms_norm(hidden, self.model.weights.final_norm, self.model.config.final_norm.eps)
        return ops.linear(normed, self.model.weights.lm_head)

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: FusedOps) -> Tensor:
        """As `DecoderModel.layers`.

        A layer begins with the norm of its input, which stands at the end of the layer before, in one op with its residual.
        """
        config, weights = self.model.config, self.model.weights
        ropes = self.model.rope_at(batch.positions)
        norms = [*(layer["input_norm"] for layer in weights.layers), weights.final_norm]
        x = ops.rms_norm(hidden, norms[span.start], config.layers[span.start].norm.eps) if span else hidden
        for index in span:
            layer, packed, declared = weights.layers[index], self.packed[index], config.layers[index]
            mixer, eps = declared.attention, declared.norm.eps
            qkv = ops.linear(x, packed.qkv_proj)
            with cache.with_room(index, batch):
                attended = ops.attention(qkv, packed.heads, ropes[mixer.rope], cache, index, batch, mixer.scale)
            behind = [(layer[f"{part}_out_norm"], eps) if declared.norms_behind else None for part in ("mixer", "mlp")]
            hidden, x = ops.add_norm(hidden, ops.linear(attended, layer.matrix("o_proj")), layer["post_norm"], eps, behind[0])
            if layer.stack is not None:
                update = ops.experts(x, ops.linear(x, layer.matrix("router")), layer.stack)
            else:
                assert packed.gate_up_proj is not None
                gate, up = ops.linear(x, packed.gate_up_proj).chunk(2, dim=-1)
                gated = ops.silu_mul if declared.mlp.activation == "silu" else ops.gelu_mul
                update = ops.linear(gated(gate, up, hidden.dtype), layer.matrix("down_proj"))
            next_eps = config.layers[index + 1].norm.eps if index + 1 < config.num_layers else config.final_norm.eps
            hidden, x = ops.add_norm(hidden, update, norms[index + 1], next_eps, behind[1])
        return hidden
