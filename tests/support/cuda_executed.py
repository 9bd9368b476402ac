"""Executes each launch of the Triton kernels on the CPU: its PTX, as a card would be given it, thread by thread.

    with executed(80) as launches:
        out = ops.paged_attention(q, cache, layer, batch, scale)  # tensors on the CPU; the result is the kernels'

A process of its own: where Triton has been imported to interpret, it does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from cuda_launches import Asked, Nothing, recorded
from ptx import Memory, execute


@dataclass
class Launches:
    """How launches are executed, and what was launched.

    Attributes:
        order, together: as `ptx.execute` takes them.
        edit: changes the PTX before it runs.
        names: of the kernels, one a launch.
    """

    order: str = "ascending"
    together: int | None = None
    edit: Callable[[str], str] = lambda text: text
    names: list[str] = field(default_factory=list)


def ptx_of(asked: Asked) -> tuple[str, int, int]:
    """The PTX of a launch, its threads and its bytes of shared memory."""
    built = _COMPILE(asked.source, target=asked.target, options=asked.options)
    return built.asm["ptx"], built.metadata.num_warps * 32, built.metadata.shared


_COMPILE = triton.compiler.compile  # what `recorded` replaces


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


class _Executed(Nothing):
    """A compiled kernel whose launch is executed."""

    def __init__(self, asked: Asked, launches: Launches) -> None:
        self.asked, self.launches = asked, launches
        self.text, self.threads, self.shared = ptx_of(asked)

    def run(self, *given: Any) -> None:
        grid, values = given[:3], given[9:]
        source, memory = self.asked.source, Memory()
        name, args = source.fn.__name__, []
        for (parameter, kind), value in zip(source.signature.items(), values, strict=True):
            if kind == "constexpr":
                continue
            args.append(place(memory, parameter, value) if isinstance(value, torch.Tensor) else value)
            if kind == "fp32":
                args[-1] = float(value)
        self.launches.names.append(name)
        args += [0, 0]  # scratch memory, which no kernel here asks for
        order, together = self.launches.order, self.launches.together
        execute(self.launches.edit(self.text), name, grid, [self.threads], args, memory, self.shared, order=order, together=together)


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` whose bytes are all 255: NaN in every float type."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.numel():
            bytes_of(tensor)[:] = 0xFF
        return tensor

    return made


@contextmanager
def executed(capability: int, **options: Any) -> Iterator[Launches]:
    """Whatever is launched meanwhile, on tensors of the CPU, is executed at once."""
    launches, kept = Launches(**options), (torch.empty, torch.empty_like)
    with recorded(capability, lambda asked: _Executed(asked, launches)):
        torch.empty, torch.empty_like = map(poisoned, kept)
        try:
            yield launches
        finally:
            torch.empty, torch.empty_like = kept
