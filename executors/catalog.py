"""The executors by name, one row each, read before an executor's module is imported; `auto` takes the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import SINGLE_RANK, Ranks
from haarkv.tq_ops.cpu.library import BLOCKS
from haarkv.tq_ops.cuda.block_planes import PLANES
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.onnx.block_codes import CODES

SIMULATOR = "sim"
"""The device that needs no card."""
OnProgram = Callable[[str], object]
"""Called with the name of a program before it is compiled."""


@dataclass(frozen=True)
class ExecutorInfo:
    """An executor's row.

    Attributes:
        open: makes the executor of a model, on a device by its name.
        probe: whether this machine has such a device; cheap.
        any_dtype: whether it runs other dtypes than `dtype`.
        devices: kinds of device by name; the first is the default.
        missing: what is not installed, without which it would run as a slower executor; None if nothing.
        require: raises InputError if a device is not there, before there is a model.
        whole_layers: its programs are whole layers, within which ranks cannot meet.
        per_rank: each rank takes a device of its own.
        blocks: types of weight blocks that its first kind of device multiplies with as they are.
        in_order: bytes a number, by type, of blocks that it reorders in this machine's memory; others it reads in place.
    """

    open: Callable[[DecoderModel, str | None], Executor]
    probe: Callable[[], bool]
    dtype: str = "float32"
    any_dtype: bool = True
    devices: tuple[str, ...] = ("cpu",)
    missing: Callable[[], str | None] = lambda: None
    require: Callable[[str | None], object] = lambda _device: None
    whole_layers: bool = False
    per_rank: bool = False
    blocks: tuple[str, ...] = ()
    in_order: Mapping[str, float] = field(default_factory=dict)

    def block_types(self, device: str | None = None) -> tuple[str, ...]:
        """`blocks` on a device, where they are fastest: () without its kernels, or on another kind of device."""
        return () if self.missing() or self._kind(device) != self.devices[0] else self.blocks

    def on_host(self, device: str | None) -> bool:
        """Whether it computes in this machine's own memory."""
        return self._kind(device) in ("cpu", SIMULATOR)

    @property
    def has_simulator(self) -> bool:
        return SIMULATOR in self.devices

    def reads_in_place(self, device: str | None) -> bool:
        """Whether every forward multiplies with weights where they lie in this machine's memory."""
        return bool(self.block_types(device)) and not self.in_order and self.on_host(device)

    def _kind(self, device: str | None) -> str:
        return (device or self.devices[0]).partition(":")[0]


# -- The rows ----------------------------------------------------------------------------------------------------------
def executor_class(name: str) -> Any:
    """An executor's class, its module imported; InputError if a package is not installed."""
    try:
        return getattr(import_module(f"haarkv.executors.{name}"), f"{name.title()}Executor")
    except ImportError as error:
        if name != "onnx":
            raise
        raise InputError(f"executor onnx needs the package {error.name}; pip install 'haarkv[onnx]'") from None


def _on_host(name: str) -> dict[str, Any]:
    """Fields of an executor that runs on the CPU alone."""

    def require(device: str | None) -> None:
        if device not in (None, "cpu"):
            raise InputError(f"executor {name} runs on the cpu, not on {device!r}; drop --device")

    def open_on_host(model: DecoderModel, device: str | None) -> Executor:
        require(device)
        return cast(Executor, executor_class(name)(model))

    return {"open": open_on_host, "require": require, "probe": lambda: True}


def _on_device(name: str, model: DecoderModel, device: str | None) -> Executor:
    return cast(Executor, executor_class(name)(model, device))


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


def _require_npu(device: str | None) -> None:
    from haarkv.tq_ops.npu.device import npu_index

    npu_index(device)


def _has_gpu() -> bool:
    import torch

    from haarkv.tq_ops.cuda.available import triton_missing

    return torch.cuda.is_available() and triton_missing() is None


def _has_npu() -> bool:
    if find_spec("torch_npu") is None or find_spec("pypto") is None:
        return False
    from haarkv.tq_ops.npu.device import torch_npu

    try:
        torch_npu()
    except InputError:
        return False
    return True


EXECUTORS: dict[str, ExecutorInfo] = {
    "reference": ExecutorInfo(**_on_host("reference")),
    "cpu": ExecutorInfo(**_on_host("cpu"), missing=_kernels_missing, blocks=BLOCKS),
    "cuda": ExecutorInfo(
        partial(_on_device, "cuda"), _has_gpu, "bfloat16", devices=("cuda",), require=_require_gpu, per_rank=True,
        blocks=tuple(PLANES),
    ),
    "npu": ExecutorInfo(
        partial(_on_device, "npu"), _has_npu, "bfloat16", any_dtype=False, devices=("npu", SIMULATOR), require=_require_npu,
        whole_layers=True,
    ),
    "onnx": ExecutorInfo(
        **_on_host("onnx"), whole_layers=True, blocks=tuple(CODES),
        in_order={name: codes.bytes_in_memory for name, codes in CODES.items()},
    ),
}  # fmt: skip
NAMES = tuple(EXECUTORS)
FASTEST_FIRST = ("cuda", "npu", "cpu", "reference")
"""The order in which `auto` tries executors."""
AUTO = "auto"


# -- Queries -----------------------------------------------------------------------------------------------------------
def info(name: str) -> ExecutorInfo:
    """An executor's row; InputError for a name that is not in `NAMES`."""
    if name not in EXECUTORS:
        raise InputError(f"unknown executor {name!r}; choose from {', '.join((AUTO, *NAMES))}")
    return EXECUTORS[name]


def refusal(
    name: str, config: ModelConfig, plans: Sequence[KVPlan], *, ranks: Ranks = SINGLE_RANK, dtype: str | None = None
) -> str | None:
    """Why an executor cannot run a model, or a rank's part of one, with all these caches: "NAME cannot run this: REASON".

    It asks all that is known before weights are read, except whether the device is there.
    """
    entry = info(name)
    reason: str | None = None
    if dtype and not entry.any_dtype and dtype != entry.dtype:
        reason = f"it runs {entry.dtype} only"
    elif ranks.size > 1 and entry.whole_layers:
        reason = "its programs are whole layers, and ranks must meet twice within each"
    else:
        reason = next((why for plan in plans if (why := entry.missing() or executor_class(name).supports(config, plan))), None)
    return reason and f"{name} cannot run this: {reason}"


def check(name: str, config: ModelConfig, plan: KVPlan, device: str | None = None, ranks: Ranks = SINGLE_RANK) -> None:
    """Raise before a model's weights are read what `create` would raise after."""
    info(name).require(_device_of_rank(name, device, ranks))
    if problem := refusal(name, config, [plan], ranks=ranks):
        raise InputError(f"executor {problem}")


def create(
    name: str, model: DecoderModel, plan: KVPlan, device: str | None = None, on_program: OnProgram | None = None
) -> Executor:
    """An executor for a model and a KV plan on a device by the executor's name for it, its programs compiled.

    Raises:
        InputError: no such executor or device, or it cannot run this model with this plan, with its reason.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if problem := refusal(name, model.config, [plan], ranks=model.ranks, dtype=dtype):
        raise InputError(f"executor {problem}")
    executor = info(name).open(model, _device_of_rank(name, device, model.ranks))
    executor.compile_ahead(plan, on_program or (lambda _: None))
    return executor


def interpreter_warning(name: str, device: str | None) -> str:
    """A warning before an executor starts in an interpreter that was not asked for, else ""."""
    entry = info(name)
    if device is not None or not entry.has_simulator or entry.probe():
        return ""
    return f"executor {name} runs in an interpreter here, minutes for a few tokens"


def _device_of_rank(name: str, device: str | None, ranks: Ranks) -> str | None:
    """This rank's own device, where each rank takes one; else the device asked for."""
    entry = info(name)
    if ranks.size == 1 or not entry.per_rank:
        return device
    kind = entry.devices[0]
    if device is not None and device.startswith(f"{kind}:"):
        raise InputError(f"each rank takes a device of its own; give --device {kind} without a number")
    return f"{kind}:{ranks.local}" if device == kind or (device is None and entry.probe()) else device


@dataclass(frozen=True)
class Selection:
    """An executor's name, and why `auto` passed over the fastest one of this machine; "" if it did not."""

    name: str
    passed_over: str = ""


def select(
    executor: str, config: ModelConfig, plans: Sequence[KVPlan], *, device: str | None = None, dtype: str | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> Selection:  # fmt: skip
    """The named executor, or for `auto` the fastest that this machine has and that can run the model with all these caches.

    Needs no weights, and imports neither Triton nor PyPTO. A `device` leaves only the executors that know it.

    Raises:
        InputError: no such executor, or no executor for this device.
    """
    if executor != AUTO:
        info(executor)
        return Selection(executor)
    names = [name for name in FASTEST_FIRST if device is None or device.partition(":")[0] in EXECUTORS[name].devices]
    if not names:
        raise InputError(f"no executor runs on {device!r}; --device takes cpu, cuda, cuda:N, npu, npu:N or sim")
    reasons: list[str] = []
    for name in names:
        if device is None and not EXECUTORS[name].probe():
            continue
        reason = refusal(name, config, plans, ranks=ranks, dtype=dtype)
        if reason is None:
            return Selection(name, reasons[0] if reasons else "")
        reasons.append(reason)
    raise InputError(f"executor {reasons[0]}")
