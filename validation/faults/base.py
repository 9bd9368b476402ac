"""A planted fault: how it gets into the reference, and where a validation must find it.

A fault changes ops (`instead`), the model, or whole forwards (`FaultyExecutor`). `ops` has what an op may do wrong; `layer`,
`model`, `windows` and `states` plant it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.codebooks import haar_rotation
from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, arguments, with_ops

K, V, OUT = "store_kv.k", "store_kv.v", "attention_mlp"
Table = Mapping[str, Callable[..., Any]]


# -- One op ----------------------------------------------------------------------------------------------------------------
class Call(SimpleNamespace):
    """One call of an op: its inputs by the names of `OpTable`'s parameters, and `right`, the op itself."""

    @property
    def cache(self) -> PagedKVCache:
        return self.at.cache  # type: ignore[no-any-return]

    @property
    def layer(self) -> int:
        return self.at.layer  # type: ignore[no-any-return]

    @property
    def batch(self) -> Batch:
        """Placed in the layer."""
        return self.at.batch  # type: ignore[no-any-return]

    def again(self, **other: Any) -> Tensor:
        """The op's result for changed inputs; None of `store_kv`."""
        if view := {name: other.pop(name) for name in ("cache", "layer", "batch") if name in other}:
            other["at"] = replace(self.at, **view)
        right, *inputs = (vars(self) | other).values()
        return right(*inputs)  # type: ignore[no-any-return]


Wrong = Callable[[Call], Any]
"""A wrong op."""


def instead(op: str, wrong: Wrong, where: Callable[[Call], bool] = lambda _: True) -> Table:
    """An op of the reference that is wrong in some of its calls."""
    right = getattr(reference, op)

    def run(*args: Any) -> Any:
        call = Call(right=right, **arguments(op, *args))
        return wrong(call) if where(call) else right(*args)

    return {op: run}


def table_with(ops: Table) -> OpTable:
    """The reference's table with some ops replaced."""
    return with_ops(cast(OpTable, reference), ops)


def reordered_sum_ops() -> OpTable:
    """No fault: the reference's ops with FP32 sums in another order, as another device may add."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        halves = (x[..., :half].flip(-1), weight[:, :half].flip(-1)), (x[..., half:].flip(-1), weight[:, half:].flip(-1))
        return reference.linear(*halves[0]) + reference.linear(*halves[1])

    return table_with({"rms_norm": rms_norm, "linear": linear})


# -- Whole forwards --------------------------------------------------------------------------------------------------------
Whole = Callable[["FaultyExecutor", Tensor, Batch, PagedKVCache], Tensor]
"""An executor's forward: hidden states [T, hidden]."""


class FaultyExecutor(ReferenceExecutor):
    """The reference with a fault, which claims to be an executor of the `right` model.

    Args:
        whole: a forward in place of the reference's; it may keep `notes` of earlier ones.
    """

    def __init__(self, right: DecoderModel, model: DecoderModel, ops: OpTable, whole: Whole | None = None) -> None:
        super().__init__(model, ops)
        self.config, self.model, self.notes = right.config, model, dict[int, int]()
        self._whole = whole or ReferenceExecutor.forward

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        return self._whole(self, token_ids, batch, cache)


class WholeLayers:
    """An executor as a fused one: its layers run whole and its ops are hidden."""

    ops = None

    def __init__(self, executor: Executor) -> None:
        self._executor, self.description = executor, f"{executor.description}, by whole layers"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def with_ops(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None


DRIVES: Mapping[str, Callable[[Executor], Executor]] = {
    "ops": lambda executor: executor, "layers": lambda executor: cast(Executor, WholeLayers(executor)),
}  # fmt: skip
"""How an executor is driven: op by op, or by whole layers."""


# -- A fault and its place ---------------------------------------------------------------------------------------------------
DELTA_STAGES = ("in_proj_z", "gated_delta", "delta_norm", "delta_gate", "out_proj")
"""Stages of Gated DeltaNet alone."""
_MLP_STAGES = ("post_norm", "gate_proj", "up_proj", "silu_mul", "down_proj")
SEEN_AS = {
    K: ("input_norm", "k_proj", "k_norm", "k_rope", K),
    V: ("input_norm", "v_proj", V),
    OUT: ("q_proj", "q_norm", "q_rope", "paged_attention", "o_proj", *DELTA_STAGES, *_MLP_STAGES),
    "conv_state": ("in_proj_qkv", "in_proj_qkvz", "conv_state"),
    "delta_state": ("in_proj_a", "in_proj_b", "in_proj_ba", "state_read", "delta_state"),
    "head": ("final_norm", "forward"),
}  # fmt: skip
"""Stages that may be wrong where only layers run, by the stage that shows it; any other stage shows itself."""


@dataclass(frozen=True)
class Fault:
    """One way of being wrong.

    Attributes:
        layer: the first in which it shows; None for the embedding, the head and whole forwards.
        stage: the wrong op; `also`: other stages that may be named.
        model: in place of the right model.
    """

    name: str
    layer: int | None
    stage: str
    ops: Table = field(default_factory=dict)
    model: DecoderModel | None = None
    head: int | None = None
    also: tuple[str, ...] = ()
    whole: Whole | None = None

    @property
    def seen_as(self) -> str:
        """The stage that shows it where only whole layers run."""
        return next((whole_stage for whole_stage, wrong in SEEN_AS.items() if self.stage in wrong), self.stage)

    def table(self) -> OpTable:
        return table_with(self.ops)

    def executor(self, model: DecoderModel, drive: str = "ops") -> Executor:
        """The reference with this fault, driven as `DRIVES` says."""
        return DRIVES[drive](FaultyExecutor(model, self.model or model, self.table(), self.whole))

    def stages(self, drive: str) -> tuple[str, ...]:
        """The stages that may be named, the expected one first."""
        return (self.stage if drive == "ops" else self.seen_as, *self.also)


@dataclass(frozen=True)
class Layer:
    """A layer that faults are put into; weights by the last part of their field's name."""

    model: DecoderModel
    index: int

    def weight(self, name: str) -> Tensor | None:
        """A weight as it is stored; None if the family has none of that name."""
        weights = self.model.weights.layers[self.index].named_tensors()
        return next((cast(Tensor, tensor) for field, _, tensor in weights if field.split(".")[-1] == name), None)

    @property
    def rotation(self) -> Tensor:
        """[D, D] fp32."""
        return haar_rotation(self.index, self.model.config.heads.head_dim).float()

    @property
    def last_head(self) -> int:
        return self.model.config.heads.num_kv_heads - 1

    def instead(self, op: str, wrong: Wrong) -> Table:
        """An op that is wrong in this layer alone."""
        return instead(op, wrong, lambda call: call.layer == self.index)

    def weighing(self, name: str, weight: str, wrong: Wrong, also: tuple[str, ...] = ()) -> list[Fault]:
        """`rms_norm` or `linear` by one weight is wrong; none if the family has no such weight."""
        op, target_weight = "rms_norm" if weight.endswith("norm") else "linear", self.weight(weight)
        table = instead(op, wrong, lambda call: call.weight is target_weight)
        return [] if target_weight is None else [Fault(name, self.index, weight, table, also=also)]

    def projecting(self, name: str, weight: str, spoil: Callable[[Tensor], Tensor]) -> list[Fault]:
        """The result of `linear` by one weight is wrong; none if the family has no such weight."""
        return self.weighing(name, weight, lambda call: spoil(call.again()))

    def attending(self, name: str, attend: Wrong, head: int | None = None) -> Fault:
        return Fault(name, self.index, "paged_attention", self.instead("paged_attention", attend), head=head)

    def storing(self, name: str, where: str, store: Wrong, head: int | None = None) -> Fault:
        return Fault(name, self.index, where, self.instead("store_kv", store), head=head)
