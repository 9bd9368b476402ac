"""Where programs run: an Ascend NPU through torch-npu, or the simulator."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.program import Kernel, Program
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator


class Runner(Protocol):
    """Calls programs.

    Attributes:
        device: where their tensors live.
        description: for the user, what it is.
        simulated: its times mean nothing.
        most_vocab: rows of an LM head that one program may project to; None is all of them.
    """

    device: torch.device
    description: str
    simulated: bool
    most_vocab: int | None

    def constant(self, tensor: Tensor) -> Tensor:
        """Promise that a tensor on `device` will not change. Returns it."""

    def call(self, program: Program, tensors: list[Tensor]) -> None:
        """Run a program on its tensors, in order; outputs are filled in place."""


class SimRunner:
    """PyPTO's interpreter on the host: right numbers, no meaning in its time."""

    device = torch.device("cpu")
    description = "PyPTO's interpreter (no NPU): right numbers, its times mean nothing"
    simulated = True
    # The interpreter keeps every piece of a weight that a program looks at: 14 GB for the head of Qwen3-14B at once.
    most_vocab: int | None = 16384

    def __init__(self) -> None:
        self._simulator = Simulator()

    def constant(self, tensor: Tensor) -> Tensor:
        return self._simulator.constant(tensor)

    def call(self, program: Program, tensors: list[Tensor]) -> None:
        self._simulator.run(program, tensors, Mode.NUMBERS)


class NpuRunner:
    """An Ascend NPU. PyPTO compiles a program on its first call and keeps it for the process.

    Written to PyPTO's documentation and never run: no NPU was at hand.
    """

    simulated = False
    most_vocab: int | None = None

    def __init__(self, index: int) -> None:
        self.device = torch.device("npu", index)
        self.description = f"Ascend NPU {index}"
        self._kernels: dict[Program, Kernel] = {}
        torch_npu().set_device(index)

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor

    def call(self, program: Program, tensors: list[Tensor]) -> None:
        if program not in self._kernels:
            self._kernels[program] = program.build(runtime_options={"run_mode": 0})
        self._kernels[program](*tensors)


def torch_npu() -> Any:
    """torch-npu's module `torch.npu`.

    Raises:
        InputError: torch-npu is absent, made for another torch, or sees no NPU.
    """
    if find_spec("torch_npu") is None:
        raise InputError("torch-npu is not installed, so there is no NPU to run on; install it or use --device sim")
    ours, theirs = torch.__version__.split("+")[0], metadata.version("torch_npu")
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        raise InputError(
            f"torch-npu {theirs} is made for another torch than {ours}; install matching ones or use --device sim"
        )
    try:
        import torch_npu as module
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(f"torch-npu cannot be loaded ({error}); source CANN's set_env.sh or use --device sim") from None
    npu: Any = module.npu
    if not npu.is_available():
        raise InputError("torch-npu sees no NPU; check npu-smi info, or use --device sim")
    return npu


def open_runner(device: str | None) -> Runner:
    """The runner for `sim`, `npu` or `npu:N`; without a wish, the first NPU if there is one, else the simulator.

    Raises:
        InputError: no such device, or it cannot be used.
    """
    if device is None:
        try:
            torch_npu()
        except InputError:
            return SimRunner()
        return open_runner("npu:0")
    if device == "sim":
        return SimRunner()
    match = re.fullmatch(r"npu(?::(\d+))?", device)
    if not match:
        raise InputError(f"executor npu runs on sim or npu:N, not on {device!r}")
    index = int(match[1] or 0)
    count = torch_npu().device_count()
    if index >= count:
        raise InputError(f"there is no {device}; torch-npu sees {count} NPU{'s' * (count != 1)}")
    if find_spec("pypto") is None:
        raise InputError("pypto is not installed; run pip install 'haarkv[npu]'")
    return NpuRunner(index)
