"""A worker of the simulator that keeps what PyPTO's scheduler logs: the only place where tasks' attributes can be seen.

A run for its cost then brings the record of every task that the scheduler starts, and of what it waits for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pypto

from haarkv.tq_ops.npu.program import Kernel
from haarkv.tq_ops.npu.sim import worker
from lab.npu.cost import COST, add_cost

_SOURCE = Path(__file__).with_name("csrc") / "record.c"
# A function of PyPTO 0.2.0 that returns the pointers through which it logs.
_LOGGER = "_ZN3npu8tile_fwk11LogFuncInfo8InstanceEv"


@contextmanager
def _log_to(record: Path) -> Iterator[None]:
    """Keep the lines of the scheduler, whole, in a file.

    Raises:
        RuntimeError: this PyPTO logs in another way, or no C compiler is there.
    """
    pypto_library = ctypes.CDLL(str(Path(pypto.__file__).parent / "lib/libtile_fwk_utils.so"))
    if not hasattr(pypto_library, _LOGGER):
        raise RuntimeError("this pypto logs in another way than 0.2.0: its schedule cannot be read")
    find = pypto_library[_LOGGER]
    find.restype = ctypes.c_void_p
    logger = ctypes.c_void_p(find())
    library = ctypes.CDLL(str(_library()))
    if library.record_begin(logger, str(record).encode()):
        raise RuntimeError(f"{record} cannot be written")
    try:
        yield
    finally:
        library.record_end(logger)


def _library() -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = Path.home() / ".cache/haarkv/pypto_record" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        half = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-O1", str(_SOURCE), "-o", str(half)], check=True)
        half.replace(library)
    return library


def serve(connection: Any) -> None:
    """As the worker that it is made of; an answer to COST has what the scheduler logged, as `schedule`."""
    add_cost()
    kernel, collect = worker._kernel, worker._collect

    def with_record(program: Any, mode: Any) -> Kernel:
        plain = kernel(program, mode)
        if mode != COST:
            return plain

        def call(*tensors: Any) -> None:
            with _log_to(Path("schedule.log").absolute()):
                plain(*tensors)

        return call

    def and_record(folder: Path, request: Any, tensors: Any, result: dict[str, Any]) -> None:
        collect(folder, request, tensors, result)
        if request.mode == COST:
            result["schedule"] = Path("schedule.log").read_text(encoding="utf-8", errors="replace")

    worker._collect = and_record
    worker._kernel = with_record  # type: ignore[assignment]  # each call has a record of its own
    worker.serve(connection)
