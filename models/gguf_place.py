"""Where in a GGUF file a tensor of Hugging Face's name lies, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.models.gguf_file import GGUFTensor
from haarkv.models.gguf_hybrid import Order
from haarkv.models.gguf_names import rows_of


@dataclass(frozen=True)
class Place:
    """Where a tensor of Hugging Face's name lies.

    Attributes:
        expert: its number, where all experts are stored in one tensor.
        heads: how many heads it has, where rows are permuted within each.
        shifted: it is stored with 1 added.
        order: of rows, columns and axes where Hugging Face has another.
    """

    tensor: GGUFTensor
    expert: int | None = None
    heads: int | None = None
    shifted: bool = False
    order: Order | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.order is not None and self.order.shape is not None:
            return self.order.shape
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes // (1 if self.expert is None else self.tensor.shape[0])

    @property
    def blocks(self) -> str | None:
        """Name of the type of its blocks, where they can be kept: in the file's order, or with whole rows in another."""
        by_rows = self.order is None or (self.order.rows is not None and self.order.shape is None)
        return self.tensor.blocks if len(self.shape) == 2 and not self.shifted and by_rows else None

    @property
    def in_place(self) -> bool:
        """Whether what is kept of it stays in the file's pages."""
        return (
            self.heads is None and self.order is None and not self.shifted and (self.expert is None or self.blocks is not None)
        )

    def wanted(self, part: tuple[slice, ...] | None) -> tuple[Tensor, slice]:
        """Of a matrix, the rows [R] int64 of the file that a part of it lies in, in its order, and the part's columns."""
        count = self.shape[0]
        rows = torch.arange(count) if self.heads is None else rows_of(count, self.heads)
        if self.order is not None and self.order.rows is not None:
            rows = self.order.rows
        rows, columns = (rows, slice(None)) if part is None else (rows[part[0]], part[1])
        return rows + count * (self.expert or 0), columns
