"""What a KV format is: how one K or V vector is stored, and nothing about where."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats.packing import split_groups
from haarkv.tq_ops.formats.stretches import RopeShift

if TYPE_CHECKING:
    from haarkv.tq_ops.formats.rotated import Description


@dataclass(frozen=True)
class Field:
    """A stored tensor of a format, for one group of tokens of one KV head; shape () for a scalar."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Part(NamedTuple):
    """A stored tensor of a format, for every head_dim.

    Attributes:
        bits: stored for each coordinate; 0 for a field with one number a block (or a vector, without blocks).
        axes: number of axes of the field's tensor for one group.
    """

    name: str
    dtype: torch.dtype
    bits: int = 0
    axes: int = 1


def trailing_bytes(tensor: Tensor, trailing: int) -> Tensor:
    """The bytes of a tensor's last `trailing` axes, little-endian: uint8 [..., n]."""
    flat = tensor.contiguous().flatten(tensor.ndim - trailing) if trailing else tensor.contiguous().unsqueeze(-1)
    return flat.view(torch.uint8)


def vector_lengths(x: Tensor) -> Tensor:
    """Lengths [...] fp64 of vectors [..., D]."""
    lengths: Tensor = torch.linalg.vector_norm(x.double(), dim=-1)
    return lengths


def stored_bytes(fields: dict[str, Field]) -> int:
    """Bytes of one group of one KV head."""
    return sum(field.nbytes for field in fields.values())


class KVFormat:
    """How K or V vectors are stored; knows no cache and no device.

    `layout` gives fields and bytes, `unpack` the levels; a format whose bytes do not follow head_dim times bits overrides
    `fields` and `levels`.

    Attributes:
        name: in `formats.get` and `--kv`.
        purpose: one line for a table.
        layout: stored tensors, in the byte order of the format's origin.
        block: numbers of one of the origin's blocks; None without blocks.
        unpack: `codes` -> level [..., D] uint8; None of a format without levels.
        multiple: divides each head_dim that it can hold; `cuts` says why, behind the name.
        group_tokens: tokens that are quantized together.
        lossy: whether BF16 is more precise.
        plain: dtype of an unquantized vector, in the one field `data`; else None.
        to_compare: another project's format: only the reference's ops store and read it.
    """

    name: str
    purpose: str
    layout: tuple[Part, ...] = ()
    block: int | None = None
    unpack: Callable[[Tensor], Tensor] | None = None
    multiple: int = 1
    cuts: str = "stores single numbers"
    group_tokens: int = 1
    lossy: bool = True
    plain: torch.dtype | None = None
    to_compare: bool = False

    def fields(self, head_dim: int) -> dict[str, Field]:
        """Stored tensors of one group of one KV head; an InputError if there is no layout for this head_dim."""
        if head_dim < self.multiple or head_dim % self.multiple:
            raise InputError(f"{self.name} {self.cuts} and cannot hold head_dim {head_dim}")
        single = () if self.block is None else (head_dim // self.block,)
        return {
            name: Field(dtype, (head_dim * bits // (8 * dtype.itemsize),) if bits else single)
            for name, dtype, bits, _ in self.layout
        }

    def description(self, head_dim: int) -> Description | None:
        """What a backend needs to read and write rotated levels; None of other formats. Raises as `fields`."""
        return None

    def rope_shift(self, layer: int) -> RopeShift | None:
        """Of keys that a layer stores by stretches: undo before storing, redo after reading. None of other keys."""
        return None

    def as_stored(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Vectors [..., n, D] at positions [n] as `quantize` takes them: with `rope_shift` undone."""
        turns = self.rope_shift(layer)
        return turns.undo(x, positions) if turns else x

    def bytes_per_vector(self, head_dim: int) -> float:
        """Of one KV head, scales included."""
        return stored_bytes(self.fields(head_dim)) / self.group_tokens

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """Quantize vectors.

        Args:
            x: [..., Hkv, n, D] fp32 or bf16, as `as_stored` returns them; K after RoPE. Any leading axes if heads are alike.
            layer: chooses the rotation.
        Returns:
            every field of `fields(D)`, each [..., *field.shape].
        Raises:
            NonFiniteError: with the index of the first vector that is not finite, in a lossy format.
        """
        raise NotImplementedError

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        """Vectors [..., Hkv, n, D] fp32 in the model's own domain."""
        raise NotImplementedError

    def length(self, x: Tensor, layer: int) -> Tensor:
        """Lengths [..., Hkv, n] of differences of vectors x [..., Hkv, n, D], in the norm in which levels are chosen."""
        return vector_lengths(x)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """uint8 [..., n]: each vector or group in the byte order of its origin: `layout`, little-endian, block by block."""
        parts = [trailing_bytes(fields[part.name], part.axes) for part in self.layout]
        if self.block is None:
            return torch.cat(parts, -1)
        blocks = next(fields[part.name].shape[-1] for part in self.layout if not part.bits)
        return torch.cat([split_groups(part, part.shape[-1] // blocks) for part in parts], -1).flatten(-2)

    def levels(self, fields: dict[str, Tensor]) -> Tensor | None:
        """Level [..., D] uint8 of every coordinate; None of a format without levels."""
        return None if self.unpack is None else self.unpack(fields["codes"])


class Plain(KVFormat):
    """Vectors in one tensor `data` of a floating dtype; infinities and NaN pass through."""

    lossy = False

    def __init__(self, name: str, dtype: torch.dtype, purpose: str) -> None:
        self.name, self.purpose, self.plain = name, purpose, dtype
        self.layout = (Part("data", dtype, 8 * dtype.itemsize),)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        return {"data": x.to(self.plain)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["data"].float()


def by_token(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Swap heads and tokens of fields: [a, b, *] -> [b, a, *]."""
    return {name: values.transpose(0, 1) for name, values in fields.items()}


class NonFiniteVectorError(NonFiniteError):
    """A vector is not finite; `index` is that of the first in x's leading axes."""

    def __init__(self, index: tuple[int, ...]) -> None:
        super().__init__(f"vector {list(index)} is not finite")
        self.index = index


def require_finite(x: Tensor) -> None:
    """Raise a NonFiniteVectorError if one of the vectors [..., D] is not finite."""
    # The sum of x - x is 0 exactly when all is finite: one pass and one scalar in the common case.
    if (x - x).sum().item() == 0:
        return
    bad = (~torch.isfinite(x)).any(-1)
    index = tuple(int(i) for i in bad.nonzero()[0]) if bad.ndim else ()
    raise NonFiniteVectorError(index)
