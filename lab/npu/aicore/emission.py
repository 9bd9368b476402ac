"""From a program to something that can be executed: its kernel functions and its schedule, by two calls of PyPTO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.sim.simulator import Mode
from lab.npu.aicore.build import compile_leaves
from lab.npu.aicore.leaf import Leaf, read_leaves
from lab.npu.aicore.machine import Machine
from lab.npu.aicore.schedule import Schedule, read_schedule
from lab.npu.aicore.toolchain import Toolchain
from lab.npu.cost import COST, CostSimulator


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


class Recorder(CostSimulator):
    """A simulator that can say how a call would be scheduled."""

    worker = "lab.npu.aicore.record"

    def schedule(self, program: Program, arguments: Sequence[Tensor]) -> Schedule:
        """The record of PyPTO's scheduler of a call."""
        self.run(program, arguments, COST)
        return read_schedule(self._answer["schedule"])


def emit(simulator: Recorder, program: Program, arguments: Sequence[Tensor]) -> Emission:
    """Compile a program and record how its call with these arguments would be scheduled.

    Raises:
        SimulatorError: PyPTO refused the program.
        InputError: what it gave is not what PyPTO 0.2.0 gives.
    """
    leaves = read_leaves(simulator.run(program, arguments, Mode.COMPILE).sources)
    return Emission(program, tuple(leaves), simulator.schedule(program, arguments), tuple(arguments))
