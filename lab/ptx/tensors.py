"""Tensors of the CPU as a kernel's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lab.ptx.memory import Memory


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of the memory that a tensor is a view of, [n] uint8, the same memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def place(memory: Memory, name: str, tensor: torch.Tensor) -> int:
    """A tensor's own bytes in a window: a kernel may touch nothing else of the memory that it is a view of."""
    size, begin = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return memory.place(name, bytes_of(tensor), 0, 0)
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end, allowed = begin + (last + 1) * size, None
    if tensor.numel() * size < end - begin <= 2**26:
        allowed = np.zeros(end - begin, np.bool_)
        own = torch.empty(0, dtype=torch.bool).set_(torch.from_numpy(allowed).untyped_storage())
        wide = [*tensor.stride(), 1]
        own.as_strided([*tensor.shape, size], [stride * size for stride in wide[:-1]] + [1]).fill_(True)
    return memory.place(name, bytes_of(tensor), begin, end, allowed)


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` whose bytes are all 255: NaN in every float type."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.numel():
            bytes_of(tensor)[:] = 0xFF
        return tensor

    return made


@contextmanager
def fresh_memory_is_poison() -> Iterator[None]:
    """`torch.empty` and `torch.empty_like` meanwhile give tensors of NaN."""
    kept = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = map(_poisoned, kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept
