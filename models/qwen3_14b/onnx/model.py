"""Whole ONNX models: what goes into one as data, its names and weights; then embedding, a span of layers and head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import onnx
from onnx import TensorProto
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig, unknown_layer
from haarkv.models.qwen3_14b.onnx.levels import graph_name
from haarkv.models.qwen3_14b.onnx.scopes import EMBEDDING_FIELD, FIELDS, HEAD_FIELD, WINDOW_FIELDS, Qwen3Scopes
from haarkv.models.rope import RopeTable
from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD, layer_tensors
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.onnx.block_codes import CODES, in_codes, weight_codes
from haarkv.tq_ops.onnx.block_products import CodedWeight
from haarkv.tq_ops.onnx.graph import Graph, StoredWeights, TensorType
from haarkv.tq_ops.weight import Blocks, Weight, dense

DEFAULT_OPSET = 23
OLDEST_OPSET = 15  # the first whose models may hold functions
NEWEST_OPSET = 26  # the newest that ONNX Runtime 1.31 reads


@dataclass(frozen=True)
class GraphSpec:
    """What goes into one model.

    Attributes:
        span: layers, by their index in the whole model; none for a head alone.
        embed, head: begin with token ids, end with logits, instead of hidden states.
        opset: version of the standard operators.
        one_token: of each sequence there is one new token; else their number is an input's size.
        formats: K's and V's in each layer of the span; those of the scopes if empty.
        kept: tokens that a query sees in BF16: the newest, itself among them, and the first ones.
        has_stretches: texts may be longer than a stretch, so that learned keys are stored turned back.
    """

    span: range
    embed: bool
    head: bool
    opset: int
    one_token: bool = False
    formats: tuple[tuple[KVFormat, KVFormat], ...] = ()
    kept: tuple[int, int] = (0, 0)
    has_stretches: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """What each layer stores, in order."""
        return FIELDS + WINDOW_FIELDS * any(self.kept)

    def scopes(self, scopes: Qwen3Scopes, layer: int) -> Qwen3Scopes:
        """Of one layer of the span."""
        scopes = scopes.for_layer(layer)
        if not self.formats:
            return scopes
        k, v = self.formats[layer - self.span.start]
        turns = k.rope_shift(layer) if self.has_stretches else None
        return replace(scopes, k=k, v=v, rope_pairs=len(turns.inv_freq) if turns else 0)


def unsupported(config: ModelConfig) -> str | None:
    """None, or in one sentence why there are no graphs of such a model."""
    if other := unknown_layer(config, ("head_norms", "bias")):
        return f"its graphs are those of plain dense layers, and {other}"
    if len(set(config.layers)) > 1 or config.embedding_scale != 1 or config.final_norm != config.layers[0].norm:
        return "one function serves all layers of its graphs, and this model's differ"
    return None


def cache_name(layer: int, cache_field: str) -> str:
    """The input that is a layer's stored field."""
    return f"layers.{layer}.{cache_field}"


def new_name(layer: int, cache_field: str) -> str:
    """The output that is the same field of the new tokens."""
    return f"layers.{layer}.new_{cache_field}"


def require_opset(opset: int) -> None:
    """Refuse an opset without functions, or newer than ONNX Runtime or the onnx package."""
    newest = min(onnx.defs.onnx_opset_version(), NEWEST_OPSET)
    if not OLDEST_OPSET <= opset <= newest:
        raise InputError(f"there is no opset {opset} to write; choose one of {OLDEST_OPSET} … {newest}")


ALIGNMENT = 4096  # of each weight in its file: ONNX Runtime then maps it instead of reading it
ROPE_COS, ROPE_SIN = "rope.cos", "rope.sin"


def weight_types(scopes: Qwen3Scopes, plan: GraphSpec) -> dict[str, TensorType]:
    """Every tensor outside a graph: weights by Hugging Face's names, rotary tables, rotations and coordinates of K and V."""
    config, element = scopes.config, scopes.element
    types: dict[str, TensorType] = {}

    def weight(name: str, shape: tuple[int, ...]) -> dict[str, TensorType]:
        coded_weight = scopes.blocks.get(name)
        if coded_weight is None:
            return {name: TensorType(element, shape)}
        return {part_name(name, part): part_type for part, part_type in coded_weight.types.items()}

    outer = (config.vocab_size, config.hidden_size)
    if plan.embed or (plan.head and config.tied):
        types |= weight(EMBEDDING, outer)
    tables = TensorType(TensorProto.FLOAT, (config.max_position_embeddings, config.heads.head_dim // 2))
    types |= {ROPE_COS: tables, ROPE_SIN: tables}
    for layer in plan.span:
        for tensor in layer_tensors(config, layer).values():
            types |= weight(tensor.name, tensor.shape)
        stored = plan.scopes(scopes, layer).stored(layer)
        types |= {name: TensorType(TensorProto.FLOAT, tuple(tensor.shape)) for name, tensor in stored.values()}
    if plan.head:
        types[FINAL_NORM] = TensorType(element, (config.hidden_size,))
        if not config.tied:
            types |= weight(HEAD, outer)
    return types


def part_name(weight: str, part: str) -> str:
    """A tensor of a weight in codes."""
    return f"{weight}.{part}"


def coded_weights(weights: Iterable[tuple[str, Weight]]) -> dict[str, CodedWeight]:
    """Weights in blocks that graphs multiply with, by name."""
    return {
        name: CodedWeight(weight_codes(weight), *weight.shape)
        for name, weight in weights
        if isinstance(weight, Blocks) and weight.type.name in CODES
    }


def coded_values(name: str, weight: Blocks) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a weight in codes."""
    return ((part_name(name, part), tensor) for part, tensor in in_codes(weight).items())


def weight_values(model: DecoderModel) -> Iterator[tuple[str, Tensor]]:
    """Weights but `coded_weights`, and rotary tables; dense weights are the model's own tensors."""
    coded_by_name = coded_weights(model.weights.named_tensors())
    weights = ((name, dense(weight)) for name, weight in model.weights.named_tensors() if name not in coded_by_name)
    return chain(weights, rope_values(model.ropes[model.config.common.attention.rope]))


def rope_values(rope: RopeTable) -> Iterator[tuple[str, Tensor]]:
    """The rotary tables."""
    return zip((ROPE_COS, ROPE_SIN), rope.whole(), strict=True)


def stored_values(scopes: Qwen3Scopes, plan: GraphSpec) -> dict[str, Tensor]:
    """Rotations and coordinates of K and V in the layers of a graph."""
    values: dict[str, Tensor] = {}
    for layer in plan.span:
        values |= plan.scopes(scopes, layer).stored(layer).values()
    return values


def weight_offsets(types: dict[str, TensorType]) -> dict[str, int]:
    """Byte offset of each weight in its file."""
    offsets, end = {}, 0
    for name, tensor_type in types.items():
        offsets[name] = end
        end += -(-tensor_type.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets


# -- Building one --------------------------------------------------------------------------------------------------------

EMPTY_POSITION = np.iinfo(np.int32).max
"""The position of a token that is not there: no query sees it."""
_FLOAT, _INT32, _INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


def build(scopes: Qwen3Scopes, plan: GraphSpec, weight_file: StoredWeights | None = None) -> onnx.ModelProto:
    """One model, whose weights are in `weight_file` or else inputs."""
    return _Model(scopes, plan).build(weight_file)


class _Model:
    def __init__(self, scopes: Qwen3Scopes, plan: GraphSpec) -> None:
        self.scopes, self.config, self.plan = scopes, scopes.config, plan
        self.g = Graph(plan.opset)
        self.types = weight_types(scopes, plan)
        formats = {kv_format for pair in plan.formats for kv_format in pair}
        if len({graph_name(kv_format, self.config.heads.head_dim) for kv_format in formats}) < len(formats):
            raise ValueError("two formats of one graph have the same name, which its functions go by")
        self.group = self.config.heads.num_heads // self.config.heads.num_kv_heads

    def build(self, weight_file: StoredWeights | None) -> onnx.ModelProto:
        inputs, outputs = self.interface()
        begin = "input_ids" if self.plan.embed else "hidden"
        hidden = self._embed() if self.plan.embed else self.g.reshape("rows", "hidden", [-1, self.config.hidden_size])
        shared = self._shared(begin) if self.plan.span else {}
        for layer in self.plan.span:
            hidden = self._layer(layer, hidden, shared)
        self._finish(hidden, begin)
        name = f"{self.config.model_type} layers {self.plan.span.start} to {self.plan.span.stop - 1}"
        return self.g.model(name, inputs, outputs, weight_file)

    def interface(self) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
        config, tokens = self.config, 1 if self.plan.one_token else "tokens"
        heads = config.heads.num_kv_heads
        states = TensorType(self.scopes.element, ("batch", tokens, config.hidden_size))
        inputs = {"input_ids": TensorType(_INT64, ("batch", tokens))} if self.plan.embed else {"hidden": states}
        if self.plan.span:
            inputs |= {"past_lens": TensorType(_INT32, ("batch",)), "block_table": TensorType(_INT32, ("batch", "columns"))}
        if any(self.plan.kept):
            count = sum(self.plan.kept)
            inputs["kept_index"] = TensorType(_INT64, ("batch", heads, count))
            inputs["kept_positions"] = TensorType(_INT32, ("batch", count))
        if self.plan.head and not self.plan.one_token:
            inputs["last_rows"] = TensorType(_INT32, ("batch",))
        ends = {"logits": TensorType(_FLOAT, ("batch", config.vocab_size))}
        outputs = ends if self.plan.head else {"hidden_out": states}
        for layer in self.plan.span:
            for cache_field in self.plan.fields:
                last, element = self._field(layer, cache_field)
                shape: tuple[int | str, ...] = ("blocks", heads, "block_size", *last)
                shape = ("kept", *last) if cache_field in WINDOW_FIELDS else shape
                inputs[cache_name(layer, cache_field)] = TensorType(element, shape)
                outputs[new_name(layer, cache_field)] = TensorType(element, ("batch", tokens, heads, *last))
        return inputs, outputs

    def _field(self, layer: int, cache_field: str) -> tuple[tuple[int, ...], int]:
        """Shape of one vector's field, and its element type."""
        if cache_field in WINDOW_FIELDS:
            return (self.config.heads.head_dim,), TensorProto.BFLOAT16
        if cache_field.endswith("scale"):
            return (), TensorProto.FLOAT16
        return (self.plan.scopes(self.scopes, layer).code_bytes(cache_field[0]),), TensorProto.UINT8

    def _weight(self, name: str) -> str:
        return self.g.weight(name, self.types[name])

    def _matrix(self, field: str, name: str) -> dict[str, str]:
        """A weight, or its parts, as `Qwen3Scopes` takes them."""
        coded_weight = self.scopes.blocks.get(name)
        if coded_weight is None:
            return {f"{field}.weight": self._weight(name)}
        return {f"{field}.weight.{part}": self._weight(part_name(name, part)) for part in coded_weight.types}

    def _outer(self, field: str, name: str) -> tuple[Qwen3Scopes, dict[str, str]]:
        """The scopes for a matrix outside all layers, and the matrix."""
        coded_weight = self.scopes.blocks.get(name)
        return replace(self.scopes, layer_blocks={field: coded_weight} if coded_weight else {}), self._matrix(field, name)

    def _embed(self) -> str:
        ids = self.g.reshape("token_rows", "input_ids", [-1])
        scopes, w = self._outer(EMBEDDING_FIELD, EMBEDDING)
        return scopes.embed_rows(self.g, ids, w)

    def _shared(self, begin: str) -> dict[str, str]:
        """What all layers share: which query sees which token, rotary tables at the tokens' positions, shapes."""
        g, last = self.g, self.config.max_position_embeddings - 1
        steps, by_head, slots, q_shape, kv_shape = self._shapes(begin)
        past = g.reshape("past_column", "past_lens", [-1, 1])
        after = g.node("past_and_step", "Add", past, steps)
        empty_position = g.scalar(EMPTY_POSITION, np.int32)
        slot_position = g.node("slot_position", "Where", g.node("slot_holds", "Less", slots, past), slots, empty_position)
        keys = g.reshape("key_position", g.node("positions", "Concat", slot_position, after, axis=1), [0, 1, 1, -1])
        queries = g.reshape("query_position", g.node("past_and_row", "Add", past, by_head), [0, 1, -1, 1])
        visible = g.node("visible", "GreaterOrEqual", queries, keys)
        is_stored = g.node("stored", "Less", keys, empty_position)
        # Padding may stand behind the last position.
        last_one = g.scalar(last, np.int32)
        position = g.node("position", "Where", g.node("is_before_last", "Less", after, last_one), after, last_one)
        cos, sin = (
            g.reshape(name, g.node(f"{name}_rows", "Gather", self._weight(table), position), [0, 0, 1, -1])
            for name, table in (("cos", ROPE_COS), ("sin", ROPE_SIN))
        )
        shared = {
            "block_table": "block_table", "visible": visible, "stored": is_stored, "cos": cos, "sin": sin,
            "q_shape": q_shape, "kv_shape": kv_shape,
        }  # fmt: skip
        if self.plan.has_stretches:
            shared |= self._stretches(position)
        return shared | self._window_inputs(visible, keys, queries, after) if any(self.plan.kept) else shared

    def _stretches(self, position: str) -> dict[str, str]:
        """Keys in stretches: `stretch` [B, Q] int32 of new tokens, and what `by_stretches` takes."""
        g = self.g
        stretch = g.node("stretch", "Div", position, g.scalar(STRETCH, np.int32))
        whole, zero, one = g.scalar(STRETCH, np.int64), g.scalar(0, np.int64), g.scalar(1, np.int64)
        before = g.node("whole_stretches", "Div", g.node("last_slot", "Sub", "slots_int64", one), whole)
        count = g.node("stretch_count", "Add", before, one)
        numbers = g.node("stretch_numbers", "Range", zero, count, one)
        # Slots of the last block may lie behind the last position.
        last = g.scalar((self.config.max_position_embeddings - 1) // STRETCH, np.int64)
        tokens = g.node("slots_and_tokens", "Add", "slots_int64", "tokens_int64")
        fill = g.node("fill_count", "Sub", g.node("slots_of_stretches", "Mul", count, whole), tokens)
        return {
            "stretch": stretch, "stretches": g.node("stretches", "Min", numbers, last),
            "slots_end": g.reshape("slots_end", "slots_int64", [1]), "fill": g.reshape("fill", fill, [1]),
        }  # fmt: skip

    def _window_inputs(self, visible: str, keys: str, queries: str, after: str) -> dict[str, str]:
        """Tokens in BF16 are columns behind the packed ones: a query sees each token in one of both."""
        g, (tail, sink) = self.g, self.plan.kept
        both = g.node("kept_and_new", "Concat", "kept_positions", after, axis=1)
        key_positions = g.reshape("kept_key_position", both, [0, 1, 1, -1])
        older = g.node("newest_packed", "Sub", queries, g.scalar(tail, np.int32))

        def exact(name: str, key: str) -> str:
            recent = g.node(f"{name}_is_recent", "Greater", key, older)
            return g.node(f"{name}_is_kept", "Or", recent, g.node(f"{name}_is_first", "Less", key, g.scalar(sink, np.int32)))

        packed = g.node("visible_packed", "And", visible, g.node("not_kept", "Not", exact("packed", keys)))
        is_seen = g.node("kept_is_seen", "GreaterOrEqual", queries, key_positions)
        in_bf16 = g.node("visible_kept", "And", is_seen, exact("kept", key_positions))
        is_held = g.node(
            "kept_held", "Less", g.reshape("kept_rows", key_positions, [0, 1, -1, 1]), g.scalar(EMPTY_POSITION, np.int32)
        )
        every = g.node("visible_all", "Concat", packed, in_bf16, axis=3)
        return {"visible": every, "kept_index": "kept_index", "kept_stored": is_held}

    def _shapes(self, begin: str) -> tuple[str, str, str, str, str]:
        """Steps [1, Q], steps by query head of a KV head [1, G * Q], slots [S], shapes of Q and of K and V."""
        g, config = self.g, self.config
        lead = g.node("batch_and_tokens", "Shape", begin, start=0, end=2)
        count = g.node("tokens", "Cast", g.node("tokens_int64", "Gather", lead, g.scalar(1, np.int64)), to=_INT32)
        zero, one = g.scalar(0, np.int32), g.scalar(1, np.int32)
        steps = g.reshape("steps", g.node("step", "Range", zero, count, one), [1, -1])
        codes = g.node("codes_shape", "Shape", cache_name(self.plan.span.start, "k_codes"))
        block_size = g.node("block_size_int64", "Gather", codes, g.scalar(2, np.int64))
        columns = g.node("columns_int64", "Gather", g.node("table_shape", "Shape", "block_table"), g.scalar(1, np.int64))
        total = g.node("slot_count", "Cast", g.node("slots_int64", "Mul", columns, block_size), to=_INT32)
        q_shape, kv_shape = (
            g.node(name, "Concat", lead, g.integers([heads, config.heads.head_dim]), axis=0)
            for name, heads in (("q_shape", config.heads.num_heads), ("kv_shape", config.heads.num_kv_heads))
        )
        by_head = g.node("steps_by_head", "Tile", steps, g.integers([1, self.group]))
        return steps, by_head, g.node("slots", "Range", zero, total, one), q_shape, kv_shape

    def _layer(self, layer: int, hidden: str, shared: dict[str, str]) -> str:
        tensors = layer_tensors(self.config, layer)
        weights = {
            word: weight for field, tensor in tensors.items() for word, weight in self._matrix(field, tensor.name).items()
        }
        fields = {cache_field: cache_name(layer, cache_field) for cache_field in self.plan.fields}
        scopes = self.plan.scopes(self.scopes, layer)
        by = {word: self._weight(name) for word, (name, _) in scopes.stored(layer).items()}
        hidden, *new = self.g.call(
            f"layers.{layer}", f"DecoderLayer{scopes.suffix}{scopes.weights_suffix}", scopes.layer,
            hidden=hidden, **fields, **shared, **by,
            **weights,
        )  # fmt: skip
        for cache_field, value in zip(self.plan.fields, new, strict=True):
            shape = self._field(layer, cache_field)[0]
            self.g.reshape(new_name(layer, cache_field), value, [0, 0, self.config.heads.num_kv_heads, *shape])
        return hidden

    def _finish(self, hidden: str, begin: str) -> None:
        g, config = self.g, self.config
        if not self.plan.head:
            lead = g.integers([-1, 1]) if self.plan.one_token else "batch_and_tokens"
            out = g.node("hidden_shape", "Concat", lead, g.integers([config.hidden_size]), axis=0)
            g.node("hidden_out", "Reshape", hidden, out)
            return
        rows = hidden if self.plan.one_token else g.node("last_hidden", "Gather", hidden, "last_rows")
        norm = self._weight(FINAL_NORM)
        scopes, w = self._outer(HEAD_FIELD, EMBEDDING if config.tied else HEAD)
        scopes.head(g, rows, norm, w)
