"""Runs PyPTO programs without an NPU, in a worker process: numbers, emitted C++.

PyPTO 0.2.0 compiles anew at every call in simulation. To be fast, numbers come from the tensor graph before any pass, no graph
is written as JSON, and tensors cross between the processes as files of a memory file system, constants only once.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.folders import cache_folder, refusal
from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.versions import find_installation, unsimulated_reason


class Mode(Enum):
    """NUMBERS: interpret the tensor graph with torch and fill the outputs. COMPILE: every pass, then the AICore C++."""

    NUMBERS = "numbers"
    COMPILE = "compile"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file that both processes map."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    constant: bool

    def map(self) -> Tensor:
        """The tensor itself, shared between the processes."""
        return torch.from_file(self.path, shared=True, size=math.prod(self.shape), dtype=self.dtype).view(self.shape)


@dataclass(frozen=True)
class Request:
    """One call, as the worker gets it."""

    program: Program
    mode: Mode
    arguments: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class Execution:
    """What a call gave.

    Attributes:
        seconds: wall time of the call in the worker.
        sources: path -> C++, in COMPILE: kernel functions in `kernel_aicore/`, what they include in `kernel_aicpu/`.
    """

    seconds: float
    sources: dict[str, str] = field(default_factory=dict)


class SimulatorError(InputError):
    """A program did not compile or run; the message is the compiler's."""


def unavailable() -> str | None:
    """None, or in one sentence why nothing can be simulated here."""
    if reason := unsimulated_reason(find_installation()):
        return reason
    missing = [tool for tool in ("cmake", "make", "g++") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; PyPTO's interpreter is compiled on its first use"
    return None


_SKIP_GRAPH = "void _ZN3npu8tile_fwk7Program12DumpJsonFileERKSsPNS0_8FunctionE(void) {}"
"""`npu::tile_fwk::Program::DumpJsonFile(std::string const &, Function *)`, with the strings of GCC's old ABI."""


def skip_graph_files() -> None:
    """Before PyPTO is imported: keep it from writing `program.json`, half of the CPU time of a small layer.

    No option does so: a library of one function stands in front of PyPTO's own, as the loader takes the first of a name. Where
    it cannot be compiled, graphs are written: slower, and otherwise the same.
    """
    with suppress(OSError, subprocess.CalledProcessError, InputError):
        library = cache_folder("pypto_quiet") / f"{hashlib.sha256(_SKIP_GRAPH.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            half = library.with_suffix(f".{os.getpid()}")
            command = ["g++", "-x", "c", "-shared", "-fPIC", "-O1", "-", "-o", str(half)]
            subprocess.run(command, input=_SKIP_GRAPH, text=True, check=True)
            half.replace(library)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Simulator:
    """A worker process, started by the first call and again after one that killed it, and the files of its tensors.

    Attributes:
        worker: the module whose `serve` is the process.
        boot: the Python text that the process runs, with the worker and a descriptor as arguments.
    Raises:
        InputError: PyPTO or a compiler is missing.
    """

    worker = "haarkv.tq_ops.npu.sim.worker"
    boot = (
        "import sys; from importlib import import_module; from multiprocessing.connection import Connection; "
        "from haarkv.tq_ops.npu.sim import simulator; simulator.skip_graph_files(); "
        "import_module(sys.argv[1]).serve(Connection(int(sys.argv[2])))"
    )

    def __init__(self) -> None:
        if reason := unavailable():
            raise InputError(reason)
        memory = Path("/dev/shm")
        self._temporary = TemporaryDirectory(prefix="haarkv-sim-", dir=memory if os.access(memory, os.W_OK) else None)
        self._folder = Path(self._temporary.name)
        self._files = 0
        # Keyed by the tensor object.
        self._constants: dict[Tensor, StoredTensor] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and delete its files."""
        self._stop()
        self._temporary.cleanup()

    def constant(self, tensor: Tensor) -> Tensor:
        """Promise that a tensor will not change, so that it is copied once. Returns it."""
        if tensor not in self._constants:
            self._constants[tensor] = self._store(tensor, constant=True)
        return tensor

    def run(self, program: Program, tensors: Sequence[Tensor], mode: Mode) -> Execution:
        """Call a program on contiguous tensors of the CPU; NUMBERS fills outputs in place.

        Raises:
            SimulatorError: it did not compile or run, or an output was not filled.
        """
        files = [self._constants[t] if t in self._constants else self._store(t) for t in tensors]
        try:
            answer = self._call(Request(program, mode, tuple(files)))
            if "error" in answer:
                everything = f"{answer['trace']}\n\n{self._log()}"
                self._stop()  # after a refusal PyPTO takes the next program for one nested in this
                raise SimulatorError(refusal(program.name, program.name, answer["error"], everything))
            if mode is Mode.NUMBERS:
                self._take_outputs(program, tensors, files, answer)
        finally:
            for file in files:
                if not file.constant:
                    Path(file.path).unlink(missing_ok=True)
        return Execution(answer["seconds"], answer["sources"])

    def _take_outputs(
        self, program: Program, tensors: Sequence[Tensor], files: Sequence[StoredTensor], answer: dict[str, Any]
    ) -> None:
        outputs = [index for index, argument in enumerate(program.arguments) if argument.output]
        if set(outputs) != set(answer["filled"]):
            raise SimulatorError(f"{program.name}: the interpreter left outputs unwritten: {answer['report'][-500:]}")
        for index in outputs:
            tensors[index].copy_(files[index].map())

    def _store(self, tensor: Tensor, *, constant: bool = False) -> StoredTensor:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError("the simulator takes contiguous tensors on the CPU")
        self._files += 1
        file = StoredTensor(str(self._folder / f"{self._files}.bin"), tensor.dtype, tuple(tensor.shape), constant)
        Path(file.path).touch()
        file.map().copy_(tensor)
        return file

    def _call(self, request: Request) -> dict[str, Any]:
        connection = self._connect()
        try:
            connection.send(request)
            answer: dict[str, Any] = connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            log, name = self._log(), request.program.name
            self._stop()
            tail = " ".join(log[-_TAIL:].split()) or "it said nothing"
            raise SimulatorError(refusal(name, name, f"the compiler's process died: {tail}", log)) from None
        except BaseException:
            # Interrupted between a question and its answer, the worker would answer the next question with the old one.
            self._stop()
            raise
        return answer

    def _connect(self) -> Connection:
        if self._connection is None:
            ours, theirs = Pipe()
            work = self._folder / "work"
            work.mkdir(exist_ok=True)
            with (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", self.boot, self.worker, str(theirs.fileno())],
                    cwd=work, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
            theirs.close()
            self._connection = ours
        return self._connection

    def _environment(self) -> dict[str, str]:
        # Whole: PyPTO takes a set ASCEND_HOME_PATH for an installed toolkit, so nothing is inherited.
        return {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", os.defpath]),
            "HOME": str(Path.home()),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TILE_FWK_DEVICE_ID": "0",
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            # The compiler's complaints come to our log instead of to files in the user's home.
            "ASCEND_SLOG_PRINT_TO_STDOUT": "1",
            "ASCEND_GLOBAL_LOG_LEVEL": "3",
        }

    def _log(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_TAIL = 120  # characters of the log that fit into a line
