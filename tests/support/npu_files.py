"""A worker of the simulator that also says which files PyPTO wrote, as `sources` without text."""

from pathlib import Path
from typing import Any

from haarkv.tq_ops.npu.sim import worker
from haarkv.tq_ops.npu.sim.simulator import Simulator


class Listing(Simulator):
    """A simulator whose worker is this module."""

    worker = "npu_files"


def serve(connection: Any) -> None:
    """As the worker that it is made of."""
    collect = worker._collect

    def and_names(folder: Path, request: Any, tensors: Any, result: dict[str, Any]) -> None:
        collect(folder, request, tensors, result)
        result["sources"] = {file.name: "" for file in folder.rglob("*")}

    worker._collect = and_names
    worker.serve(connection)
