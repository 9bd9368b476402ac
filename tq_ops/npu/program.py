"""What a compiled program is to the rest of the project: something that can be built, with a name and known outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Kernel = Callable[..., None]
"""A built program: called with its tensors in order, it fills the outputs in place."""


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a program.

    Attributes:
        name: of the parameter.
        output: the program writes it, in place.
    """

    name: str
    output: bool = False


class Program(Protocol):
    """A PyPTO program of fixed shapes; hashable and picklable, so that another process can build it.

    Attributes:
        arguments: in the kernel's order.
    """

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> tuple[Argument, ...]: ...

    def build(self, **options: dict[str, Any]) -> Kernel:
        """Trace nothing yet: return the jit-decorated kernel.

        Args:
            options: PyPTO's `runtime_options`, `verify_options`, `host_options`, to be joined with the program's own.
        """


def ordered(program: Program, tensors: dict[str, Tensor]) -> list[Tensor]:
    """A program's tensors by name, in the order of its arguments.

    Raises:
        ValueError: one is missing or none of its arguments.
    """
    names = [argument.name for argument in program.arguments]
    if set(names) != set(tensors):
        raise ValueError(f"{program.name}: arguments differ: {sorted(set(names) ^ set(tensors))}")
    return [tensors[name] for name in names]
