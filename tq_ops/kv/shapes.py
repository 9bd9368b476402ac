"""Shape of one layer's K and V, and block arithmetic. Imports no other module of this project."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BLOCK_SIZE = 128
"""Tokens in one block of a paged cache."""
WINDOW_CHUNK = 64
"""With a BF16 tail: the most new tokens of a sequence in one forward; some executors take more:
`engine.generation.tail_chunk`."""
WINDOW_ROOM = 16
"""The tail's ring holds R + 16 tokens. While a layer runs with more new tokens, it gets a larger ring."""
RING_CHUNK = 512
"""A layer with a sliding window stores up to 512 new tokens of a sequence at once, with a tail up to `BLOCK_SIZE`; the cache
cuts longer prompts."""


@dataclass(frozen=True)
class KVShape:
    """Shape of one layer's K and V.

    Attributes:
        num_kv_heads, head_dim: Hkv, D.
        window: length of the sliding window: the newest tokens that a query sees, its own token included; None for all tokens.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def __str__(self) -> str:
        window_text = f" that see {self.window:,} tokens" if self.window else ""
        return f"{self.num_kv_heads} KV heads of {self.head_dim}{window_text}"

    @property
    def numbers(self) -> int:
        """Count of numbers in K of one token; V has the same count."""
        return self.num_kv_heads * self.head_dim

    def first_block(self, length: int, block_size: int = BLOCK_SIZE) -> int:
        """The first block that the next query of a sequence of `length` tokens sees; its window hides the blocks before."""
        return 0 if self.window is None else max(0, length - self.window + 1) // block_size

    def ring_blocks(self, row_blocks: int, block_size: int = BLOCK_SIZE, chunk: int = RING_CHUNK) -> int | None:
        """Blocks in a sequence's ring, at most `row_blocks`; None without a sliding window.

        The ring's size says how long a token stays: `LayerKV.write` stores the token `ring_blocks * block_size` positions
        later in its place. The ring holds `chunk` new tokens and the `window - 1` before them: n = window - 1 + chunk tokens,
        which begin anywhere in a block and touch at most ceil((n - 1) / block_size) + 1 blocks, so kernels may read whole
        blocks. What is left over lets drafts be taken back (`PagedKVCache.most_undone`).
        """
        if self.window is None:
            return None
        return min(row_blocks, math.ceil((self.window + chunk - 2) / block_size) + 1)


Shapes = KVShape | Sequence[KVShape | None]
"""The shape of each layer, None for a layer without K and V; or one shape for all layers."""


def each(shapes: Shapes, num_layers: int) -> tuple[KVShape | None, ...]:
    """The shape of each layer; a ValueError if their number is not `num_layers`."""
    layer_shapes = (shapes,) * num_layers if isinstance(shapes, KVShape) else tuple(shapes)
    if len(layer_shapes) != num_layers:
        raise ValueError(f"there are shapes of {len(layer_shapes)} layers, and the plan has {num_layers}")
    return layer_shapes


class SequencePlace(NamedTuple):
    """The places of one sequence in a cache.

    Attributes:
        blocks: its blocks, in order, in layers without a sliding window.
        row: its row in rings, residual windows and states.
    """

    blocks: tuple[int, ...]
    row: int


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Number of blocks that hold `tokens` tokens of one sequence."""
    return math.ceil(tokens / block_size)
