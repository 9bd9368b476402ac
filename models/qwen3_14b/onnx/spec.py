"""What goes into one ONNX model, as data; names of its inputs and outputs; its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig, unknown_layer
from haarkv.models.qwen3_14b.onnx.scopes import FIELDS, WINDOW_FIELDS, Qwen3Scopes
from haarkv.models.rope import RopeTable
from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD, layer_tensors
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.onnx.block_codes import CODES, in_codes, weight_codes
from haarkv.tq_ops.onnx.block_products import CodedWeight
from haarkv.tq_ops.onnx.graph import TensorType
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
        metadata: kept in the model.
        formats: K's and V's in each layer of the span; those of the scopes if empty.
        kept: tokens that a query sees in BF16: the newest, itself among them, and the first ones.
        has_stretches: texts may be longer than a stretch, so that learned keys are stored turned back.
    """

    span: range
    embed: bool
    head: bool
    opset: int
    one_token: bool = False
    metadata: tuple[tuple[str, str], ...] = ()
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
        types |= dict(plan.scopes(scopes, layer).stored_by(layer).values())
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


def stored_values(scopes: Qwen3Scopes, plan: GraphSpec, device: torch.device) -> dict[str, Tensor]:
    """Rotations and coordinates of K and V in the layers of a graph."""
    values: dict[str, Tensor] = {}
    for layer in plan.span:
        values |= plan.scopes(scopes, layer).stored_values(layer, device)
    return values


def weight_offsets(types: dict[str, TensorType]) -> dict[str, int]:
    """Byte offset of each weight in its file."""
    offsets, end = {}, 0
    for name, tensor_type in types.items():
        offsets[name] = end
        end += -(-tensor_type.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets
