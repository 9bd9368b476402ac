"""What a decoder model is: its shapes, its weights and its rotary tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from haarkv.models.qwen3_14b.weights import Weights
    from haarkv.models.rope import RopeTable


@dataclass(frozen=True)
class DecoderConfig:
    """What the forward needs to know; the words are Hugging Face's.

    Attributes:
        head_dim: D, from the config and never hidden_size / num_heads.
        num_kv_heads: Hkv; each serves num_heads / num_kv_heads query heads.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: tokens that end a text.
    """

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

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        norms = 2 * self.hidden_size + 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


@dataclass(frozen=True)
class DecoderModel:
    """Shapes, weights and rotary tables of one model; it holds no state between forwards."""

    config: DecoderConfig
    weights: Weights
    rope: RopeTable

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states: torch.float32 or torch.bfloat16."""
        return self.weights.embedding.dtype

    def to(self, device: torch.device) -> DecoderModel:
        """The same model on another device; itself where it already is."""
        if self.weights.embedding.device == device:
            return self
        from haarkv.models.rope import RopeTable

        return DecoderModel(self.config, self.weights.to(device), RopeTable(self.config, device))
