"""The bytes of a cache, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from tq.hf.store import SideStore


@dataclass(frozen=True)
class LayerStats:
    """One layer.

    Attributes:
        layer: its index.
        kv: its formats, as `kv=` takes them.
        tokens: of each row that K holds; a sliding window leaves some behind.
        used: bytes in use: packed fields, tail and sink, of K and V.
        allocated: bytes of memory taken, room to grow included.
        bf16, fp32: bytes of the same tokens in that dtype.
    """

    layer: int
    kv: str
    tokens: int
    used: int
    allocated: int
    bf16: int
    fp32: int


@dataclass(frozen=True)
class CacheStats:
    """All layers and their sums, in bytes; `used / bf16` is `ratio`."""

    layers: tuple[LayerStats, ...]

    @property
    def used(self) -> int:
        """Bytes in use."""
        return sum(row.used for row in self.layers)

    @property
    def allocated(self) -> int:
        """Bytes allocated."""
        return sum(row.allocated for row in self.layers)

    @property
    def bf16(self) -> int:
        """Bytes of the same tokens in BF16."""
        return sum(row.bf16 for row in self.layers)

    @property
    def fp32(self) -> int:
        """Bytes of the same tokens in FP32."""
        return sum(row.fp32 for row in self.layers)

    @property
    def ratio(self) -> float:
        """Bytes in use, relative to BF16; 0 for an empty cache."""
        return self.used / self.bf16 if self.bf16 else 0.0

    @property
    def ratio_fp32(self) -> float:
        """Bytes in use, relative to FP32; 0 for an empty cache."""
        return self.used / self.fp32 if self.fp32 else 0.0


def layer_stats(layer: int, kv: str, sides: tuple[SideStore, ...]) -> LayerStats:
    """The row of one layer; `sides` is empty before the first token."""
    values = sum(side.tokens * side.tail.shape[0] * side.tail.shape[1] * side.tail.shape[3] for side in sides)
    return LayerStats(
        layer=layer, kv=kv, tokens=sides[0].tokens if sides else 0, used=sum(side.used_bytes for side in sides),
        allocated=sum(side.allocated_bytes for side in sides), bf16=2 * values, fp32=4 * values,
    )  # fmt: skip
