"""The ONNX executor: the graphs of `tq export`, run by ONNX Runtime on the model's and the cache's own memory.

A graph reads the paged cache in place and returns what is stored of the new tokens, which is then written to its places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import onnxruntime as ort
import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.qwen3_14b.onnx.model import (
    DEFAULT_OPSET,
    EMPTY_POSITION,
    GraphSpec,
    build,
    cache_name,
    coded_values,
    coded_weights,
    new_name,
    stored_values,
    weight_types,
    weight_values,
)
from haarkv.models.qwen3_14b.onnx.model import unsupported as graphs_unsupported
from haarkv.models.qwen3_14b.onnx.scopes import FIELDS, WINDOW_FIELDS, Qwen3Scopes
from haarkv.models.weights import EMBEDDING
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kernel_support import unsupported
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.onnx import READS
from haarkv.tq_ops.onnx.graph import StoredWeights
from haarkv.tq_ops.weight import Blocks, weight_rows

_PROVIDER = "CPUExecutionProvider"
_ERRORS = 3  # ONNX Runtime's level from which it logs
_ELEMENTS = {
    torch.uint8: TensorProto.UINT8, torch.float16: TensorProto.FLOAT16, torch.float32: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.BFLOAT16, torch.int32: TensorProto.INT32, torch.int64: TensorProto.INT64,
}  # fmt: skip


class OnnxExecutor(Executor):
    """Runs dense models with caches in `tq2` to `tq8` or, for keys, `lr2` to `lr5`, in ONNX Runtime's CPU provider."""

    name = "onnx"

    def __init__(self, model: DecoderModel) -> None:
        self.config, self._model = model.config, model
        self.device = torch.device("cpu")
        self.description = f"ONNX Runtime {ort.__version__} ({_PROVIDER})"
        coded_names = coded_weights(model.weights.named_tensors())
        # A session needs this memory, and packs codes into its own as well.
        self._coded = {
            part: ort.OrtValue.ortvalue_from_numpy(tensor.numpy())
            for name, weight in model.weights.named_tensors()
            if isinstance(weight, Blocks) and name in coded_names and (name != EMBEDDING or model.config.tied)
            for part, tensor in coded_values(name, weight)
        }  # fmt: skip
        self._scopes = Qwen3Scopes(model.config, str(model.dtype).removeprefix("torch."), blocks=coded_names)
        self._weights = dict(weight_values(model))
        self._sessions: dict[GraphSpec, _Session] = {}
        self._lock = threading.Lock()  # no other thread may bind a session's tensors before it runs

    @staticmethod
    def supports(config: ModelConfig, plan: KVPlan) -> str | None:
        return graphs_unsupported(config) or unsupported(READS, plan, config.kv_shapes)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        token, _, valid = batch.rectangle()
        # Each session packs codes for itself: one serves one token and many.
        one_token = token.shape[1] == 1 and not self._coded
        embed = EMBEDDING not in self._scopes.blocks  # else rows are restored from the file
        graph = _graph(cache, range(self.config.num_layers), batch, embed=embed, one_token=one_token)
        inputs = (
            {"input_ids": token_ids[token]} if embed else {"hidden": weight_rows(self.weights.embedding, token_ids)[token]}
        )
        hidden = torch.empty(*token.shape, self.config.hidden_size, dtype=self.weights.embedding.dtype, device=self.device)
        self._run(graph, inputs, {"hidden_out": hidden}, batch, cache)
        return hidden[valid]

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        graph = GraphSpec(range(0), embed=False, head=True, opset=DEFAULT_OPSET, one_token=True)
        logits = torch.empty(len(hidden), self.config.vocab_size, device=self.device)
        self._call(self._session(graph), {"hidden": hidden.unsqueeze(1)}, {"logits": logits})
        if not torch.isfinite(logits).all():
            raise NonFiniteError("logits are not finite on onnx; --executor reference on the same prompt names the tensor")
        return logits

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        token, _, valid = batch.rectangle()
        out = torch.empty_like(hidden[token])
        for layer in span:
            graph = _graph(cache, range(layer, layer + 1), batch)
            self._run(graph, {"hidden": hidden[token]}, {"hidden_out": out}, batch, cache)
            hidden = out[valid]
        return hidden

    def _run(
        self, plan: GraphSpec, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], batch: Batch, cache: PagedKVCache
    ) -> None:
        """Run a graph, and store its new tokens."""
        _, _, valid = batch.rectangle()
        cache.require_room(batch)
        past = batch.seq_lens - batch.query_start_loc.diff()
        columns = max(1, -(-int(past.max()) // cache.block_size))
        feeds = {**inputs, "past_lens": past, "block_table": batch.block_table[:, :columns].clamp(min=0)}
        windows = {layer: _bf16_windows(cache, layer) for layer in plan.span}
        if any(plan.kept):
            feeds |= _window_places(windows[plan.span.start]["k_kept"], batch, past)
        new: dict[str, Tensor] = {}
        for layer in plan.span:
            lead = (*valid.shape, cache.kv[layer].shape.num_kv_heads)
            for name, field in _fields(cache, layer).items():
                feeds[cache_name(layer, name)] = field
                new[new_name(layer, name)] = torch.empty(*lead, *field.shape[3:], dtype=field.dtype, device=self.device)
            for name, side in windows[layer].items():
                feeds[cache_name(layer, name)] = vectors = side.vectors.flatten(0, 2)
                new[new_name(layer, name)] = torch.empty(*lead, vectors.shape[1], dtype=vectors.dtype, device=self.device)
        self._call(self._session(plan), feeds, {**outputs, **new})
        new_rows = {layer: {name: new[new_name(layer, name)][valid] for name in plan.fields} for layer in plan.span}
        slots = batch.slot_mapping
        for layer in plan.span:
            _require_finite(new_rows[layer], layer, slots)
        block, offset = slots // cache.block_size, slots % cache.block_size
        for layer in plan.span:
            for name, field in _fields(cache, layer).items():
                field[block, :, offset] = new_rows[layer][name]
            for name, side in windows[layer].items():
                side.write(new_rows[layer][name], batch)

    def _call(self, session: _Session, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        contiguous = {name: tensor.contiguous() for name, tensor in inputs.items() if name in session.inputs}
        with self._lock:
            self._bind(session.binding.bind_input, contiguous)
            self._bind(session.binding.bind_output, outputs)
            session.session.run_with_iobinding(session.binding)
            session.binding.synchronize_outputs()

    def _bind(self, bind: Callable[..., None], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            bind(name, "cpu", 0, _ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def _session(self, plan: GraphSpec) -> _Session:
        """A graph's session. Dense weights are inputs, the model's memory; codes are constants, or their kernels are slow."""
        with self._lock:
            if plan not in self._sessions:
                self._sessions[plan] = self._open_session(plan)
            return self._sessions[plan]

    def _open_session(self, plan: GraphSpec) -> _Session:
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = _ERRORS
        # Planning shared buffers takes time by the square of the nodes, and finds none while sizes are unknown.
        options.enable_mem_reuse = False
        types = weight_types(self._scopes, plan)
        code_values = {name: value for name, value in self._coded.items() if name in types}
        options.add_external_initializers(list(code_values), list(code_values.values()))
        model = build(self._scopes, plan, StoredWeights("made", dict.fromkeys(code_values, 0))).SerializeToString()
        session = ort.InferenceSession(model, options, providers=[_PROVIDER])
        inputs = {value.name for value in session.get_inputs()}
        every = self._weights | stored_values(self._scopes, plan)
        entry = _Session(session, session.io_binding(), inputs, {name: every[name] for name in every.keys() & inputs})
        self._bind(entry.binding.bind_input, entry.weights)
        return entry


class _Session(NamedTuple):
    session: Any
    binding: Any
    inputs: set[str]
    weights: Mapping[str, Tensor]


def _graph(
    cache: PagedKVCache, span: range, batch: Batch, *, embed: bool = False, one_token: bool = False
) -> GraphSpec:  # fmt: skip
    """The graph of some layers for a cache; with stretches only if a sequence is longer than one."""
    window = _bf16_windows(cache, span.start).get("k_kept")
    long = int(batch.seq_lens.max()) > STRETCH and any(cache.kv[layer].k.kv_format.rope_shift(layer) for layer in span)
    return GraphSpec(
        span, embed=embed, head=False, opset=DEFAULT_OPSET, one_token=one_token,
        formats=cache.plan.layers[span.start : span.stop], kept=(window.tail, window.sink) if window else (0, 0),
        has_stretches=long,
    )  # fmt: skip


def _window_places(window: ResidualWindow, batch: Batch, past: Tensor) -> dict[str, Tensor]:
    """Tokens before this batch that queries may see in BF16: sinks and newest ones; `past` [B] are stored before.

    Returns `kept_index` [B, Hkv, sink + tail] int64 among the vectors of all rows, heads and places, and `kept_positions`
    [B, sink + tail] int32, `EMPTY_POSITION` where there is none, or the tail repeats a sink.
    """
    _, heads, places, _ = window.vectors.shape
    first = torch.arange(window.sink, device=past.device).expand(len(past), -1)
    recent = past.long().unsqueeze(1) - window.tail + torch.arange(window.tail, device=past.device)
    valid = torch.cat([first < past.unsqueeze(1), recent >= window.sink], dim=1)
    positions = torch.cat([first, recent], dim=1)
    head = batch.rows[:, None, None] * heads + torch.arange(heads, device=past.device)[:, None]
    index = head * places + window.places(positions.clamp(min=0)).unsqueeze(1)
    return {"kept_index": index, "kept_positions": positions.masked_fill(~valid, EMPTY_POSITION).to(torch.int32)}


def _bf16_windows(cache: PagedKVCache, layer: int) -> dict[str, ResidualWindow]:
    """A layer's tokens in BF16, if any, by `WINDOW_FIELDS`."""
    return {name: window for name, window in zip(WINDOW_FIELDS, cache.kv[layer].windows, strict=True) if window}


def _fields(cache: PagedKVCache, layer: int) -> dict[str, Tensor]:
    """A layer's own tensors, by `FIELDS`."""
    sides = {"k": cache.kv[layer].k.fields, "v": cache.kv[layer].v.fields}
    return {name: sides[name[0]][name[2:]] for name in FIELDS}


def _require_finite(vectors: Mapping[str, Tensor], layer: int, slots: Tensor) -> None:
    """Raise a NonFiniteError for the first scale [T, Hkv] that a graph has set to NaN."""
    for side in ("k", "v"):
        bad = torch.isnan(vectors[f"{side}_scale"]).nonzero()
        if len(bad):
            token, head = bad[0].tolist()
            where = f"layer {layer}: {side.upper()} of token {token} of the batch (slot {int(slots[token])}), KV head {head}"
            raise NonFiniteError(f"{where} is not finite")
