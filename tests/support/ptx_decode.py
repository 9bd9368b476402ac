"""Executes csrc/decode.cu on the CPU: compiled by NVRTC to PTX, which `ptx` runs thread by thread."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from ptx import Memory, execute
from torch import Tensor

from haarkv.tq_ops.cuda import decode, nvrtc


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def ptx_of(*shape: int, target: str = "compute_90") -> str:
    """The kernel's PTX for the values of `decode.defines`, in order."""
    return decode.compiled(target, *shape).decode().rstrip("\0")


class Executed:
    """A kernel that runs in memory which it was shown."""

    def __init__(self, shape: tuple[int, ...], shared_bytes: int, memory: Memory, order: str) -> None:
        self._text, self._shared_bytes, self._memory, self._order = ptx_of(*shape), shared_bytes, memory, order

    def launch(self, grid: tuple[int, int], threads: int, arguments: ctypes.Structure) -> None:
        execute(self._text, "decode", grid, (threads,), [bytes(arguments)], self._memory, self._shared_bytes, order=self._order)


@contextmanager
def executed(order: str = "ascending") -> Iterator[None]:
    """`decode.attend` on CPU tensors meanwhile."""
    memory, kept = Memory(), []

    def address(tensor: Tensor) -> int:
        kept.append(tensor)
        octets = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        own, size = torch.zeros_like(octets), tensor.element_size()
        own.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).view(_BITS[size]).fill_(-1)
        begin, end = tensor.storage_offset() * size, int(own.nonzero()[-1]) + 1
        allowed = own[begin:end].bool().numpy()
        return memory.place(f"tensor {len(kept)} {tuple(tensor.shape)}", octets.numpy(), begin, end, allowed)

    def kernel(*shape: int, device: torch.device) -> Executed:
        return Executed(shape, decode.shared_bytes(*shape[1:3]), memory, order)

    with patch.object(nvrtc, "address", address), patch.object(decode, "_kernel", kernel):
        yield
