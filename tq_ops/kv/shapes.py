"""Shape of one layer's K and V, and block arithmetic; imports nothing of this project."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BLOCK_SIZE = 128
"""Tokens of a block of a paged cache."""
WINDOW_CHUNK = 64
"""With a BF16 tail, a forward takes up to 64 new tokens of a sequence."""
WINDOW_ROOM = 16
"""The tail's ring holds R + 16 tokens. While a layer runs with more new tokens, its ring is temporarily larger."""
RING_CHUNK = 512
"""A layer with a sliding window stores up to 512 new tokens of a sequence at once; longer prompts are cut for it."""


@dataclass(frozen=True)
class KVShape:
    """K and V of one layer.

    Attributes:
        num_kv_heads, head_dim: Hkv, D.
        window: newest tokens that a query sees, itself included; None for all.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def __str__(self) -> str:
        window_text = f" that see {self.window:,} tokens" if self.window else ""
        return f"{self.num_kv_heads} KV heads of {self.head_dim}{window_text}"

    @property
    def numbers(self) -> int:
        """Numbers in one token's K; V has as many."""
        return self.num_kv_heads * self.head_dim

    def ring_blocks(self, row_blocks: int, block_size: int = BLOCK_SIZE, chunk: int = RING_CHUNK) -> int | None:
        """Blocks of a sequence's ring, at most `row_blocks`; None without a sliding window.

        A token is overwritten by the one `ring_blocks * block_size` positions later. The ring spans `chunk` new tokens and the
        `window - 1` before them, which touch one block more where the first of them lies within a block.
        """
        if self.window is None:
            return None
        return min(row_blocks, math.ceil((self.window + chunk - 2) / block_size) + 1)


Shapes = KVShape | Sequence[KVShape | None]
"""Of each layer, None where a layer has no K and V; or one for all layers."""


def each(shapes: Shapes, num_layers: int) -> tuple[KVShape | None, ...]:
    """The shape of each layer; a ValueError if there are not `num_layers`."""
    layer_shapes = (shapes,) * num_layers if isinstance(shapes, KVShape) else tuple(shapes)
    if len(layer_shapes) != num_layers:
        raise ValueError(f"there are shapes of {len(layer_shapes)} layers, and the plan has {num_layers}")
    return layer_shapes


class SequencePlace(NamedTuple):
    """Where a cache holds one sequence.

    Attributes:
        blocks: of layers that keep all tokens, in order.
        row: in rings, windows and states.
    """

    blocks: tuple[int, ...]
    row: int


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold a number of tokens of one sequence."""
    return math.ceil(tokens / block_size)
