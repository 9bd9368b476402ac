"""Executors by name. A module is imported only when its executor is asked for."""

from __future__ import annotations

from collections.abc import Callable

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan


def _reference(model: DecoderModel, device: str | None) -> Executor:
    if device not in (None, "cpu"):
        raise InputError(f"the reference runs on the cpu, not on {device!r}")
    from haarkv.executors.reference import ReferenceExecutor

    return ReferenceExecutor(model)


def _cpu(model: DecoderModel, device: str | None) -> Executor:
    if device not in (None, "cpu"):
        raise InputError(f"the executor cpu runs on the cpu, not on {device!r}")
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
        raise InputError(f"unknown executor {name!r}; choose from {', '.join(NAMES)}")
    return name


def default_dtype(name: str) -> str:
    """The dtype in which an executor runs a model unless another is asked for: float32 where it can.

    Raises:
        InputError: no such executor.
    """
    return "bfloat16" if _known(name) in ("npu", "cuda") else "float32"


def create(name: str, model: DecoderModel, plan: KVPlan, device: str | None = None) -> Executor:
    """An executor for a model and a KV plan.

    Args:
        device: where it runs, in the executor's own words; its default unless given.
    Raises:
        InputError: no such executor or device, or it cannot run this model with this plan, with its reason.
    """
    executor = _BUILDERS[_known(name)](model, device)
    if reason := executor.supports(model.config, plan):
        raise InputError(f"executor {name} cannot run this: {reason}")
    return executor
