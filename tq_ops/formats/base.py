"""What a KV format is: how one K or V vector becomes stored tensors. Where these lie is the cache's business (`tq_ops.kv`)."""

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
    """A stored tensor of a format at one head_dim: dtype and shape for one group of tokens and KV head; () for a scalar."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Part(NamedTuple):
    """A stored tensor of a format for any head_dim; `KVFormat.fields` makes a `Field` of it.

    Attributes:
        bits: bits for each coordinate; 0 if the tensor has one number for each block (for each vector, without blocks).
        axes: number of axes of the tensor for one group.
    """

    name: str
    dtype: torch.dtype
    bits: int = 0
    axes: int = 1


def vector_lengths(x: Tensor) -> Tensor:
    """Lengths [...] fp64 of vectors [..., D]."""
    lengths: Tensor = torch.linalg.vector_norm(x.double(), dim=-1)
    return lengths


def stored_bytes(fields: dict[str, Field]) -> int:
    """Bytes of one group of one KV head."""
    return sum(field.nbytes for field in fields.values())


class KVFormat:
    """How K or V vectors are stored. A format knows no cache and no device.

    `fields` and `to_bytes` follow from `layout`, `levels` from `unpack`. A format whose fields have another shape, such as
    KIVI's, overrides `fields` and `levels`.

    Attributes:
        name: in `formats.get` and `--kv`.
        purpose: one line for a table.
        layout: stored tensors, in the byte order of the original implementation.
        block: numbers that share a scale and are packed together; None if a vector has one scale.
        unpack: `codes` -> level [..., D] uint8; None for a format without levels.
        multiple: every supported head_dim is a multiple of this; `cuts` is the reason in the error message.
        group_tokens: number of tokens that are quantized together.
        lossy: whether BF16 is more precise.
        plain: dtype of the only field `data` if vectors are not quantized; else None.
        to_compare: whether this is another project's format: `tq validate` and vLLM refuse it. Leave it False for your own.
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
        """Data with which a backend reads and writes rotated levels, or an error as from `fields`; None for other formats."""
        return None

    def rope_shift(self, layer: int) -> RopeShift | None:
        """The rotation by RoPE that is undone before storing: from the first position of a stretch of 1,024 to the key's own.
        None for all but learned keys.
        """
        return None

    def as_stored(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        """The argument of `quantize` for vectors [..., n, D] at positions [n]: the vectors with `rope_shift` undone."""
        turns = self.rope_shift(layer)
        return turns.undo(x, positions) if turns else x

    def bytes_per_vector(self, head_dim: int) -> float:
        """Bytes of one vector, scales included."""
        return stored_bytes(self.fields(head_dim)) / self.group_tokens

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """Quantize vectors.

        Args:
            x: [..., Hkv, n, D] fp32 or bf16 from `as_stored`; K after RoPE. Without learned coordinates Hkv may be missing.
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
        """Lengths [..., Hkv, n] of errors x [..., Hkv, n, D], in the norm that `quantize` minimizes."""
        return vector_lengths(x)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """uint8 [..., n], little-endian: the fields of each vector or group in `layout`'s order. With blocks, all fields of
        one block stand before the next block's; codes are packed block by block.
        """
        parts = []
        for part in self.layout:
            tensor = fields[part.name].contiguous()
            flat = tensor.flatten(tensor.ndim - part.axes) if part.axes else tensor.unsqueeze(-1)
            parts.append(flat.view(torch.uint8))
        if self.block is None:
            return torch.cat(parts, -1)
        blocks = next(fields[part.name].shape[-1] for part in self.layout if not part.bits)
        return torch.cat([split_groups(part, part.shape[-1] // blocks) for part in parts], -1).flatten(-2)

    def levels(self, fields: dict[str, Tensor]) -> Tensor | None:
        """Level [..., D] uint8 of every coordinate; None for a format without levels."""
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
    """A vector is not finite; `index` is the place of the first such vector in x's leading axes."""

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
