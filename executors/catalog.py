"""Executors by name, and `auto`. A module is imported only when its executor is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan

Unsupported = Callable[[DecoderConfig, KVPlan], str | None]

# -- Building one ----------------------------------------------------------------------------------------------------------


def _reference(model: DecoderModel, device: str | None) -> Executor:
    if device not in (None, "cpu"):
        raise InputError(f"executor reference runs on the cpu, not on {device!r}; drop --device")
    from haarkv.executors.reference import ReferenceExecutor

    return ReferenceExecutor(model)


def _cpu(model: DecoderModel, device: str | None) -> Executor:
    if device not in (None, "cpu"):
        raise InputError(f"executor cpu runs on the cpu, not on {device!r}; drop --device")
    from haarkv.executors.cpu import CpuExecutor

    return CpuExecutor(model)


def _npu(model: DecoderModel, device: str | None) -> Executor:
    from haarkv.executors.npu import NpuExecutor

    return NpuExecutor(model, device)


def _cuda(model: DecoderModel, device: str | None) -> Executor:
    from haarkv.executors.cuda import CudaExecutor

    return CudaExecutor(model, device)


def _onnx(model: DecoderModel, device: str | None) -> Executor:
    try:
        from haarkv.executors.onnx import OnnxExecutor
    except ImportError as error:
        raise InputError(f"executor onnx needs the package {error.name}; pip install 'haarkv[onnx]'") from None

    return OnnxExecutor(model, device)


_BUILDERS: dict[str, Callable[[DecoderModel, str | None], Executor]] = {
    "reference": _reference,
    "cpu": _cpu,
    "cuda": _cuda,
    "npu": _npu,
    "onnx": _onnx,
}
NAMES = tuple(_BUILDERS)


def _known(name: str) -> str:
    if name not in NAMES:
        raise InputError(f"unknown executor {name!r}; choose from {', '.join((AUTO, *NAMES))}")
    return name


def default_dtype(name: str) -> str:
    """The dtype in which an executor runs a model unless another is asked for: float32 where it can.

    Args:
        name: of `NAMES`; what `auto` stands for is known to `select`.
    Raises:
        InputError: no such executor.
    """
    return "bfloat16" if _known(name) in ("npu", "cuda") else "float32"


def create(name: str, model: DecoderModel, plan: KVPlan, device: str | None = None) -> Executor:
    """An executor for a model and a KV plan.

    Args:
        name: of `NAMES`, or `auto`.
        device: where it runs, in the executor's own words; its default unless given.
    Raises:
        InputError: no such executor or device, or it cannot run this model with this plan, with its reason.
    """
    if name == AUTO:
        name = select(name, model.config, [plan], device=device, dtype=str(model.dtype).removeprefix("torch.")).name
    executor = _BUILDERS[_known(name)](model, device)
    if reason := executor.supports(model.config, plan):
        raise InputError(f"executor {name} cannot run this: {reason}")
    return executor


# -- `auto` ----------------------------------------------------------------------------------------------------------------

AUTO = "auto"
FASTEST_FIRST = ("cuda", "npu", "cpu", "reference")
"""What `auto` tries, in this order."""
_DEVICES = {"cuda": "cuda", "npu": "npu", "sim": "npu", "cpu": "cpu"}
_ONLY_DTYPE = {"npu": "bfloat16"}


@dataclass(frozen=True)
class Selection:
    """The executor that will run.

    Attributes:
        name: of `NAMES`.
        passed_over: the fastest executor that this machine has and that `auto` could not take, and why; "" if it took the
            fastest, or was not asked.
    """

    name: str
    passed_over: str = ""


def select(
    executor: str, config: DecoderConfig, plans: Sequence[KVPlan], *, device: str | None = None, dtype: str | None = None
) -> Selection:
    """The executor that a name stands for: itself, or for `auto` the fastest that this machine has and that can run all this.

    Needs no weights, and imports neither Triton nor PyPTO.

    Args:
        executor: of `NAMES`, or `auto`.
        plans: every cache that it must read.
        device: leaves only the executors that know this device; whether it is there is for `create` to say.
        dtype: of the model, if one was asked for.
    Raises:
        InputError: no such executor, or no executor for this device.
    """
    if executor != AUTO:
        return Selection(_known(executor))
    names = [name for name in FASTEST_FIRST if device is None or _knows(name, device)]
    if not names:
        raise InputError(f"no executor runs on {device!r}; --device takes cpu, cuda, cuda:N, npu, npu:N or sim")
    refused: list[str] = []
    for name in names:
        if device is None and not _HERE[name]():
            continue
        reason = _refusal(name, config, plans, dtype)
        if reason is None:
            return Selection(name, refused[0] if refused else "")
        refused.append(f"{name} cannot run this: {reason}")
    raise InputError(f"executor {refused[0]}")


def _knows(name: str, device: str) -> bool:
    return _DEVICES.get(device.partition(":")[0]) == ("cpu" if name == "reference" else name)


def _refusal(name: str, config: DecoderConfig, plans: Sequence[KVPlan], dtype: str | None) -> str | None:
    """Why an executor cannot run all of this, or None."""
    if dtype and _ONLY_DTYPE.get(name, dtype) != dtype:
        return f"it runs {_ONLY_DTYPE[name]} only"
    if name == "cpu" and (missing := _missing_kernels()):
        return missing
    unsupported = _UNSUPPORTED[name]()
    return next((reason for plan in plans if (reason := unsupported(config, plan))), None)


def _missing_kernels() -> str:
    from haarkv.tq_ops.cpu.library import KernelsMissingError, load

    try:
        load()
    except KernelsMissingError as missing:
        return str(missing)
    return ""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and find_spec("triton") is not None


def _has_npu() -> bool:
    if find_spec("torch_npu") is None or find_spec("pypto") is None:
        return False
    from haarkv.tq_ops.npu.device import torch_npu

    try:
        torch_npu()
    except InputError:
        return False
    return True


# Whether this machine has what an executor runs on; cheap, for every command asks.
_HERE: dict[str, Callable[[], bool]] = {"cuda": _has_gpu, "npu": _has_npu, "cpu": lambda: True, "reference": lambda: True}


def _cuda_unsupported() -> Unsupported:
    from haarkv.executors.cuda import CudaExecutor

    return CudaExecutor.unsupported


def _npu_unsupported() -> Unsupported:
    from haarkv.executors.npu import NpuExecutor

    return NpuExecutor.unsupported


def _cpu_unsupported() -> Unsupported:
    from haarkv.executors.cpu import CpuExecutor

    return CpuExecutor.unsupported


# What `Executor.supports` answers, before there is a model to make an executor of.
_UNSUPPORTED: dict[str, Callable[[], Unsupported]] = {
    "cuda": _cuda_unsupported,
    "npu": _npu_unsupported,
    "cpu": _cpu_unsupported,
    "reference": lambda: lambda *_: None,
}
