"""A model's weights: what every family's are alike, and the Hugging Face name of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from haarkv.models.base import DecoderConfig

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = "model.layers.{}.{}"


def stored(name: str, *axes: str, only_if: str = "") -> Any:
    """Declare one tensor of a layer, as a field of its dataclass; those with `only_if` stand last.

    Args:
        name: Hugging Face's name within the layer, such as `self_attn.q_proj.weight`.
        axes: for each axis, the attribute of `DecoderConfig` that holds its size.
        only_if: an attribute of `DecoderConfig`; where it is false there is no such tensor, and the field is None.
    """
    metadata = {"name": name, "axes": axes, "only_if": only_if}
    return field(default=None, metadata=metadata) if only_if else field(metadata=metadata)


def repeated(name: str, of: type[TensorGroup], count: str) -> Any:
    """Declare a tuple of equal groups of tensors, such as experts.

    Args:
        name: Hugging Face's name of the list within the layer, such as `mlp.experts`.
        of: the class of one group.
        count: the attribute of `DecoderConfig` that holds how many there are.
    """
    return field(metadata={"name": name, "of": of, "count": count})


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a layer's checkpoint must hold: its Hugging Face name within the layer, and its shape.

    Attributes:
        axes: for each axis, the attribute of `DecoderConfig` that holds its size.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


class TensorGroup:
    """Tensors by field: a family's are frozen dataclasses of `stored` tensors, and of `repeated` groups such as experts."""

    @classmethod
    def tensors_of(cls, config: DecoderConfig) -> dict[str, StoredTensor]:
        """Every tensor that there is of this config, by its field; `experts.3.up_proj` in a repeated group."""
        found: dict[str, StoredTensor] = {}
        for of in fields(cls):  # type: ignore[arg-type]
            name, count = of.metadata["name"], of.metadata.get("count")
            if count is not None:
                group = of.metadata["of"].tensors_of(config)
                for index in range(getattr(config, count)):
                    for path, part in group.items():
                        found[f"{of.name}.{index}.{path}"] = StoredTensor(f"{name}.{index}.{part.name}", part.shape, part.axes)
            elif not of.metadata["only_if"] or getattr(config, of.metadata["only_if"]):
                axes = of.metadata["axes"]
                found[of.name] = StoredTensor(name, tuple(getattr(config, axis) for axis in axes), axes)
        return found

    @classmethod
    def assembled(cls, config: DecoderConfig, get: Callable[[str], Tensor]) -> Self:
        """The group, from a lookup by Hugging Face name within it."""
        values: dict[str, Any] = {}
        for of in fields(cls):  # type: ignore[arg-type]
            name, count = of.metadata["name"], of.metadata.get("count")
            if count is not None:
                group: type[TensorGroup] = of.metadata["of"]
                values[of.name] = tuple(
                    group.assembled(config, lambda part, prefix=f"{name}.{index}": get(f"{prefix}.{part}"))  # type: ignore[misc]
                    for index in range(getattr(config, count))
                )
            elif not of.metadata["only_if"] or getattr(config, of.metadata["only_if"]):
                values[of.name] = get(name)
        return cls(**values)

    def named(self) -> Iterator[tuple[str, str, Tensor]]:
        """(field, Hugging Face name within the layer, tensor) of each tensor that is there."""
        for of in fields(self):  # type: ignore[arg-type]
            value = getattr(self, of.name)
            if isinstance(value, Tensor):
                yield of.name, of.metadata["name"], value
            for index, group in enumerate(value if isinstance(value, tuple) else ()):
                for path, name, tensor in group.named():
                    yield f"{of.name}.{index}.{path}", f"{of.metadata['name']}.{index}.{name}", tensor

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy in which each tensor is what `change` makes of its field's name and of itself."""

        def of(path: str, value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(path, value)
            if isinstance(value, tuple):
                return tuple(
                    group.changed(lambda name, tensor, prefix=f"{path}.{index}": change(f"{prefix}.{name}", tensor))
                    for index, group in enumerate(value)
                )
            return value

        values = {f.name: of(f.name, getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return replace(self, **values)  # type: ignore[type-var]


class LayerWeights(TensorGroup):
    """One decoder layer's weights; projections are [out, in], as Hugging Face stores them.

    Every family's layer has the attribute below; the others are between a family's weights and its layer.

    Attributes:
        o_proj: [hidden, num_heads * head_dim], what attention's output is multiplied with.
    """

    o_proj: Tensor


@dataclass(frozen=True)
class Weights:
    """A whole model; `lm_head` is `embedding` itself where the head is tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in the order in which a forward meets them."""
        yield EMBEDDING, self.embedding
        for index in range(len(self.layers)):
            yield from self.of_layer(index)
        yield FINAL_NORM, self.final_norm
        if self.lm_head is not self.embedding:
            yield HEAD, self.lm_head

    def of_layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of one layer."""
        for _, name, tensor in self.layers[index].named():
            yield _LAYER.format(index, name), tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, a tied head counted once."""
        return sum(tensor.nbytes for _, tensor in self.named())

    def to(self, device: torch.device) -> Weights:
        """Copies on another device; a tied head stays tied."""
        embedding = self.embedding.to(device)
        layers = tuple(layer.changed(lambda _, tensor: tensor.to(device)) for layer in self.layers)
        head = embedding if self.lm_head is self.embedding else self.lm_head.to(device)
        return Weights(embedding, layers, self.final_norm.to(device), head)


class TensorNames:
    """Names of tensors, by the memory that they are: another tensor over the same numbers has the same name.

    Args:
        named: (name, tensor); of two names for one tensor the first counts. Names hold as long as the tensors live.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._names: dict[tuple[object, ...], str] = {}
        for name, tensor in named:
            self._names.setdefault(_memory(tensor), name)

    def of(self, tensor: Tensor) -> str | None:
        """The name of a tensor, None if it is none of those."""
        return self._names.get(_memory(tensor))


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def layer_tensors(config: DecoderConfig, index: int) -> dict[str, StoredTensor]:
    """Every tensor of one layer, by its field, under its full Hugging Face name."""
    of_one = config.family.LayerWeights.tensors_of(config)
    return {path: StoredTensor(_LAYER.format(index, part.name), part.shape, part.axes) for path, part in of_one.items()}


def needs_other_tensors(config: DecoderConfig, built: type[LayerWeights], optional: Collection[str] = ()) -> str | None:
    """For a builder of whole layers: what sets a config's layer apart from the one it builds, such as "has q_bias"; or None.

    It names the first three fields, and a repeated group such as experts by its own field, once.

    Args:
        built: the weights of the layer that is built.
        optional: fields that it can do with and without.
    """
    ours, theirs = built.tensors_of(config), config.family.LayerWeights.tensors_of(config)
    more, less = (
        dict.fromkeys(path.partition(".")[0] for path in a if path not in b and path not in optional)
        for a, b in ((theirs, ours), (ours, theirs))
    )
    apart = [f"has {field}" for field in more] + [f"has no {field}" for field in less]
    return ", ".join(apart[:3] + ["…"] * (len(apart) > 3)) or None


def checkpoint_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a checkpoint of this config must hold."""
    return {name: tuple(getattr(config, axis) for axis in axes) for name, axes in checkpoint_axes(config).items()}


def checkpoint_axes(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """The same, and for each axis the attribute of `DecoderConfig` that holds its size: what tells how a tensor is split."""
    axes: dict[str, tuple[str, ...]] = {EMBEDDING: ("vocab_size", "hidden_size")}
    for index in range(config.num_layers):
        axes |= {part.name: part.axes for part in layer_tensors(config, index).values()}
    axes[FINAL_NORM] = ("hidden_size",)
    if not config.tie_word_embeddings:
        axes[HEAD] = ("vocab_size", "hidden_size")
    return axes


def assemble(config: DecoderConfig, get: Callable[[str], Tensor]) -> Weights:
    """Build `Weights` from a lookup by Hugging Face name."""
    embedding, of = get(EMBEDDING), config.family.LayerWeights

    def layer(index: int) -> LayerWeights:
        return of.assembled(config, lambda name: get(_LAYER.format(index, name)))

    layers = tuple(layer(index) for index in range(config.num_layers))
    final_norm = get(FINAL_NORM)
    return Weights(embedding, layers, final_norm, embedding if config.tie_word_embeddings else get(HEAD))
