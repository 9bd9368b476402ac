"""Executes each launch of the Triton kernels on the CPU: its PTX, as a card would be given it, thread by thread.

    with ptx_execution(80) as launches:
        out = ops.paged_attention(q, cache.view(layer, batch), scale)  # tensors on the CPU; the result is the kernels'

A process of its own: where Triton has been imported to interpret, it does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from cuda_launches import LaunchRequest, Nothing, record_launches

from haarkv.tq_ops.cuda import schedule
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


def compile_ptx(request: LaunchRequest) -> tuple[str, int, int]:
    """The PTX of a launch, its threads and its bytes of shared memory."""
    kernel = _COMPILE(request.source, target=request.target, options=request.options)
    return kernel.asm["ptx"], kernel.metadata.num_warps * 32, kernel.metadata.shared


_COMPILE = triton.compiler.compile  # what `record_launches` replaces


class _PtxKernel(Nothing):
    """A compiled kernel whose launch is executed."""

    def __init__(self, request: LaunchRequest, launches: Launches) -> None:
        self.request, self.launches = request, launches
        self.text, self.threads, self.shared = compile_ptx(request)

    def run(self, *launch_args: Any) -> None:
        grid, values = launch_args[:3], launch_args[9:]
        source, memory = self.request.source, Memory()
        name, args = source.fn.__name__, []
        for (parameter, kind), value in zip(source.signature.items(), values, strict=True):
            is_tuple = isinstance(kind, tuple)
            for one, launch_args in zip(kind, value, strict=True) if is_tuple else ((kind, value),):
                if one != "constexpr":
                    at = place(memory, parameter, launch_args) if isinstance(launch_args, torch.Tensor) else launch_args
                    args.append(float(at) if one == "fp32" else at)
        self.launches.names.append(name)
        args += [0, 0]  # scratch memory, which no kernel here asks for
        text, how = self.launches.edit(self.text), {"order": self.launches.order, "together": self.launches.together}
        execute(text, name, grid, [self.threads], args, memory, self.shared, **how)


@contextmanager
def ptx_execution(capability: int, **options: Any) -> Iterator[Launches]:
    """Whatever is launched meanwhile, on tensors of the CPU, is executed at once."""
    launches = Launches(**options)
    with record_launches(capability, lambda request: _PtxKernel(request, launches)), fresh_memory_is_poison():
        schedule.processors = lambda _: launches.processors
        yield launches
