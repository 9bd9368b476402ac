"""Where programs run: an Ascend NPU through torch-npu, or the simulator."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.folders import in_one_line, send_pypto_output_away
from haarkv.tq_ops.npu.program import Kernel, Program
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator
from haarkv.tq_ops.npu.versions import find_installation, newer_note, unpublished_reason


class Runner:
    """Calls programs.

    Attributes:
        device: where their tensors live.
        description: for the user.
        simulated: its times mean nothing.
        most_vocab: rows of an LM head that one program may project to; None for all.
        keeps_programs: a program is compiled on its first call, and then kept.
        on_program: called with a program's name before its compilation, if programs are kept.
        compiled: seconds of the first calls of kept programs, by the program's name.
    """

    device: torch.device
    description: str
    simulated = False
    most_vocab: int | None = None
    keeps_programs = False

    def __init__(self) -> None:
        self.on_program: Callable[[str], object] = lambda _: None
        self.compiled: dict[str, float] = {}

    def constant(self, tensor: Tensor) -> Tensor:
        """Promise that a tensor on `device` will not change. Returns it."""
        return tensor

    def call(self, program: Program, tensors: list[Tensor]) -> None:
        """Run a program on its tensors, in order; outputs are filled in place."""
        raise NotImplementedError

    def refusals(self) -> AbstractContextManager[None]:
        """A context in which a driver's late error is an InputError of one line."""
        return nullcontext()


class SimRunner(Runner):
    """PyPTO's interpreter on the host."""

    device = torch.device("cpu")
    description = "PyPTO's interpreter (no NPU): right numbers, its times mean nothing"
    simulated = True
    # The interpreter keeps every piece of a weight that a program looks at: 14 GB for the head of Qwen3-14B at once.
    most_vocab = 16384

    def __init__(self) -> None:
        super().__init__()
        self._simulator = Simulator()

    def constant(self, tensor: Tensor) -> Tensor:
        return self._simulator.constant(tensor)

    def call(self, program: Program, tensors: list[Tensor]) -> None:
        self._simulator.run(program, tensors, Mode.NUMBERS)


class NpuRunner(Runner):
    """An Ascend NPU. PyPTO compiles a program on its first call and keeps it for the process.

    Written to PyPTO's documentation; no NPU has run it.
    """

    keeps_programs = True

    def __init__(self, index: int) -> None:
        super().__init__()
        self.device = torch.device("npu", index)
        self.description = f"Ascend NPU {index}"
        self._kernels: dict[Program, Kernel] = {}
        npu = torch_npu()
        send_pypto_output_away()
        with in_one_line(f"opening npu:{index}", "npu"):
            npu.set_device(index)

    def call(self, program: Program, tensors: list[Tensor]) -> None:
        if program in self._kernels:
            with in_one_line(f"running {program.name} on {self.device}", program.name):
                self._kernels[program](*tensors)
            return
        self.on_program(program.name)
        began = time.perf_counter()
        with in_one_line(f"compiling {program.name} for {self.device}", program.name):
            kernel = program.build(runtime_options={"run_mode": 0})
            kernel(*tensors)
        self._kernels[program] = kernel
        self.compiled[program.name] = self.compiled.get(program.name, 0.0) + time.perf_counter() - began

    def refusals(self) -> AbstractContextManager[None]:
        return in_one_line(f"running on {self.device}", "npu", (RuntimeError,))


def torch_npu() -> Any:
    """torch-npu's module `torch.npu`, which `import torch` does not load here (`versions.leave_npu_alone`).

    Raises:
        InputError: torch-npu is absent, made for another torch, cannot be loaded, or sees no NPU.
    """
    if find_spec("torch_npu") is None:
        raise InputError("torch-npu is not installed, so there is no NPU to run on; install it or use --device sim")
    installation = find_installation()
    ours, theirs = torch.__version__.split("+")[0], installation.torch_npu
    if theirs and ours.split(".")[:2] != theirs.split(".")[:2]:
        raise InputError(
            f"torch-npu {theirs} is made for another torch than {ours}; install matching ones or use --device sim"
        )
    try:
        import torch_npu as module

        npu: Any = module.npu
        available = npu.is_available()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        advice = unpublished_reason(installation) or newer_note(installation) or "check the NPU's driver with npu-smi info"
        raise InputError(f"torch-npu cannot be loaded ({reason[0]}); {advice}; or use --device sim") from None
    if not available:
        raise InputError("torch-npu sees no NPU; check npu-smi info, or use --device sim")
    return npu


def npu_index(device: str | None) -> int | None:
    """The number of the NPU that `npu` or `npu:N` names; None for `sim`. No name: the first NPU where torch-npu is installed.

    Raises:
        InputError: another name, or there is no such NPU.
    """
    if device is None:
        device = "sim" if find_spec("torch_npu") is None else "npu:0"
    if device == "sim":
        return None
    match = re.fullmatch(r"npu(?::(\d+))?", device)
    if not match:
        raise InputError(f"executor npu runs on sim or npu:N, not on {device!r}")
    index = int(match[1] or 0)
    count = torch_npu().device_count()
    if index >= count:
        raise InputError(f"there is no {device}; torch-npu sees {count} NPU{'s' * (count != 1)}")
    if find_spec("pypto") is None:
        raise InputError("pypto is not installed; run pip install 'haarkv[npu]'")
    return index


def open_runner(device: str | None) -> Runner:
    """The runner of a device, by the names of `npu_index`."""
    index = npu_index(device)
    return SimRunner() if index is None else NpuRunner(index)
