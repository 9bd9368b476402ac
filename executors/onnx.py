"""The ONNX executor: the graphs that `tq export` writes, run by ONNX Runtime over the weights and the cache as they lie.

A graph reads the paged cache in place and returns what is to be stored of the new tokens, 66 bytes a vector, which is then
put into its slots: nothing copies the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import onnxruntime as ort
import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.qwen3_14b.onnx.learned import coordinate_values, learned_levels, mixed
from haarkv.models.qwen3_14b.onnx.model import (
    DEFAULT_OPSET,
    FIELDS,
    GraphSpec,
    Sizes,
    build,
    cache_name,
    new_name,
    weight_values,
)
from haarkv.models.qwen3_14b.onnx.model import unsupported as graphs_unsupported
from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.onnx.reads import READS
from haarkv.tq_ops.reference import pad_queries
from haarkv.tq_ops.table import OpTable

_ERRORS = 3  # ONNX Runtime's level from which it logs
_ELEMENTS = {
    torch.uint8: TensorProto.UINT8, torch.float16: TensorProto.FLOAT16, torch.float32: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.BFLOAT16, torch.int32: TensorProto.INT32, torch.int64: TensorProto.INT64,
}  # fmt: skip


@dataclass(frozen=True)
class Provider:
    """Where ONNX Runtime runs a graph.

    Attributes:
        name: ONNX Runtime's word for it.
        package: the Python package that brings it.
        device: where torch keeps tensors for it.
        memory: ONNX Runtime's word for that memory.
    """

    name: str
    package: str
    device: str
    memory: str


PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider", "onnxruntime", "cpu", "cpu"),
    "cuda": Provider("CUDAExecutionProvider", "onnxruntime-gpu", "cuda", "cuda"),
    "cann": Provider("CANNExecutionProvider", "onnxruntime-cann", "npu", "cann"),
}


def open_provider(word: str | None) -> Provider:
    """The provider of that name, the CPU's unless one is named.

    Raises:
        InputError: no such provider, its package is not installed, or torch does not know its memory.
    """
    provider = PROVIDERS.get(word or "cpu")
    if provider is None:
        raise InputError(f"unknown provider {word!r}; choose from {', '.join(PROVIDERS)}")
    if provider.name not in ort.get_available_providers():
        raise InputError(f"this ONNX Runtime has no {provider.name}; pip install {provider.package} in place of onnxruntime")
    device = getattr(torch, provider.device, None)  # torch.npu is there once torch_npu was imported
    if device is None or not device.is_available():
        raise InputError(f"torch has no {provider.device} device, on which the provider {word} keeps the cache")
    return provider


class OnnxExecutor:
    """Runs a model whose cache is `tq4` or learned nibbles.

    Args:
        model: weights and shapes, FP32 or BF16.
        provider: cpu (the default), cuda or cann.
    Raises:
        InputError: a model that no graph can be built for, or as `open_provider`.
    """

    name = "onnx"
    ops = None
    simulated = False
    batches_alike = False
    compiled: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __init__(self, model: DecoderModel, provider: str | None = None) -> None:
        if reason := graphs_unsupported(model.config):
            raise InputError(f"executor onnx cannot run this: {reason}")
        self._provider = open_provider(provider)
        self.config = model.config
        self.device = torch.device(self._provider.device)
        self.description = f"ONNX Runtime {ort.__version__} ({self._provider.name})"
        self._scopes = Qwen3Scopes(model.config, str(model.dtype).removeprefix("torch."))
        there = model.to(self.device)
        self.weights = there.weights
        self._weights = dict(weight_values(there))
        self._sessions: dict[GraphSpec, _Session] = {}
        self._coordinates: dict[tuple[KVFormat, int], dict[str, Tensor]] = {}
        self._lock = threading.Lock()  # a session's tensors are bound, then run: no other thread may bind between

    @staticmethod
    def supports(config: ModelConfig, plan: KVPlan) -> str | None:
        reason = graphs_unsupported(config) or unsupported(READS, plan, config.kv_shapes)
        return reason or mixed(plan, config.heads.head_dim)

    def over(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        token, _, valid = pad_queries(batch)
        every = range(self.config.num_layers)
        sizes = Sizes(tokens=1) if token.shape[1] == 1 else Sizes()
        levels = self._levels(cache, every)
        graph = GraphSpec(every, embed=True, head=False, opset=DEFAULT_OPSET, sizes=sizes, levels=levels)
        hidden = torch.empty(*token.shape, self.config.hidden_size, dtype=self.weights.embedding.dtype, device=self.device)
        self._run(graph, {"input_ids": token_ids[token]}, {"hidden_out": hidden}, batch, cache)
        return hidden[valid]

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        graph = GraphSpec(range(0), embed=False, head=True, opset=DEFAULT_OPSET, sizes=Sizes(tokens=1))
        logits = torch.empty(len(hidden), self.config.vocab_size, device=self.device)
        self._call(self._session(graph), {"hidden": hidden.unsqueeze(1)}, {"logits": logits})
        if not torch.isfinite(logits).all():
            raise NonFiniteError("logits are not finite on onnx; --executor reference on the same prompt names the tensor")
        return logits

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        token, _, valid = pad_queries(batch)
        out = torch.empty_like(hidden[token])
        for layer in span:
            only = range(layer, layer + 1)
            plan = GraphSpec(only, embed=False, head=False, opset=DEFAULT_OPSET, levels=self._levels(cache, only))
            self._run(plan, {"hidden": hidden[token]}, {"hidden_out": out}, batch, cache)
            hidden = out[valid]
        return hidden

    def _run(
        self, plan: GraphSpec, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], batch: Batch, cache: PagedKVCache
    ) -> None:
        """Run a graph on tensors where they lie, and store what it made of the new tokens."""
        _, _, valid = pad_queries(batch)
        past = batch.seq_lens - batch.query_start_loc.diff()
        columns = max(1, -(-int(past.max()) // cache.block_size))
        given = {**inputs, "past_lens": past, "block_table": batch.block_table[:, :columns].clamp(min=0)}
        new: dict[str, Tensor] = {}
        for layer in plan.span:
            for stored, field in _fields(cache, layer).items():
                given[cache_name(layer, stored)] = field
                shape = (*valid.shape, cache.shape(layer).num_kv_heads, *field.shape[3:])
                new[new_name(layer, stored)] = torch.empty(shape, dtype=field.dtype, device=self.device)
        self._call(self._session(plan), given | self._coordinates_of(plan, cache), {**outputs, **new})
        slots = batch.slot_mapping
        vectors = {layer: {stored: new[new_name(layer, stored)][valid] for stored in FIELDS} for layer in plan.span}
        for layer, fields in vectors.items():
            _require_finite(fields, layer, slots)
        block, offset = slots // cache.block_size, slots % cache.block_size
        for layer, fields in vectors.items():
            for stored, field in _fields(cache, layer).items():
                field[block, :, offset] = fields[stored]

    def _levels(self, cache: PagedKVCache, span: range) -> tuple[tuple[int, int], ...]:
        """Learned nibbles of K and V in each layer, as a `GraphSpec` has them."""
        return learned_levels(cache.plan, span, self.config.heads.head_dim)

    def _coordinates_of(self, plan: GraphSpec, cache: PagedKVCache) -> dict[str, Tensor]:
        """Learned coordinates of the layers of a graph, where it wants them; another cache may have others."""
        if not plan.levels:
            return {}
        found: dict[str, Tensor] = {}
        for layer in plan.span:
            for side, kv_format in zip("kv", cache.plan.layers[layer], strict=True):
                key = (kv_format, layer)
                if key not in self._coordinates:
                    values = coordinate_values(layer, side, kv_format, self.config.heads.head_dim)
                    self._coordinates[key] = {name: tensor.to(self.device) for name, tensor in values}
                found |= self._coordinates[key]
        return found

    def _call(self, session: _Session, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        kept = {name: tensor.contiguous() for name, tensor in inputs.items() if name in session.inputs}
        with self._lock:
            self._bind(session.binding.bind_input, kept)
            self._bind(session.binding.bind_output, outputs)
            if self.device.type != "cpu":
                getattr(torch, self.device.type).synchronize()
            session.session.run_with_iobinding(session.binding)
            session.binding.synchronize_outputs()

    def _bind(self, bind: Callable[..., None], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            bind(name, self._provider.memory, 0, _ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def _session(self, plan: GraphSpec) -> _Session:
        """The session of a graph, opened when it is first run. Weights are inputs: all sessions use the model's own memory."""
        with self._lock:
            return self._opened(plan)

    def _opened(self, plan: GraphSpec) -> _Session:
        if plan not in self._sessions:
            options = ort.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.log_severity_level = _ERRORS
            # Planning which buffers can be shared takes time that grows with the square of the nodes, and finds none
            # while sizes are unknown.
            options.enable_mem_reuse = False
            model = build(self._scopes, plan).SerializeToString()
            session = ort.InferenceSession(model, options, providers=[self._provider.name])
            opened = _Session(session, session.io_binding(), {value.name for value in session.get_inputs()})
            self._bind(opened.binding.bind_input, {name: self._weights[name] for name in self._weights.keys() & opened.inputs})
            self._sessions[plan] = opened
        return self._sessions[plan]


@dataclass(frozen=True)
class _Session:
    """An open graph, its weights bound."""

    session: Any
    binding: Any
    inputs: set[str]


def _fields(cache: PagedKVCache, layer: int) -> dict[str, Tensor]:
    """The very tensors that hold a layer, by `FIELDS`."""
    sides = {"k": cache.k_fields(layer), "v": cache.v_fields(layer)}
    return {stored: sides[stored[0]][stored[2:]] for stored in FIELDS}


def _require_finite(vectors: Mapping[str, Tensor], layer: int, slots: Tensor) -> None:
    """Refuse scales [T, Hkv] that a graph has marked.

    Raises:
        NonFiniteError: naming layer, side, token, slot and KV head.
    """
    for side in ("k", "v"):
        bad = torch.isnan(vectors[f"{side}_scale"]).nonzero()
        if len(bad):
            token, head = bad[0].tolist()
            where = f"layer {layer}: {side.upper()} of token {token} of the batch (slot {int(slots[token])}), KV head {head}"
            raise NonFiniteError(f"{where} is not finite")
