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

import torch
import triton
from cuda_launches import Asked, Nothing, recorded

from haarkv.tq_ops.cuda import choices
from lab.ptx import Memory, execute
from lab.ptx.tensors import fresh_memory_is_poison, place


@dataclass
class Launches:
    """How launches are executed, and what was launched.

    Attributes:
        order, together: as `ptx.execute` takes them.
        processors: of the GPU that launches are made for; few make few programs.
        edit: changes the PTX before it runs.
        names: of the kernels, one a launch.
    """

    order: str = "ascending"
    together: int | None = None
    processors: int = 8
    edit: Callable[[str], str] = lambda text: text
    names: list[str] = field(default_factory=list)


def ptx_of(asked: Asked) -> tuple[str, int, int]:
    """The PTX of a launch, its threads and its bytes of shared memory."""
    built = _COMPILE(asked.source, target=asked.target, options=asked.options)
    return built.asm["ptx"], built.metadata.num_warps * 32, built.metadata.shared


_COMPILE = triton.compiler.compile  # what `recorded` replaces


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
            of_tuple = isinstance(kind, tuple)
            for one, given in zip(kind, value, strict=True) if of_tuple else ((kind, value),):
                if one != "constexpr":
                    at = place(memory, parameter, given) if isinstance(given, torch.Tensor) else given
                    args.append(float(at) if one == "fp32" else at)
        self.launches.names.append(name)
        args += [0, 0]  # scratch memory, which no kernel here asks for
        text, how = self.launches.edit(self.text), {"order": self.launches.order, "together": self.launches.together}
        execute(text, name, grid, [self.threads], args, memory, self.shared, **how)


@contextmanager
def executed(capability: int, **options: Any) -> Iterator[Launches]:
    """Whatever is launched meanwhile, on tensors of the CPU, is executed at once."""
    launches = Launches(**options)
    with recorded(capability, lambda asked: _Executed(asked, launches)), fresh_memory_is_poison():
        choices.processors = lambda _: launches.processors
        yield launches
