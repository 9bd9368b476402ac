"""Executes csrc/decode.cu on the CPU: compiled by NVRTC to PTX, which `ptx` runs thread by thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor

from haarkv.tq_ops.cuda import available, decode
from lab.ptx import Memory, execute
from lab.ptx.tensors import fresh_memory_is_poison, place


@cache
def ptx_of(shape: decode.Shape) -> str:
    """The kernel's PTX."""
    return decode.compiled("compute_90", *shape).decode().rstrip("\0")


class Executed:
    """A kernel that runs in memory which it was shown."""

    def __init__(self, text: str, shared_bytes: int, memory: Memory, order: str) -> None:
        self._text, self._shared_bytes, self._memory, self._order = text, shared_bytes, memory, order

    def launch(self, grid: tuple[int, int], threads: int, arguments: ctypes.Structure) -> None:
        execute(
            self._text, "decode", grid, (threads,), [bytes(arguments)], self._memory, self._shared_bytes, order=self._order
        )


@contextmanager
def executed(order: str = "ascending", edit: Callable[[str], str] = str) -> Iterator[list[str]]:
    """`decode.attend` on CPU tensors meanwhile; `edit` changes the PTX before it runs. Names what is launched."""
    memory, kept, launched = Memory(), [], []

    def address(tensor: Tensor) -> int:
        kept.append(tensor)
        return place(memory, f"tensor {len(kept)} {tuple(tensor.shape)}", tensor)

    def kernel(shape: decode.Shape, device: torch.device) -> Executed:
        launched.append("decode")
        return Executed(edit(ptx_of(shape)), decode.shared_bytes(shape.group, shape.head_dim), memory, order)

    with patch.object(available, "address", address), patch.object(decode, "_kernel", kernel), fresh_memory_is_poison():
        yield launched
