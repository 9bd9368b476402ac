"""What a model and its KV cache take, as one function says it: for `tq info`, and for what measures it."""

from __future__ import annotations

from dataclasses import dataclass

from haarkv.models.config import ModelConfig
from haarkv.models.weights import num_parameters
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


def needed(config: ModelConfig, plan: KVPlan, tokens: int, sequences: int = 1, number_bytes: int = 2) -> Needed:
    """What sequences of so many tokens each take.

    Args:
        number_bytes: of one weight: 2 in bfloat16, 4 in float32.
    """
    kv = cache_bytes(plan, tokens, config.kv_shapes, sequences, config.state_bytes)
    return Needed(number_bytes * num_parameters(config), kv)


def longest_context(config: ModelConfig, plan: KVPlan, memory: int, sequences: int = 1, number_bytes: int = 2) -> int:
    """The most tokens of each sequence that `memory` has room for, as `needed` counts, in whole blocks; at least 0."""
    room = memory - number_bytes * num_parameters(config)
    return tokens_that_fit(plan, room, config.kv_shapes, sequences, config.state_bytes)
