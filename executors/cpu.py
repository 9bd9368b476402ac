"""The CPU executor: the reference's forward over the op table in C++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import Layer, ModelConfig, unknown_part
from haarkv.models.tensors import LayerWeights
from haarkv.tq_ops.cpu.calls import has_kernel
from haarkv.tq_ops.cpu.layers import FEW, Dense, DenseLayers
from haarkv.tq_ops.cpu.layout import READS
from haarkv.tq_ops.cpu.library import BLOCKS
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kernel_support import unsupported
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.memory import keep_freed_memory
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Blocks


@dataclass(frozen=True)
class _OnKernels(DecoderModel):
    """A model of which few tokens take the dense layers in one call, unless ops are wrapped."""

    whole: DenseLayers | None = None

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        if self.whole is None or not isinstance(ops, CpuOps) or len(hidden) > FEW:
            return super().layers(hidden, span, batch, cache, ops)
        ropes = tuple(self.rope_at(batch.positions).values())
        for in_one, part in self.whole.parts(span, cache):
            done = self.whole.run(hidden, part, batch, cache, ropes) if in_one else None
            hidden = super().layers(hidden, part, batch, cache, ops) if done is None else done
        return hidden


class CpuExecutor(ReferenceExecutor):
    """Runs a model in its dtype; a KernelsMissingError without the compiled kernels.

    A layer whose K or V has a format that the kernels do not read (`READS`) stores and attends by the reference's ops, slowly.
    From the first one on, the process keeps freed memory (`keep_freed_memory`).

    Args:
        isa: the instruction set of its kernels, the CPU's best unless given; InputError if it is not there.
    """

    name = "cpu"
    blocks = BLOCKS

    def __init__(self, model: DecoderModel, isa: str | None = None) -> None:
        keep_freed_memory()
        self._kernels = CpuOps(isa)
        rounds_activations = any(
            isinstance(weight, Blocks) and weight.x_bits == 8 for _, weight in model.weights.named_tensors()
        )
        self.description = f"C++ kernels ({self._kernels.isa}) on the CPU{', activations of 8 bits' * rounds_activations}"
        super().__init__(_on_kernels(model, self._kernels), self._kernels)

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        with self._kernels.alone():
            return super().layers(hidden, span, batch, cache)

    def _finite(self, run: Callable[[OpTable], Tensor]) -> Tensor:
        with self._kernels.alone():
            return super()._finite(run)

    @property
    def whole(self) -> DenseLayers | None:
        """The layers that run in one call; None where each op is a call."""
        return self._model.whole if isinstance(self._model, _OnKernels) else None

    @staticmethod
    def supports(config: ModelConfig, plan: KVPlan) -> str | None:
        return unsupported(READS, plan, config.kv_shapes, others=True)

    def batch_invariant(self, plan: KVPlan) -> bool:
        return unsupported(READS, plan, self.config.kv_shapes) is None


def _on_kernels(model: DecoderModel, ops: CpuOps) -> DecoderModel:
    layers = [_dense(model, layer, weights) for layer, weights in zip(model.config.layers, model.weights.layers, strict=True)]
    whole = DenseLayers(ops, layers) if model.ranks.size == 1 and any(layers) else None
    return _OnKernels(model.config, model.weights, model.ropes, model.ranks, whole)


_KNOWS = ("head_norms", "bias", "window", "activation", "plus_one", "post_norms")


def _dense(model: DecoderModel, layer: Layer, weights: LayerWeights) -> Dense | None:
    """A layer for `DenseLayers`; None if it declares what that does not know, or its tensors lie otherwise."""
    tensors = {field: weight for field, _, weight in weights.named_tensors()}
    if unknown_part(layer, _KNOWS) or not all(map(has_kernel, tensors.values())):
        return None
    norms = {weight.dtype for field, weight in tensors.items() if field.endswith("norm")}
    others = {weight.dtype for field, weight in tensors.items() if not field.endswith("norm")}
    if norms not in ({torch.float32}, {torch.bfloat16}) or others != {model.dtype}:
        return None
    if not all(isinstance(weight, Blocks) or weight.is_contiguous() for weight in tensors.values()):
        return None
    mixer = layer.attention
    return Dense(
        tensors, mixer.num_heads, layer.norm.eps, mixer.scale, gelu=layer.mlp.activation == "gelu_tanh",
        rope=list(model.ropes).index(mixer.rope),
    )  # fmt: skip
