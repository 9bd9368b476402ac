"""From a program to something that can be executed: its kernel functions and its schedule, by two calls of PyPTO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from aicore.build import compile_leaves
from aicore.leaf import Leaf, read_leaves
from aicore.machine import Machine
from aicore.schedule import Schedule, read_schedule
from aicore.toolchain import Toolchain
from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator


@dataclass(frozen=True)
class Emission:
    """What PyPTO makes of one call of a program.

    Attributes:
        arguments: of the call, in order; nothing was written to them.
    """

    program: Program
    leaves: tuple[Leaf, ...]
    schedule: Schedule
    arguments: tuple[Tensor, ...]

    def machine(self, toolchain: Toolchain, on_done: Callable[[int, int], None] | None = None) -> Machine:
        """A machine that executes the call; compiles what is new."""
        return Machine(compile_leaves(toolchain, self.leaves, on_done), self.leaves, self.schedule, self.arguments)

    def outputs(self, arguments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Those of the arguments that the program writes, by name."""
        return {a.name: t for a, t in zip(self.program.arguments, arguments, strict=True) if a.output}


def emit(simulator: Simulator, program: Program, arguments: Sequence[Tensor]) -> Emission:
    """Compile a program and record how its call with these arguments would be scheduled.

    Raises:
        SimulatorError: PyPTO refused the program.
        InputError: what it gave is not what PyPTO 0.2.0 gives.
    """
    leaves = read_leaves(simulator.run(program, arguments, Mode.COMPILE).sources)
    schedule = read_schedule(simulator.run(program, arguments, Mode.SCHEDULE).schedule)
    return Emission(program, tuple(leaves), schedule, tuple(arguments))
