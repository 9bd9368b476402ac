"""The tensors outside ONNX graphs: which ones a graph wants, their values, and where they lie in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes
from haarkv.models.qwen3_14b.onnx.spec import GraphSpec
from haarkv.models.rope import RopeTable
from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD, layer_tensors
from haarkv.tq_ops.onnx.block_codes import CODES, codes_of, in_codes
from haarkv.tq_ops.onnx.block_products import CodedWeight
from haarkv.tq_ops.onnx.graph import TensorType
from haarkv.tq_ops.weight import Blocks, Weight, dense

ALIGNMENT = 4096  # of each weight in its file: ONNX Runtime then maps it instead of reading it
ROPE_COS, ROPE_SIN = "rope.cos", "rope.sin"


def weight_types(scopes: Qwen3Scopes, plan: GraphSpec) -> dict[str, TensorType]:
    """Every tensor outside a graph: the model's own by their Hugging Face names, rotary tables, what K and V are stored by."""
    config, element = scopes.config, scopes.element
    types: dict[str, TensorType] = {}

    def weight(name: str, shape: tuple[int, ...]) -> dict[str, TensorType]:
        coded = scopes.blocks.get(name)
        if coded is None:
            return {name: TensorType(element, shape)}
        return {part_name(name, part): of for part, of in coded.types.items()}

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
    """Name of a tensor that a weight in codes lies in."""
    return f"{weight}.{part}"


def coded_weights(weights: Iterable[tuple[str, Weight]]) -> dict[str, CodedWeight]:
    """Those that lie in blocks which graphs multiply with, by name."""
    return {
        name: CodedWeight(codes_of(weight), *weight.shape)
        for name, weight in weights
        if isinstance(weight, Blocks) and weight.type.name in CODES
    }


def coded_values(name: str, weight: Blocks) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that a weight in codes lies in."""
    return ((part_name(name, part), tensor) for part, tensor in in_codes(weight).items())


def weight_values(model: DecoderModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that graphs of the model want but `coded_weights` and what K and V are stored by: of dense
    weights the very tensors."""
    coded = coded_weights(model.weights.named())
    weights = ((name, dense(weight)) for name, weight in model.weights.named() if name not in coded)
    return chain(weights, rope_values(model.ropes[model.config.common.attention.rope]))


def rope_values(rope: RopeTable) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the rotary tables."""
    return zip((ROPE_COS, ROPE_SIN), rope.whole(), strict=True)


def stored_values(scopes: Qwen3Scopes, plan: GraphSpec, device: torch.device) -> dict[str, Tensor]:
    """By name, what K and V are stored by in the layers of a graph."""
    found: dict[str, Tensor] = {}
    for layer in plan.span:
        found |= plan.scopes(scopes, layer).stored_values(layer, device)
    return found


def offsets_of(types: dict[str, TensorType]) -> dict[str, int]:
    """Where each weight begins in the file that holds them all."""
    offsets, end = {}, 0
    for name, of in types.items():
        offsets[name] = end
        end += -(-of.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets
