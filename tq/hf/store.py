"""K and V of one layer in a paged cache's memory, of rows that stand at the same positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.models.balance import Scales
from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cpu.library import KernelsMissingError
from haarkv.tq_ops.cuda import layout as cuda_layout
from haarkv.tq_ops.cuda.available import unavailable
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kernel_support import KernelSupport, unsupported_format, wrong_head_dim
from haarkv.tq_ops.kv.layer import LayerKV, NonFiniteTokenError, Side
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, KVShape, blocks_for
from haarkv.tq_ops.table import OpTable

READ_TOKENS = 1024
"""Tokens restored at a time, so that a read needs little memory besides its result."""
SPARE_FRACTION, SPARE_TOKENS = 32, 32
"""Memory is allocated for 1/32 more tokens than there are, for at least 32 more, and in whole blocks."""


class Store:
    """Tokens `begin` … `end` - 1 of every row, in a `LayerKV`.

    Block j of a row lies at `row * blocks + j % blocks`, so that tokens may be dropped at both ends. A token is copied about
    32 times while a row grows to any length. Sinks and tail are in the model's own dtype.

    Args:
        layer: chooses the rotation.
        formats: K's and V's.
        like: K and V [B, Hkv, n, D], which give shapes, device and dtype.
        sink, tails: tokens in the model's dtype; a tail of K and of V, at least `group_tokens - 1`.
        scales: [Hkv, D] of K and of V, powers of two that channels are multiplied with; None for 1.
    Raises:
        InputError: a format has no layout for D.
    """

    def __init__(
        self, layer: int, formats: tuple[KVFormat, KVFormat], like: tuple[Tensor, Tensor], *, sink: int,
        tails: tuple[int, int], scales: Scales = (None, None),
    ) -> None:  # fmt: skip
        self.device, self.dtype, (self.rows, self.heads) = like[0].device, like[0].dtype, like[0].shape[:2]
        self.head_dims = like[0].shape[3], like[1].shape[3]
        self.scales = tuple(None if scale is None else scale.to(self.device) for scale in scales)
        self.blocks = self.begin = self.end = 0
        self._view: PagedKVCache | None = None
        k, v = (
            self._side(*one, sink) for one in zip(formats, self.head_dims, tails, self.scales, strict=True)
        )  # fmt: skip
        self.kv = LayerKV(layer, KVShape(self.heads, self.head_dims[0]), k, v, BLOCK_SIZE)
        self._readable = self._is_readable()

    def _side(self, kv_format: KVFormat, head_dim: int, tail: int, scales: Tensor | None, sink: int) -> Side:
        fields = {
            name: torch.zeros(
                0, self.heads, BLOCK_SIZE // kv_format.group_tokens, *field.shape, dtype=field.dtype, device=self.device
            )
            for name, field in kv_format.fields(head_dim).items()
        }
        if not tail and not sink:
            return Side(kv_format, fields, None)
        # Scaling is exact in dtypes with the exponents of FP32.
        dtype = torch.float32 if self.dtype == torch.float16 and scales is not None else self.dtype
        window = ResidualWindow(
            tail=tail, sink=sink, group=kv_format.group_tokens, ring=tail and tail + 1, num_rows=self.rows,
            num_kv_heads=self.heads, head_dim=head_dim, device=self.device, dtype=dtype,
        )  # fmt: skip
        return Side(kv_format, fields, window)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: kernels remember where the memory of a view lies."""
        return vars(self) | {"_view": None}

    @property
    def sides(self) -> tuple[Side, Side]:
        """K and V."""
        return self.kv.k, self.kv.v

    @property
    def tokens(self) -> int:
        """Tokens of each row."""
        return self.end - self.begin

    def tensors(self) -> Iterator[Tensor]:
        """All memory."""
        for side in self.sides:
            yield from side.fields.values()
            if side.window:
                yield side.window.vectors

    @property
    def used_bytes(self) -> int:
        """Bytes in use of groups, sinks and tails."""
        total = 0
        for side, head_dim in zip(self.sides, self.head_dims, strict=True):
            group, window = side.kv_format.group_tokens, side.window
            packed = sum(field.nbytes for field in side.kv_format.fields(head_dim).values())
            total += self.rows * self.heads * packed * (self.end // group - self.begin // group)
            if window:
                sinks, recent = self._exact(side)
                count = max(sinks - self.begin, 0) + self.end - max(recent, self.begin)
                total += self.rows * self.heads * head_dim * window.vectors.itemsize * count
        return total

    def _exact(self, side: Side) -> tuple[int, int]:
        """Where a side's sinks end, and where its tail begins."""
        if side.window is None:
            return 0, self.end
        sinks = min(side.window.sink, self.end)
        return sinks, min(max(side.window.first_recent(self.end - 1), sinks), self.end)

    # -- Storing and restoring -----------------------------------------------------------------------------------------------
    def write(self, k: Tensor, v: Tensor) -> None:
        """Store new tokens [B, Hkv, n, D] of every row, or none; a NonFiniteError says layer, side, row, head and position."""
        count = k.shape[2]
        self._reserve(self.end + count)
        k, v = (x if by is None else x.float() * by.unsqueeze(1) for x, by in zip((k, v), self.scales, strict=True))
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        batch = _tokens_of_rows(self.rows, self.blocks, self.end, count, self.device)
        try:
            if count == 1 and (kernels := self.kernels):  # a ring has room for no more beside its tail
                kernels.store_kv(k, v, self._paged_cache().view(self.kv.index, batch))
            else:
                self.kv.write(k, v, batch)
        except NonFiniteTokenError as error:
            row, offset = divmod(error.token, count)
            where = f"layer {self.kv.index}: {error.side} of row {row}, KV head {error.head}, position {self.end + offset}"
            raise NonFiniteError(f"{where} is not finite or too large for {error.kv_format}") from None
        self.end += count

    def extend(self, states: tuple[Tensor, Tensor], tokens: int) -> list[Tensor]:
        """Store new K and V [B, Hkv, n, D]; return these and the `tokens` tokens before, each [B, Hkv, tokens + n, D].

        Several queries have several tails: where a side has one, all new tokens are as they came, and the tail before them.
        """
        count = states[0].shape[2]
        pasts = [
            self.read(index, tokens, x.dtype) if count > 1 and side.window and side.window.ring else None
            for index, (x, side) in enumerate(zip(states, self.sides, strict=True))
        ]
        self.write(*states)
        return [
            self.read(index, tokens + count, x.dtype) if past is None else torch.cat([past, x.detach()], dim=2)
            for index, (x, past) in enumerate(zip(states, pasts, strict=True))
        ]

    def read(self, side: int, tokens: int, dtype: torch.dtype) -> Tensor:
        """The newest `tokens` tokens of K (0) or V (1), dequantized: [B, Hkv, tokens, D]."""
        begin, scales = self.end - tokens, self.scales[side]
        result = torch.empty(self.rows, self.heads, tokens, self.head_dims[side], dtype=dtype, device=self.device)
        for first, vectors in self._pieces(self.sides[side], begin):
            place = slice(first - begin, first - begin + vectors.shape[2])
            result[:, :, place] = vectors if scales is None else vectors.float() / scales.unsqueeze(1)
        return result

    def _pieces(self, side: Side, begin: int) -> Iterator[tuple[int, Tensor]]:
        """First position and vectors [B, Hkv, n, D] of all tokens from `begin` on."""
        sinks, recent = self._exact(side)
        for first in range(max(begin, sinks), recent, READ_TOKENS):
            yield first, self._unpack(side, first, min(first + READ_TOKENS, recent))
        for first, end in ((begin, sinks), (max(begin, recent), self.end)):
            if first < end and side.window:
                yield first, side.window.vectors[:, :, side.window.places(torch.arange(first, end, device=self.device))]

    def _unpack(self, side: Side, first: int, end: int) -> Tensor:
        """Packed tokens `first` … `end` - 1, [B, Hkv, n, D] fp32."""
        begin = first // BLOCK_SIZE
        column = torch.arange(begin, blocks_for(end, BLOCK_SIZE), device=self.device) % self.blocks
        table = torch.arange(self.rows, device=self.device).unsqueeze(1) * self.blocks + column
        begin *= BLOCK_SIZE
        return side.unpack(self.kv.index, table, begin)[:, :, first - begin : end - begin]

    # -- Changing what is held ------------------------------------------------------------------------------------------------
    def drop_newest(self, tokens: int) -> None:
        """Drop the newest tokens; what moves back into a tail is dequantized."""
        end = self.end - tokens
        for side in self.sides:
            if (window := side.window) is None or not window.ring:
                continue
            first, last = max(end - window.ring, self.begin), min(self.end - window.ring, end)
            if first < last:
                places = window.in_ring(torch.arange(first, last, device=self.device))
                window.vectors[:, :, places] = self._unpack(side, first, last).to(window.vectors.dtype)
        self.end = end
        self._give_back()

    def keep_newest(self, tokens: int) -> None:
        """Drop all but the newest tokens."""
        self.begin = max(self.begin, self.end - tokens)
        self._give_back()

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows by `change` of them, which works on the first axis."""
        for side in self.sides:
            for name, tensor in side.fields.items():
                side.fields[name] = change(self._by_row(tensor)).flatten(0, 1)
            if side.window:
                side.window.vectors = change(side.window.vectors)
        self.rows, self._view = len(change(torch.arange(self.rows, device=self.device))), None

    def _by_row(self, tensor: Tensor) -> Tensor:
        """A field as [B, blocks, …]."""
        return tensor.view(self.rows, self.blocks, *tensor.shape[1:])

    def _room(self, end: int) -> int:
        """Blocks of a row up to position `end`, with some to spare."""
        tokens = end - self.begin // BLOCK_SIZE * BLOCK_SIZE
        return blocks_for(tokens + max(tokens // SPARE_FRACTION, SPARE_TOKENS), BLOCK_SIZE)

    def _reserve(self, end: int) -> None:
        """Allocate up to position `end`."""
        if blocks_for(end, BLOCK_SIZE) - self.begin // BLOCK_SIZE > self.blocks:
            self._move(self._room(end))

    def _give_back(self) -> None:
        if self.blocks > 2 * (blocks := self._room(self.end)):
            self._move(blocks)

    def _move(self, blocks: int) -> None:
        """Move to `blocks` blocks of each row."""
        live_blocks = torch.arange(self.begin // BLOCK_SIZE, blocks_for(self.end, BLOCK_SIZE), device=self.device)
        for side in self.sides:
            for name, tensor in side.fields.items():
                # Zeros: kernels load whole blocks, and what no token was stored in must be a number.
                target = tensor.new_zeros(self.rows, blocks, *tensor.shape[1:])
                if len(live_blocks):
                    target[:, live_blocks % blocks] = self._by_row(tensor)[:, live_blocks % self.blocks]
                side.fields[name] = target.flatten(0, 1)
        self.blocks, self._view = blocks, None

    # -- Attention over what is stored ----------------------------------------------------------------------------------------
    def _is_readable(self) -> bool:
        """Whether kernels can read this memory."""
        kernels, (head_dim, other) = kernels_on(self.device.type), self.head_dims
        if kernels is None or head_dim != other or wrong_head_dim(kernels[1], head_dim):
            return False
        if any(unsupported_format(kernels[1], side.kv_format, head_dim) for side in self.sides):
            return False
        # Kernels keep tokens in BF16, which is exact in a BF16 model alone.
        return self.dtype == torch.bfloat16 or (self.dtype == torch.float32 and not any(side.window for side in self.sides))

    @property
    def kernels(self) -> OpTable | None:
        """Those that can read this memory, or None."""
        kernels = kernels_on(self.device.type) if self._readable else None
        return kernels and kernels[0]

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attention of the newest token of every row over its row.

        Args:
            q: [B, Hq, 1, D] bf16 or fp32.
        Returns:
            [B, 1, Hq, D] of q's dtype.
        Rounding points: those of the op table's `paged_attention`.
        """
        kernels, batch = self.kernels, _tokens_of_rows(self.rows, self.blocks, self.end - 1, 1, self.device)
        assert kernels is not None, "no kernels read the layer"
        # A BF16 q times a power of two is exact, and so is a BF16 output.
        rows = _unscale(q, self.scales[0]).transpose(1, 2).flatten(0, 1)
        out = kernels.paged_attention(rows, self._paged_cache().view(self.kv.index, batch), softmax_scale)
        return _unscale(out.unsqueeze(2), self.scales[1]).transpose(1, 2)

    def _paged_cache(self) -> PagedKVCache:
        """The layer as a cache; a new one after memory moved, for kernels remember where it lies."""
        if self._view is None:
            k, v = self.sides
            self._view = PagedKVCache.over(
                (k.kv_format, v.kv_format), self.kv.index, self.kv.fields, self.kv.windows, self.head_dims[0]
            )
        return self._view


@lru_cache(maxsize=2)
def _tokens_of_rows(rows: int, blocks: int, begin: int, count: int, device: torch.device) -> Batch:
    """`count` tokens of every row from position `begin` on, in rings of `blocks` blocks; alike in all layers."""
    row, end = torch.arange(rows + 1, device=device), begin + count
    positions = torch.arange(begin, end, device=device).repeat(rows)
    table = row.new_zeros(rows, blocks_for(end, BLOCK_SIZE), dtype=torch.int32)
    lengths = torch.full_like(row[1:], end, dtype=torch.int32)
    return Batch(positions, positions, table, lengths, (row * count).int(), row[:-1]).in_ring(blocks, BLOCK_SIZE)


@cache
def kernels_on(device: str) -> tuple[OpTable, KernelSupport] | None:
    """The op table for a device type, and what it reads; None if there is none, or it is not built."""
    if device == "cpu":
        from haarkv.tq_ops.cpu.ops import CpuOps

        try:
            return CpuOps(), cpu_layout.READS
        except KernelsMissingError:
            return None
    if device == "cuda" and unavailable() is None:
        from haarkv.tq_ops.cuda import ops

        return cast(OpTable, ops), cuda_layout.READS
    return None


def _unscale(x: Tensor, scales: Tensor | None) -> Tensor:
    """x [B, H, n, D] divided by the scales [Hkv, D] of its KV heads; exact."""
    if scales is None:
        return x
    return (x / scales.repeat_interleave(x.shape[1] // len(scales), 0).unsqueeze(1)).to(x.dtype)
