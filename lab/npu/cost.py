"""What PyPTO's cost model says of a call: every pass is run, numbers are not computed. Relative figures, not a latency.

The cost model reads the graph that PyPTO writes as JSON, so nothing stands in front of what writes it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.sim.simulator import Request, Simulator

COST: Any = "cost"
"""A mode of the workers here, beside those of the simulator."""
_PYTHON3 = """#!/bin/sh
case "$1" in */print_swim_lane.py | */draw_*.py) exit 0 ;; esac
exec {} "$@"
"""


@dataclass(frozen=True)
class Cost:
    """Of one call: cycles, tasks, the text of the report, and the seconds that it took to say so."""

    cycles: int
    tasks: int
    report: str
    seconds: float


class CostSimulator(Simulator):
    """A simulator that can also say what a call costs."""

    worker = "lab.npu.cost"
    boot = Simulator.boot.replace("simulator.skip_graph_files(); ", "")

    def cost(self, program: Program, arguments: Sequence[Tensor]) -> Cost:
        """The cost of a call with such arguments; nothing is written to them."""
        self.run(program, arguments, COST)
        return Cost(*(self._answer[name] for name in ("cycles", "tasks", "report", "seconds")))

    def _call(self, request: Request) -> dict[str, Any]:
        self._answer = super()._call(request)
        return self._answer

    def _environment(self) -> dict[str, str]:
        """With a `python3` that draws no swimlane for PyPTO, which would take longer than the run."""
        shim = self._folder / "bin" / "python3"
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(_PYTHON3.format(shlex.quote(sys.executable)), encoding="utf-8")
        shim.chmod(0o755)
        environment = super()._environment()
        return environment | {"PATH": f"{shim.parent}:{environment['PATH']}"}


def add_cost() -> None:
    """Teach the worker of this process to cost."""
    from haarkv.tq_ops.npu.sim import worker

    options, collect = worker._options, worker._collect

    def with_cost(mode: Any) -> dict[str, dict[str, Any]]:
        return {"runtime_options": worker._SIM} if mode == COST else options(mode)

    def and_cost(folder: Path, request: Any, tensors: Any, result: dict[str, Any]) -> None:
        collect(folder, request, tensors, result)
        output_folder = folder / "CostModelSimulationOutput"
        if request.mode == COST and (output_folder / "_simulate.stat.report.txt").exists():
            result["report"] = (output_folder / "_simulate.stat.report.txt").read_text(encoding="utf-8")
            cycles = re.search(r"Total Cycles\.*:\s*(\d+)", result["report"])
            cores = json.loads((output_folder / "_simulate.swim.json").read_text(encoding="utf-8"))
            result |= {"cycles": int(cycles[1]) if cycles else 0, "tasks": sum(len(core["tasks"]) for core in cores)}

    worker._options, worker._collect = with_cost, and_cost


def serve(connection: Any) -> None:
    """The process of the worker."""
    add_cost()
    from haarkv.tq_ops.npu.sim import worker

    worker.serve(connection)
