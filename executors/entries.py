"""What is known of each executor before its module is imported, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.cpu.library import BLOCKS
from haarkv.tq_ops.cuda.block_planes import PLANES
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.onnx.block_codes import CODES

if TYPE_CHECKING:
    from haarkv.tq_ops.npu.device import Runner


def _any(_device: str | None) -> None:
    pass


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Entry:
    """What is known of an executor before its module is imported.

    Attributes:
        open: makes it of a model, on a device in its own words.
        dtype: in which it runs a model unless another is asked for.
        any_dtype: whether it runs others.
        devices: first words of the devices that it runs on.
        here: whether this machine has such a device; cheap, for every command asks. None: `auto` never takes it.
        missing: what is not installed without which it would run as another, slower one; None if nothing is.
        require: raises InputError where it has no such device, before there is a model; `open` looks again.
        programs: opens what calls single programs on a device, for an executor whose kernels are programs.
        ahead: it has a `compile_ahead`, for what its first forwards with a cache would have to compile.
        whole_layers: why it cannot run a part of a model beside other ranks; "" if it can.
        numbered: its first device is one of several, of which each rank takes its own.
        blocks: names of the types of quantised blocks that it multiplies with as they are, on the first of its devices.
        in_order: bytes a number, by type, of blocks that it reorders in this machine's memory.
    """

    open: Callable[[DecoderModel, str | None], Executor]
    dtype: str = "float32"
    any_dtype: bool = True
    devices: tuple[str, ...] = ("cpu",)
    here: Callable[[], bool] | None = None
    missing: Callable[[], str | None] = _nothing
    require: Callable[[str | None], object] = _any
    programs: Callable[[str | None], Runner] | None = None
    ahead: bool = False
    whole_layers: str = ""
    numbered: bool = False
    blocks: tuple[str, ...] = ()
    in_order: Mapping[str, float] = field(default_factory=dict)


# -- One section an executor -------------------------------------------------------------------------------------------------


def _require_host(name: str, device: str | None) -> None:
    if device not in (None, "cpu"):
        raise InputError(f"executor {name} runs on the cpu, not on {device!r}; drop --device")


def class_of(name: str) -> Any:
    """An executor's class; its module is imported now.

    Raises:
        InputError: it needs a package that is not installed.
    """
    try:
        return getattr(import_module(f"haarkv.executors.{name}"), f"{name.title()}Executor")
    except ImportError as error:
        if name != "onnx":
            raise
        raise InputError(f"executor onnx needs the package {error.name}; pip install 'haarkv[onnx]'") from None


def _on_host(name: str, model: DecoderModel, device: str | None) -> Executor:
    _require_host(name, device)
    executor: Executor = class_of(name)(model)
    return executor


def _on_device(name: str, model: DecoderModel, device: str | None) -> Executor:
    executor: Executor = class_of(name)(model, device)
    return executor


def _kernels_missing() -> str | None:
    from haarkv.tq_ops.cpu.library import KernelsMissingError, load

    try:
        load()
    except KernelsMissingError as missing:
        return str(missing)
    return None


def _require_gpu(device: str | None) -> None:
    from haarkv.executors import cuda

    cuda.open_gpu(device)


def _has_gpu() -> bool:
    import torch

    from haarkv.tq_ops.cuda.available import triton_missing

    return torch.cuda.is_available() and triton_missing() is None


def _npu_programs(device: str | None) -> Runner:
    from haarkv.tq_ops.npu.device import open_runner

    return open_runner(device)


def _has_npu() -> bool:
    if find_spec("torch_npu") is None or find_spec("pypto") is None:
        return False
    from haarkv.tq_ops.npu.device import torch_npu

    try:
        torch_npu()
    except InputError:
        return False
    return True


def _require_provider(device: str | None) -> None:
    class_of("onnx")
    from haarkv.executors import onnx

    onnx.open_provider(device)


_WHOLE_GRAPHS = "its graphs hold whole layers, and ranks must meet twice within each"

ENTRIES: dict[str, Entry] = {
    "reference": Entry(partial(_on_host, "reference"), here=lambda: True, require=partial(_require_host, "reference")),
    "cpu": Entry(
        partial(_on_host, "cpu"), here=lambda: True, missing=_kernels_missing, require=partial(_require_host, "cpu"),
        blocks=BLOCKS,
    ),
    "cuda": Entry(
        partial(_on_device, "cuda"), "bfloat16", devices=("cuda",), here=_has_gpu, require=_require_gpu, numbered=True,
        blocks=tuple(PLANES), ahead=True,
    ),
    "npu": Entry(
        partial(_on_device, "npu"), "bfloat16", any_dtype=False, devices=("npu", "sim"), here=_has_npu, numbered=True,
        programs=_npu_programs, ahead=True,
    ),
    "onnx": Entry(
        partial(_on_device, "onnx"), devices=("cpu", "cuda", "cann"), require=_require_provider, whole_layers=_WHOLE_GRAPHS,
        blocks=tuple(CODES), in_order={name: codes.bytes_in_memory for name, codes in CODES.items()},
    ),
}  # fmt: skip
