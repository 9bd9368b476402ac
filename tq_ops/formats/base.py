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
    """One stored tensor of a format, for one group of tokens of one KV head.

    Attributes:
        dtype: element type.
        shape: shape of one group; () for a scalar.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Part(NamedTuple):
    """One stored tensor of a format, for every head_dim.

    Attributes:
        name: of the field.
        dtype: element type.
        bits: of each number of a vector; 0 of what there is one of: for each block, or for a vector without blocks.
        axes: of what is stored of one group of tokens.
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
    """How K or V vectors are stored. K and V may use different formats; a format knows no cache and no device.

    What most formats have in common stands here: of `layout`, what is stored and its bytes; of `unpack`, the levels.

    Attributes:
        name: the word for it in `formats.get` and `--kv`.
        purpose: one line for a table: what it is for.
        layout: what is stored, in the order of the format's origin.
        block: numbers that the origin's blocks hold, one after the other; None where it knows none.
        unpack: from the field `codes` to the level [..., D] uint8 of every coordinate; None of a format without levels.
        multiple: what divides a head_dim that it can hold; `cuts` says why, behind the name.
        group_tokens: tokens that are quantized together; 1 if each vector stands alone.
        lossy: whether BF16 says more of a vector than what is stored.
        plain: dtype of the numbers that a vector is stored as, in the one field `data`; None of any other format.
        to_compare: it is another project's, here to compare with: wherever it runs, the reference's own ops store and read it.
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
        """Stored tensors of one group of one KV head.

        Raises:
            InputError: the format has no layout for this head_dim.
        """
        if head_dim < self.multiple or head_dim % self.multiple:
            raise InputError(f"{self.name} {self.cuts} and cannot hold head_dim {head_dim}")
        single = () if self.block is None else (head_dim // self.block,)
        return {
            name: Field(dtype, (head_dim * bits // (8 * dtype.itemsize),) if bits else single)
            for name, dtype, bits, _ in self.layout
        }

    def description(self, head_dim: int) -> Description | None:
        """What a backend has to know to read and write it; None of a format that is not one of rotated levels.

        Raises:
            InputError: the format has no layout for this head_dim.
        """
        return None

    def rope_shift(self, layer: int) -> RopeShift | None:
        """How keys of a layer turn, where they are stored by stretches: whoever stores one turns it back first, and whoever
        reads one turns it forth. None where a key is stored as it is."""
        return None

    def as_stored(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Vectors [..., n, D] of positions [n] as `quantize` takes them: turned back where there are `turns`."""
        turns = self.rope_shift(layer)
        return turns.undo(x, positions) if turns else x

    def bytes_per_vector(self, head_dim: int) -> float:
        """Bytes for one K or V vector of one KV head, scales included."""
        return stored_bytes(self.fields(head_dim)) / self.group_tokens

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """Store vectors.

        Args:
            x: [..., Hkv, n, D] fp32 or bf16, KV heads before tokens; K after RoPE, turned back where there are `turns`; V as
                projected. A format that treats all heads alike takes any leading axes.
            layer: decoder layer, which chooses the rotation.
        Returns:
            every field of `fields(D)`, each [..., *field.shape].
        Raises:
            NonFiniteError: with the index of the first vector that is not finite, in a lossy format.
        """
        raise NotImplementedError

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        """Vectors [..., Hkv, n, D] fp32 in the model's own domain, the inverse of `quantize` up to its loss."""
        raise NotImplementedError

    def length(self, x: Tensor, layer: int) -> Tensor:
        """Lengths [..., Hkv, n] of differences x [..., Hkv, n, D] of vectors, in the norm in which levels are chosen."""
        return vector_lengths(x)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """uint8 [..., n]: each vector, or group of them, as its origin lays it: the layout, little-endian, block by block."""
        parts = [trailing_bytes(fields[part.name], part.axes) for part in self.layout]
        if self.block is None:
            return torch.cat(parts, -1)
        blocks = next(fields[part.name].shape[-1] for part in self.layout if not part.bits)
        return torch.cat([split_groups(part, part.shape[-1] // blocks) for part in parts], -1).flatten(-2)

    def levels(self, fields: dict[str, Tensor]) -> Tensor | None:
        """Level [..., D] uint8 of every coordinate; None of a format that stores numbers and no levels."""
        return None if self.unpack is None else self.unpack(fields["codes"])


class Plain(KVFormat):
    """Vectors stored as one tensor `data` of a floating dtype; not finite values pass through."""

    lossy = False

    def __init__(self, name: str, dtype: torch.dtype, purpose: str) -> None:
        self.name, self.purpose, self.plain = name, purpose, dtype
        self.layout = (Part("data", dtype, 8 * dtype.itemsize),)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        return {"data": x.to(self.plain)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["data"].float()


def by_token(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fields of heads and tokens as fields of tokens and heads, and the other way round: [a, b, *] -> [b, a, *]."""
    return {name: values.transpose(0, 1) for name, values in fields.items()}


class NonFiniteVectorError(NonFiniteError):
    """One of the vectors handed to a format is not finite.

    Attributes:
        index: of the first such vector in x's leading axes.
    """

    def __init__(self, index: tuple[int, ...]) -> None:
        super().__init__(f"vector {list(index)} is not finite")
        self.index = index


def require_finite(x: Tensor) -> None:
    """Refuse vectors [..., D] of which one holds an infinity or a NaN.

    Raises:
        NonFiniteError: carrying the index of the first such vector in `index`.
    """
    # The sum of x - x is 0 exactly when all is finite: one pass and one scalar in the common case.
    if (x - x).sum().item() == 0:
        return
    bad = (~torch.isfinite(x)).any(-1)
    index = tuple(int(i) for i in bad.nonzero()[0]) if bad.ndim else ()
    raise NonFiniteVectorError(index)
