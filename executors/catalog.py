"""Executors by name, and `auto`: what each can run, and who is made. Its module is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from haarkv.executors.base import Executor
from haarkv.executors.entries import ENTRIES, Entry, class_of
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import ALONE, Ranks
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan

if TYPE_CHECKING:
    from haarkv.tq_ops.npu.device import Runner

OnProgram = Callable[[str], object]
"""Called with the name of a program before it is compiled."""

NAMES = tuple(ENTRIES)
FASTEST_FIRST = ("cuda", "npu", "cpu", "reference")
"""What `auto` tries, in this order."""
AUTO = "auto"


# -- Making one ---------------------------------------------------------------------------------------------------------------


def _entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise InputError(f"unknown executor {name!r}; choose from {', '.join((AUTO, *NAMES))}")
    return ENTRIES[name]


def default_dtype(name: str) -> str:
    """The dtype in which an executor runs a model unless another is asked for: float32 where it can.

    Args:
        name: of `NAMES`; what `auto` stands for is known to `select`.
    Raises:
        InputError: no such executor.
    """
    return _entry(name).dtype


def default_device(name: str) -> str:
    """The word for the device that an executor is made for.

    Raises:
        InputError: no such executor.
    """
    return _entry(name).devices[0]


def block_types(name: str, device: str | None = None) -> tuple[str, ...]:
    """Types of quantised blocks, by name, that an executor multiplies with as they are: it is fastest with them as their file
    has them.

    Args:
        device: where it is to run; its default unless given.
    Raises:
        InputError: no such executor.
    """
    entry = _entry(name)
    first = (device or entry.devices[0]).partition(":")[0] == entry.devices[0]
    return () if entry.missing() or not first else entry.blocks


def bytes_in_order(name: str) -> Mapping[str, float]:
    """By type of `block_types`, bytes a number of blocks that an executor puts in another order in this machine's memory; it
    multiplies with others where they lie.

    Raises:
        InputError: no such executor.
    """
    return _entry(name).in_order


def reads_in_place(name: str, device: str | None) -> bool:
    """Whether an executor multiplies with weights where they lie in this machine's memory, in every forward.

    Args:
        device: where it is to run; its default unless given.
    Raises:
        InputError: no such executor.
    """
    return bool(block_types(name, device)) and not bytes_in_order(name) and on_host(name, device)


def on_host(name: str, device: str | None) -> bool:
    """Whether an executor computes in this machine's own memory.

    Args:
        device: where it is to run; its default unless given.
    Raises:
        InputError: no such executor.
    """
    return (device or default_device(name)).partition(":")[0] in ("cpu", "sim")


def open_programs(name: str, device: str | None) -> Runner | None:
    """What calls single programs for an executor; None for one that has none.

    Raises:
        InputError: no such executor or device, or it cannot be used.
    """
    programs = _entry(name).programs
    return programs(device) if programs else None


def refusal(
    name: str, config: ModelConfig, plans: Sequence[KVPlan], *, ranks: Ranks = ALONE, dtype: str | None = None
) -> str | None:
    """Why an executor cannot run a model with all these caches, as "NAME cannot run this: REASON"; None if it can.

    All that is known before weights are read is asked here, and nowhere else. Whether the device is there is left to `check`.

    Args:
        name: of `NAMES`.
        config: of what it is to run: of a rank, its part.
        ranks: with whom it shares the model.
        dtype: of the model, if one was asked for.
    Raises:
        InputError: no such executor, or one whose packages are not installed.
    """
    entry = _entry(name)
    reason: str | None = None
    if dtype and not entry.any_dtype and dtype != entry.dtype:
        reason = f"it runs {entry.dtype} only"
    elif ranks.size > 1 and entry.whole_layers:
        reason = entry.whole_layers
    else:
        reason = next((why for plan in plans if (why := entry.missing() or class_of(name).supports(config, plan))), None)
    return reason and f"{name} cannot run this: {reason}"


def check(name: str, config: ModelConfig, plan: KVPlan, device: str | None = None, ranks: Ranks = ALONE) -> None:
    """Refuse before a model's weights are read what `create` would refuse after; `create` looks again.

    Args:
        name, config, ranks: as of `refusal`.
        device: where it is to run, in the executor's own words. Whether an NPU is there is left to `create`.
    Raises:
        InputError: no such executor or device, or it cannot run such a model with this plan, with its reason.
    """
    _entry(name).require(_device_of_rank(name, device, ranks))
    if refused := refusal(name, config, [plan], ranks=ranks):
        raise InputError(f"executor {refused}")


def create(
    name: str, model: DecoderModel, plan: KVPlan, device: str | None = None, on_program: OnProgram | None = None
) -> Executor:
    """An executor for a model and a KV plan, with its programs compiled if it keeps any, so that no forward waits for them.

    Args:
        name: of `NAMES`, or `auto`.
        device: where it runs, in the executor's own words; its default unless given.
        on_program: called before each program is compiled.
    Raises:
        InputError: no such executor or device, or it cannot run this model with this plan, with its reason.
    """
    if name == AUTO:
        name = select(name, model.config, [plan], device=device, dtype=str(model.dtype).removeprefix("torch.")).name
    entry, ranks = _entry(name), model.ranks
    if refused := refusal(name, model.config, [], ranks=ranks):
        raise InputError(f"executor {refused}")
    executor = entry.open(model, _device_of_rank(name, device, ranks))
    if reason := executor.supports(model.config, plan):
        raise InputError(f"executor {name} cannot run this: {reason}")
    if entry.ahead:
        cast(Any, executor).compile_ahead(plan, on_program or (lambda _: None))
    return executor


def interpreted(name: str, device: str | None) -> str:
    """A warning for before an executor begins in an interpreter that nobody asked for; "" if it computes on its device.

    Args:
        device: that was asked for.
    Raises:
        InputError: no such executor.
    """
    entry = _entry(name)
    if device is not None or entry.programs is None or entry.here is None or entry.here():
        return ""
    return f"executor {name} runs in an interpreter here, minutes for a few tokens"


def _device_of_rank(name: str, device: str | None, ranks: Ranks) -> str | None:
    """The device of this rank where each takes its own; else what was asked for."""
    entry = _entry(name)
    if ranks.size == 1 or not entry.numbered:
        return device
    kind = entry.devices[0]
    if device is not None and device.startswith(f"{kind}:"):
        raise InputError(f"each rank takes a device of its own; give --device {kind} without a number")
    return f"{kind}:{ranks.local}" if device == kind or (device is None and entry.here and entry.here()) else device


# -- `auto` ----------------------------------------------------------------------------------------------------------------


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
    executor: str, config: ModelConfig, plans: Sequence[KVPlan], *, device: str | None = None, dtype: str | None = None
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
        _entry(executor)
        return Selection(executor)
    names = [name for name in FASTEST_FIRST if device is None or device.partition(":")[0] in ENTRIES[name].devices]
    if not names:
        raise InputError(f"no executor runs on {device!r}; --device takes cpu, cuda, cuda:N, npu, npu:N or sim")
    refused: list[str] = []
    for name in names:
        here = ENTRIES[name].here
        if device is None and not (here and here()):
            continue
        reason = refusal(name, config, plans, dtype=dtype)
        if reason is None:
            return Selection(name, refused[0] if refused else "")
        refused.append(reason)
    raise InputError(f"executor {refused[0]}")
