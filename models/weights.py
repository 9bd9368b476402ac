"""A model's weights: which tensors a declared layer has, their names in a checkpoint, and how they are cut between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import Dense, Layer, ModelConfig
from haarkv.models.layer import mixer_kind
from haarkv.models.tensors import Axis, LayerWeights, StoredTensor
from haarkv.tq_ops.weight import Weight, backing_tensor

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = "model.layers.{}.{}"


@dataclass(frozen=True)
class Weights:
    """A whole model; `lm_head` is `embedding` itself where the head is tied."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Weight

    def named(self) -> Iterator[tuple[str, Weight]]:
        """(Hugging Face name, tensor as it is stored) in the order in which a forward meets them."""
        yield EMBEDDING, self.embedding
        for index in range(len(self.layers)):
            yield from self.of_layer(index)
        yield FINAL_NORM, self.final_norm
        if self.lm_head is not self.embedding:
            yield HEAD, self.lm_head

    def of_layer(self, index: int) -> Iterator[tuple[str, Weight]]:
        """(Hugging Face name, tensor as it is stored) of one layer."""
        for _, name, tensor in self.layers[index].named():
            yield _LAYER.format(index, name), tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored, a tied head counted once."""
        return sum(tensor.nbytes for _, tensor in self.named())

    def to(self, device: torch.device) -> Weights:
        """Copies on another device; a tied head stays tied."""
        return self.placed(lambda weight: weight.to(device))

    def placed(self, place: Callable[[Weight], Any]) -> Weights:
        """What `place` makes of each tensor; a tied head stays tied."""
        embedding = place(self.embedding)
        layers = tuple(layer.changed(lambda _, tensor: place(tensor)) for layer in self.layers)
        head = embedding if self.lm_head is self.embedding else place(self.lm_head)
        return Weights(embedding, layers, place(self.final_norm), head)


class TensorNames:
    """Names of tensors, by the memory that they are: another tensor over the same numbers has the same name.

    Args:
        named: (name, tensor); of two names for one tensor the first counts. Names hold as long as the tensors live.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, Weight]]) -> None:
        self._names: dict[tuple[object, ...], str] = {}
        for name, tensor in named_tensors:
            self._names.setdefault(_memory(tensor), name)

    def of(self, tensor: Weight) -> str | None:
        """The name of a tensor, None if it is none of those."""
        return self._names.get(_memory(tensor))


def _memory(weight: Weight) -> tuple[object, ...]:
    tensor = backing_tensor(weight)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


# -- What a declaration asks for ---------------------------------------------------------------------------------------------


def layer_weight_specs(layer: Layer, hidden_size: int) -> dict[str, StoredTensor]:
    """Every tensor of a layer, by its field, under its Hugging Face name within the layer."""

    def norm(name: str) -> StoredTensor:
        return StoredTensor(f"{name}.weight", (Axis(hidden_size, "hidden"),), plus_one=layer.norm.plus_one)

    tensors = {"input_norm": norm("input_layernorm")}
    tensors |= mixer_kind(layer.mixer).tensors(layer.mixer, layer.norm, hidden_size)
    if layer.norms_behind:
        tensors |= {
            "mixer_out_norm": norm("post_attention_layernorm"), "post_norm": norm("pre_feedforward_layernorm"),
            "mlp_out_norm": norm("post_feedforward_layernorm"),
        }  # fmt: skip
    else:
        tensors["post_norm"] = norm("post_attention_layernorm")
    return tensors | _mlp_tensors(layer, hidden_size)


def _mlp_tensors(layer: Layer, hidden_size: int) -> dict[str, StoredTensor]:
    mlp, hidden = layer.mlp, Axis(hidden_size, "hidden")

    def gated_mlp(field: str, name: str, width: int) -> dict[str, StoredTensor]:
        inner = Axis(width, "mlp", cut=True)
        axes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return {field + part: StoredTensor(f"mlp.{name}{part}.weight", part_axes) for part, part_axes in axes.items()}

    if isinstance(mlp, Dense):
        return gated_mlp("", "", mlp.width)
    tensors = {"router": StoredTensor("mlp.gate.weight", (Axis(mlp.count), hidden))}
    for expert in range(mlp.count):
        tensors |= gated_mlp(f"experts.{expert}.", f"experts.{expert}.", mlp.width)
    if mlp.shared:
        tensors |= gated_mlp("shared_expert.", "shared_expert.", mlp.shared)
        tensors["shared_gate"] = StoredTensor("mlp.shared_expert_gate.weight", (Axis(1), hidden))
    return tensors


def layer_tensors(config: ModelConfig, index: int) -> dict[str, StoredTensor]:
    """Every tensor of one layer, by its field, under its full Hugging Face name."""
    tensors = layer_weight_specs(config.layers[index], config.hidden_size)
    return {field: tensor.renamed(_LAYER.format(index, tensor.name)) for field, tensor in tensors.items()}


def checkpoint_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Every tensor that a checkpoint of this config must hold, by its Hugging Face name."""
    outer = Axis(config.vocab_size, "vocab", cut=True), Axis(config.hidden_size, "hidden")
    tensors = {EMBEDDING: StoredTensor(EMBEDDING, outer)}
    for index in range(config.num_layers):
        tensors |= {tensor.name: tensor for tensor in layer_tensors(config, index).values()}
    tensors[FINAL_NORM] = StoredTensor(FINAL_NORM, outer[1:], plus_one=config.final_norm.plus_one)
    if not config.tied:
        tensors[HEAD] = StoredTensor(HEAD, outer)
    return tensors


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each."""
    return {name: tensor.shape for name, tensor in checkpoint_tensors(config).items()}


def num_parameters(config: ModelConfig) -> int:
    """Weights of the model, a tied head counted once."""
    return sum(torch.Size(shape).numel() for shape in checkpoint_shapes(config).values())


def assemble(config: ModelConfig, get: Callable[[str], Any]) -> Weights:
    """Build `Weights` from a lookup by Hugging Face name: of matrices a `Weight`, of all else a tensor."""
    embedding = get(EMBEDDING)

    def layer(index: int) -> LayerWeights:
        tensors = layer_weight_specs(config.layers[index], config.hidden_size)
        names = {field: tensor.name for field, tensor in tensors.items()}
        return LayerWeights({field: get(_LAYER.format(index, name)) for field, name in names.items()}, names)

    layers = tuple(layer(index) for index in range(config.num_layers))
    return Weights(embedding, layers, get(FINAL_NORM), embedding if config.tied else get(HEAD))
