"""Room for weights on large pages, where the system gives them to whoever asks (`madvise`).

A decode step reads every weight once, so each small page costs a walk through the page tables whose entries no cache holds any
more. On pages of 2 MB, single rows of a projection wait for memory alone.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

PAGE = 2 * 2**20
_CHUNK = 256 * 2**20
_LINE = 64


class LargePages:
    """Tensors one after the other in chunks of large pages; a chunk is given back when its last tensor is gone.

    What no tensor is written to takes no memory. Where there are no large pages, these are the system's usual ones.
    """

    def __init__(self) -> None:
        self._chunk: Any = None
        self._used = self._size = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the host whose numbers are whatever they are, as of `torch.empty`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        if self._used + nbytes > self._size:
            self._chunk, self._size = _room(nbytes)
            self._used = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-nbytes // _LINE) * _LINE
        return tensor


def _room(nbytes: int) -> tuple[mmap.mmap, int]:
    """A chunk of at least `nbytes` bytes, and its size. A process that may not have a whole one gets what it needs."""
    sizes = [-(-count // PAGE) * PAGE for count in (max(nbytes, _CHUNK), nbytes)]
    try:
        return _memory(sizes[0]), sizes[0]
    except OSError:
        return _memory(sizes[1]), sizes[1]


def _memory(nbytes: int) -> mmap.mmap:
    """Memory of this process alone. The kernel aligns whole large pages."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on this system, or switched off
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
