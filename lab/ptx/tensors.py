"""Tensors of the CPU as a kernel's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lab.ptx.memory import Memory


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of the memory that a tensor is a view of, [n] uint8, the same memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def place(memory: Memory, name: str, tensor: torch.Tensor) -> int:
    """A tensor's own bytes in a window: a kernel may touch nothing else of the memory that it is a view of."""
    size, begin = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return memory.place(name, storage_bytes(tensor), 0, 0)
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end, access_mask = begin + (last + 1) * size, None
    if tensor.numel() * size < end - begin <= 2**26:
        access_mask = np.zeros(end - begin, np.bool_)
        mask_view = torch.empty(0, dtype=torch.bool).set_(torch.from_numpy(access_mask).untyped_storage())
        wide = [*tensor.stride(), 1]
        mask_view.as_strided([*tensor.shape, size], [stride * size for stride in wide[:-1]] + [1]).fill_(True)
    return memory.place(name, storage_bytes(tensor), begin, end, access_mask)


def _poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` whose bytes are all 255: NaN in every float type."""

    def make_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.numel():
            storage_bytes(tensor)[:] = 0xFF
        return tensor

    return make_poisoned


@contextmanager
def fresh_memory_is_poison() -> Iterator[None]:
    """`torch.empty` and `torch.empty_like` meanwhile give tensors of NaN."""
    originals = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = map(_poison, originals)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = originals
