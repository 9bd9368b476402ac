"""The CUDA executor: dense layers over fused ops, others over the Triton op table; decode steps captured as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.executors.cuda_graph import DecodeStep, bucket_of
from haarkv.executors.non_finite import blame, not_finite_among_ranks
from haarkv.models import fused
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.models.weights import LayerWeights, Weights
from haarkv.tq_ops.cuda.available import triton_missing
from haarkv.tq_ops.cuda.layout import NO_FAULT, READS, layout_of
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.table import OpTable, with_ops


class _Forwards(NamedTuple):
    """A model's forwards, their ops chosen."""

    prefill: Callable[[Tensor, Batch, PagedKVCache], Tensor]
    decode: Callable[[Tensor, Batch, PagedKVCache], Tensor]
    layers: Callable[[Tensor, range, Batch, PagedKVCache], Tensor]
    verify: Callable[[Tensor, Batch, PagedKVCache], Tensor]


class CudaExecutor:
    """Runs a model on one NVIDIA GPU, in bf16 or fp32, with a cache that `READS` takes.

    A dense model on one rank runs as `models.fused` does, in few launches; on several ranks its layers run op by op over
    `step_ops`, with the same rounding points.

    Nothing inside a step waits for the device. What is not finite is left out of the cache, noted on the device and looked
    for when the step is over; the forward is then run again, op by op, and the error names the weight.

    Args:
        model: weights and shapes.
        device: `cuda` or `cuda:N`; the first GPU unless given.
        folded: a plan whose V rotations are multiplied into the output projections as the model is loaded, which saves the
            rotation back at the end of attention and rounds those weights once more. Only its caches can be run then.
        interpreted: run on the CPU, in Triton's interpreter: for tests, on machines without a GPU.
    Attributes:
        ops: the table for single ops, which the validator replays; what a fused layer makes is judged as a whole.
        step_ops: its table as a step runs it: `store_kv` does not wait to look for faults, so that a graph can hold it.
    Raises:
        InputError: no GPU, no such GPU, or no Triton; or a folded plan whose V has learned coordinates.
    """

    name = "cuda"
    batches_alike = False
    compiled: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __init__(
        self, model: DecoderModel, device: str | None = None, *, folded: KVPlan | None = None, interpreted: bool = False
    ) -> None:
        self.device = torch.device("cpu") if interpreted else open_gpu(device)
        if reason := triton_missing():
            raise InputError(f"executor cuda cannot run this: {reason}")
        from haarkv.tq_ops.cuda import nvrtc, ops
        from haarkv.tq_ops.cuda.fused import CudaFused

        self.config = model.config
        self.ops: OpTable = cast(OpTable, ops)
        name = "Triton's interpreter" if interpreted else torch.cuda.get_device_name(self.device)
        slower = None if interpreted else nvrtc.missing()
        self.description = f"cuda ({name})" if slower is None else f"cuda ({name}; decode attention by Triton: {slower})"
        self.simulated = interpreted
        self._folded = folded
        self._fault = ops.new_fault(self.device)
        self._raise_fault = partial(ops.raise_fault, self._fault)
        self._careful_ops = with_ops(self.ops, {"paged_attention": ops.attend_rotated} if folded else {})
        self.step_ops: OpTable = with_ops(self._careful_ops, {"store_kv": partial(ops.append, fault=self._fault)})
        if model.ranks.size == 1 and fused.unsupported(model.config) is None:
            whole = fused.fuse(model, self.device)
            self._model = fold_rotations(whole.model, folded) if folded else whole.model
            self._run = _bound(replace(whole, model=self._model), CudaFused(self._fault, rotate_back=not folded))
        else:
            self._model = model.to(self.device)
            if folded:
                self._model = fold_rotations(self._model, folded)
            self._run = _bound(self._model, self.step_ops)
        # A graph that holds sums over ranks was never tried: with several, steps are launched op by op.
        graphs = self.device.type == "cuda" and self._model.ranks.size == 1
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._steps: WeakKeyDictionary[PagedKVCache, dict[int, DecodeStep]] = WeakKeyDictionary()

    @property
    def weights(self) -> Weights:
        return self._model.weights

    def supports(self, config: DecoderConfig, plan: KVPlan) -> str | None:
        if self._folded and [v for _, v in plan.layers] != [v for _, v in self._folded.layers]:
            return "its output projections hold the rotations of another plan"
        return self.unsupported(config, plan)

    @staticmethod
    def unsupported(config: DecoderConfig, plan: KVPlan) -> str | None:
        """As `supports`, before there is a model."""
        if config.num_experts:
            return "its decode steps are graphs, which cannot choose experts as they run"
        return unsupported(READS, plan, config.head_dim)

    def over(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        cache.require_room(batch)
        with self._current():
            logits = self._run.prefill(token_ids, batch, cache)
            return self._checked(logits, self._all_sound(logits), partial(self._model.prefill, token_ids, batch, cache))

    @torch.inference_mode()
    def verify(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        cache.require_room(batch)
        with self._current():
            logits = self._run.verify(token_ids, batch, cache)
            return self._checked(logits, self._all_sound(logits), partial(self._model.verify, token_ids, batch, cache))

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        steps = self._steps.setdefault(cache, {})
        size = bucket_of(len(token_ids))
        with self._current():
            if size not in steps:
                steps[size] = DecodeStep(size, cache, self.config.max_position_embeddings, self._step_on(cache), self._pool)
            logits, sound = steps[size](token_ids, batch)
            return self._checked(logits.clone(), sound, partial(self._model.decode, token_ids, batch, cache))

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        with self._current():
            hidden = self._run.layers(hidden, span, batch, cache)
            self._raise_fault(cache, batch)
            return hidden

    def _current(self) -> AbstractContextManager[object]:
        """Its GPU as the current one meanwhile: Triton's launches, streams and graphs are the current one's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _step_on(self, cache: PagedKVCache) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
        def step(token_ids: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            logits = self._run.decode(token_ids, batch, cache)
            return logits, self._all_sound(logits)

        return step

    def _all_sound(self, logits: Tensor) -> Tensor:
        return (self._fault[0] == NO_FAULT) & torch.isfinite(logits).all()

    def _checked(self, logits: Tensor, sound: Tensor, rerun: Callable[[OpTable], object]) -> Tensor:
        """The logits of a step that is over, or the error that names what is not finite in it."""
        if bool(sound):
            return logits
        self._fault.fill_(NO_FAULT)
        if self._model.ranks.size > 1:
            raise not_finite_among_ranks()
        raise blame(self._model.weights, self._careful_ops, rerun)


def _bound(model: Any, ops: Any) -> _Forwards:
    """The forwards of a `DecoderModel` over an op table, or of a `FusedModel` over fused ops."""
    return _Forwards(*(partial(getattr(model, name), ops=ops) for name in _Forwards._fields))


def open_gpu(device: str | None) -> torch.device:
    """The GPU that a name means.

    Raises:
        InputError: it is no GPU's name, or there is no such GPU.
    """
    kind, _, number = (device or "cuda").partition(":")
    if kind != "cuda" or not (number.isdecimal() or (not number and ":" not in (device or ""))):
        raise InputError(f"executor cuda runs on cuda or cuda:N, not on {device!r}")
    count = torch.cuda.device_count()
    if not count:
        raise InputError("executor cuda needs an NVIDIA GPU and a PyTorch built for it; this machine has none")
    if int(number or 0) >= count:
        raise InputError(f"there is no cuda:{number}; this machine has {count} GPU{'s' * (count > 1)}")
    return torch.device("cuda", int(number or 0))


def fold_rotations(model: DecoderModel, plan: KVPlan) -> DecoderModel:
    """The model whose output projections rotate V back: `o_proj_h @ rotation` for each query head h.

    Attention's rotated output y stands for `y @ rotation.T`, so `(y @ rotation.T) @ o_proj_h.T = y @ (o_proj_h @ rotation).T`.

    Rounding points: the product in FP32, rounded once to the weight's dtype: 2**-9 of each BF16 weight. The rotation's own
    BF16 entries are not exactly orthogonal, which it inherits as the rotation back does.

    Raises:
        InputError: V of a layer is in learned coordinates, whose way back has a mean as well.
    """
    config = model.config

    def folded(layer: LayerWeights, index: int) -> LayerWeights:
        of_v = layout_of(plan.v(index), index, config.head_dim, layer.o_proj.device)
        if of_v.learned:
            raise InputError(
                f"layer {index}: V in {plan.v(index).name} has learned coordinates, which output projections cannot hold; "
                "run this plan with projections as they are"
            )
        rotation = of_v.rotation.float()
        heads = layer.o_proj.float().view(-1, config.num_heads, config.head_dim)
        o_proj = (heads @ rotation).flatten(1).to(layer.o_proj.dtype)
        return layer.changed(lambda field, tensor: o_proj if field == "o_proj" else tensor)

    layers = tuple(folded(layer, index) for index, layer in enumerate(model.weights.layers))
    return replace(model, weights=replace(model.weights, layers=layers))
