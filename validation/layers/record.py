"""Records every op of a layer: its inputs, its result and the name of its stage."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.models.weights import TensorNames, Weights
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.table import OP_NAMES, OpTable, arguments, with_ops


@dataclass(frozen=True)
class Call:
    """One recorded op; `stage` names this use of it. A cache in `args` is the live one, which has changed since."""

    op: str
    stage: str
    args: tuple[Any, ...]
    result: Any


class Recorder:
    """An op table that records its calls. A weight names its op's stage, whatever the order of the calls."""

    def __init__(self, ops: OpTable, weights: Weights) -> None:
        self._calls: list[Call] = []
        ends = [("final_norm", weights.final_norm), ("head", weights.lm_head)]
        # All experts of a layer are one stage: `experts.3.up_proj` is `experts.up_proj`.
        layer_names = [
            (re.sub(r"\.\d+\.", ".", field), tensor) for layer in weights.layers for field, _, tensor in layer.named_tensors()
        ]
        self._stages = TensorNames([*ends, *layer_names])
        self.ops = with_ops(ops, {name: self._recording_op(name, getattr(ops, name)) for name in OP_NAMES})

    def _recording_op(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = op(*args, **kwargs)
            args_by_name = arguments(name, *args, **kwargs)
            stage = self._stages.name_of(args_by_name["weight"]) if "weight" in args_by_name else None
            self._calls.append(Call(name, stage or name, tuple(args_by_name.values()), result))
            return result

        return run

    def take_calls(self) -> list[Call]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        keys = [call.args[0] for call in calls if call.op == "store_kv"]

        delta = next((place for place, call in enumerate(calls) if call.op == "gated_delta"), len(calls))
        gate = next((call for call in calls[delta:] if call.op == "silu_mul"), None)

        def call_stage(call: Call) -> str:
            if call is gate:  # of what the state gave; the MLP's comes later
                return "delta_gate"
            # RoPE is given no weight: its result is stored as K, or it is Q's.
            is_k = any(call.result is k for k in keys)
            return call.stage if call.op != "rope" else "k_rope" if is_k else "q_rope"

        return [replace(call, stage=call_stage(call)) for call in calls]

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the model's weights."""
        return self._stages.name_of(tensor) is not None


def observe_vectors(
    ops: OpTable, on_kv: Callable[[Tensor, Tensor], object], on_q: Callable[[Tensor], object] = lambda _: None
) -> OpTable:
    """An op table that reports K and V [T, Hkv, D] as stored, and queries [T, Hq, D] as they attend."""

    def store_kv(k: Tensor, v: Tensor, at: LayerView) -> None:
        on_kv(k, v)
        ops.store_kv(k, v, at)

    def paged_attention(q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
        on_q(q)
        return ops.paged_attention(q, at, softmax_scale)

    return with_ops(ops, {"store_kv": store_kv, "paged_attention": paged_attention})


def copy_argument(value: Any, device: torch.device) -> Any:
    """A copy of a tensor or batch, so that the candidate can neither change ours nor return it."""
    if isinstance(value, LayerView):
        return replace(value, batch=copy_argument(value.batch, device))
    if isinstance(value, Batch):
        return Batch(**{name: tensor.to(device, copy=True) for name, tensor in value.tensors.items()})
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def replay(call: Call, ops: OpTable, device: torch.device, cache: PagedKVCache, recorder: Recorder) -> tuple[Any, bool]:
    """Run a recorded call with another table, on copies of its inputs on a device, with `cache` in place of the recorded one.

    Returns:
        the result on the host (a message if the inputs were refused as not finite), and whether the inputs are unchanged.
    """
    arg_copies: list[Any] = []
    for arg in call.args:
        if isinstance(arg, LayerView):
            arg_copies.append(replace(copy_argument(arg, device), cache=cache))
        elif isinstance(arg, Tensor) and recorder.is_weight(arg):
            arg_copies.append(arg.to(device))
        else:
            arg_copies.append(copy_argument(arg, device))
    try:
        result = getattr(ops, call.op)(*arg_copies)
    except NonFiniteError as error:
        result = str(error)
    if isinstance(result, Tensor):
        result = result.to("cpu", copy=True)
    return result, all(is_unchanged(ours, theirs) for ours, theirs in zip(call.args, arg_copies, strict=True))


def is_unchanged(ours: Any, theirs: Any) -> bool:
    """Whether a copy still equals the original."""
    if isinstance(ours, LayerView):
        return is_unchanged(ours.batch, theirs.batch)
    if isinstance(ours, Batch):
        return all(is_unchanged(tensor, getattr(theirs, name)) for name, tensor in ours.tensors.items())
    return not isinstance(ours, Tensor) or torch.equal(ours, theirs.cpu())
