"""What a decoder model is: its shapes, its weights, its rotary tables and its forward over any op table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from haarkv.models.parallel import ALONE, Ranks, even_share
from haarkv.models.registry import family_of
from haarkv.models.rope import RopeScaling, RopeTable
from haarkv.models.weights import LayerWeights, Weights
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable

if TYPE_CHECKING:
    from haarkv.models.hf_config import HFConfig


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and facts of one model, of whatever family; the words are Hugging Face's.

    Attributes:
        model_type: its family, a key of `models.registry.FAMILIES`.
        head_dim: D, from the config and never hidden_size / num_heads.
        num_kv_heads: Hkv; each serves num_heads / num_kv_heads query heads.
        tie_word_embeddings: the head is the embedding.
        max_position_embeddings: positions that there are; with YaRN those that its factor reaches, if they are more.
        eos_token_ids: tokens that end a text.
        rope_scaling: how RoPE is stretched over a longer context; None of a plain model.
        qkv_bias: the projections to Q, K and V add a bias.
        num_experts: MLPs of a layer, of which a token goes through a few; 0 of a dense model.
        num_experts_per_tok: those few.
        moe_intermediate_size: of one expert.
        norm_topk_prob: the weights of a token's experts are made to sum to 1.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @property
    def family(self) -> Family:
        """What reads, stores and runs its layers.

        Raises:
            InputError: no family of that `model_type` is built.
        """
        return family_of(self.model_type)

    @property
    def q_size(self) -> int:
        """Rows of the projection to Q."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the projection to K, and of that to V."""
        return self.num_kv_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        layer = sum(math.prod(tensor.shape) for tensor in self.family.LayerWeights.tensors_of(self).values())
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


class DecoderLayer(Protocol):
    """One decoder layer, the same for prefill and decode: it sees tokens, not phases."""

    def __call__(
        self,
        hidden: Tensor,
        weights: Any,
        index: int,
        *,
        config: DecoderConfig,
        ops: OpTable,
        cache: PagedKVCache,
        batch: Batch,
        rope: tuple[Tensor, Tensor],
        ranks: Ranks,
    ) -> Tensor:
        """Run one layer and store its K and V.

        Args:
            hidden: [T, hidden] bf16 or fp32, the model's dtype.
            weights: of this layer, the family's own `LayerWeights`.
            index: of this layer, which chooses rotation and cache.
            rope: cos and sin [T, D/2] fp32 of the batch's positions.
            ranks: who else runs this layer. Attention and the MLP end in `ranks.sum` of what this rank's heads and columns
                make, fp32, before the residual is added: the hidden state is rounded as often as on one rank.
        Returns:
            [T, hidden] of hidden's dtype.
        """


class Family(Protocol):
    """A model family: a module with these four names. To add one, write it and name it in `models.registry.FAMILIES`.

    Attributes:
        LayerWeights: the dataclass of one layer's tensors.
        SIZES: members by the word that `random:SIZE` takes; may be empty.
        decoder_layer: the forward of one layer.
    """

    LayerWeights: type[LayerWeights]
    SIZES: Mapping[str, DecoderConfig]

    @property
    def decoder_layer(self) -> DecoderLayer: ...

    def read_config(self, file: HFConfig) -> DecoderConfig:
        """Shapes from a `config.json`.

        Raises:
            InputError: an entry that cannot be, or a feature that is not built, by name.
        """


@dataclass(frozen=True)
class DecoderModel:
    """Shapes, weights and rotary tables of one model, or of one rank's part of it; it holds no state between forwards.

    Attributes:
        config: of what is here; of a part, `models.parallel.Split.part`.
        ranks: who holds the other parts.
    """

    config: DecoderConfig
    weights: Weights
    rope: RopeTable
    ranks: Ranks = ALONE

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states: torch.float32 or torch.bfloat16."""
        return self.weights.embedding.dtype

    def to(self, device: torch.device) -> DecoderModel:
        """The same model on another device; itself where it already is."""
        if self.weights.embedding.device == device:
            return self
        return replace(self, weights=self.weights.to(device), rope=RopeTable(self.config, device))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [T, hidden] of token ids [T]."""
        embedding, ranks = self.weights.embedding, self.ranks
        if ranks.size == 1:
            return embedding[token_ids]
        # One rank has a token's row, the others add zeros to it: the sum is exact.
        row = token_ids - even_share(self.config.vocab_size, ranks.rank, ranks.size).start
        here = (row >= 0) & (row < len(embedding))
        rows = embedding[row.clamp(0, len(embedding) - 1)].float()
        return ranks.sum(rows.masked_fill(~here.unsqueeze(-1), 0.0)).to(embedding.dtype)

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        """Run the decoder layers of `span` on hidden [T, hidden], storing their K and V."""
        layer, rope = self.config.family.decoder_layer, self.rope.at(batch.positions)
        for index in span:
            hidden = layer(
                hidden, self.weights.layers[index], index,
                config=self.config, ops=ops, cache=cache, batch=batch, rope=rope, ranks=self.ranks,
            )  # fmt: skip
        return hidden

    def head(self, hidden: Tensor, ops: OpTable) -> Tensor:
        """Logits [N, vocab] fp32 of final hidden states [N, hidden]."""
        normed = ops.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return self.ranks.gather(ops.linear(normed, self.weights.lm_head), self.config.vocab_size)

    def prefill(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        """Store the K and V of T tokens of B sequences and predict what follows each sequence.

        The batch is ragged. Attention reads the *stored* K and V, quantized, also those of the tokens that have just come
        in: what a token sees does not depend on how its prompt was cut into chunks. Call this once a chunk.

        Args:
            token_ids: [T] int64, the sequences' new tokens one after the other.
            batch: places of the T tokens.
        Returns:
            [B, vocab] fp32, logits of each sequence's last new token.
        """
        hidden = self.layers(self.embed(token_ids), range(self.config.num_layers), batch, cache, ops)
        return self.head(hidden[batch.query_start_loc[1:].long() - 1], ops)

    def decode(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        """Store the K and V of each sequence's next token and predict the one after.

        Args:
            token_ids: [B] int64.
            batch: places of the B tokens, one a sequence.
        Returns:
            [B, vocab] fp32.
        """
        return self.verify(token_ids, batch, cache, ops)

    def verify(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        """Store the K and V of T tokens of B sequences and predict what follows each of them: [T, vocab] fp32."""
        return self.head(self.layers(self.embed(token_ids), range(self.config.num_layers), batch, cache, ops), ops)
