"""What a model and its KV cache take, as one function says it: for `tq info`, and for what measures it."""

from __future__ import annotations

from dataclasses import dataclass

from haarkv.models.base import DecoderConfig
from haarkv.tq_ops.kv.cache import cache_bytes, tokens_that_fit
from haarkv.tq_ops.kv.plan import KVPlan


@dataclass(frozen=True)
class Needed:
    """Bytes of a loaded model with an allocated cache. What a forward computes with is not in it.

    Attributes:
        weights: of the model; a head tied to the embedding counts once.
        kv: of the cache: whole blocks, and the tokens that stay in BF16.
    """

    weights: int
    kv: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.weights + self.kv


def needed(config: DecoderConfig, plan: KVPlan, tokens: int, sequences: int = 1, number_bytes: int = 2) -> Needed:
    """What sequences of so many tokens each take.

    Args:
        number_bytes: of one weight: 2 in bfloat16, 4 in float32.
    """
    kv = cache_bytes(plan, tokens, config.num_kv_heads, config.head_dim, sequences)
    return Needed(number_bytes * config.num_parameters(), kv)


def longest_context(config: DecoderConfig, plan: KVPlan, memory: int, sequences: int = 1, number_bytes: int = 2) -> int:
    """The most tokens of each sequence that `memory` has room for, as `needed` counts, in whole blocks; at least 0."""
    room = memory - number_bytes * config.num_parameters()
    return tokens_that_fit(plan, room, config.num_kv_heads, config.head_dim, sequences)
