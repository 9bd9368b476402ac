"""What a decoder model declares of itself: its layers, each with its own mixer and MLP, an embedding and a head.

A leaf: plain data that everything else reads. A forward follows the declaration, and a fused path takes a layer only where it
equals one that the path knows; what tensors are called decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from haarkv.tq_ops.kv.recurrent import VERSIONS, StateShape
from haarkv.tq_ops.kv.shapes import KVShape

Activation = Literal["silu", "gelu_tanh"]
"""Of an MLP's gate."""


class RopeScaling(Protocol):
    """A change to the frequencies of RoPE, by which a model reads more tokens than it was trained on: `models.rope`'s."""

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied with, so that scores grow by its square; 1 changes nothing."""

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        """The frequencies [dims / 2] fp32 of a config, scaled."""


@dataclass(frozen=True)
class Rope:
    """Half-split rotary embedding.

    Attributes:
        dims: the first coordinates of a head that are turned; the others stay.
        scaling: how it is stretched over a longer context; None of a plain model.
    """

    theta: float
    dims: int
    scaling: RopeScaling | None = None


class Heads(NamedTuple):
    """Sizes of an attention.

    Attributes:
        head_dim: D, from the config and never hidden_size / num_heads.
        num_kv_heads: Hkv; each serves num_heads / num_kv_heads query heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        """Rows of the projection to Q."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the projection to K, and of that to V."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Attention:
    """A mixer: softmax attention over K and V of the tokens before.

    Attributes:
        num_heads, num_kv_heads, head_dim: as in `Heads`.
        window: the newest tokens that a query sees, itself among them; None for all.
        scale: of the logits.
        head_norms: each head of Q and of K is normed before RoPE.
        bias: the projections to Q, K and V add a bias.
        gated: the projection to Q also gives each head a gate; what the head attends to is multiplied with its sigmoid.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    window: int | None = None
    head_norms: bool = False
    bias: bool = False
    gated: bool = False

    @property
    def heads(self) -> Heads:
        """Its sizes."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def kv_shape(self) -> KVShape:
        """What a cache keeps of a token."""
        return KVShape(self.num_kv_heads, self.head_dim, self.window)

    @property
    def state_shape(self) -> None:
        """It remembers K and V alone."""


class Mixer(Protocol):
    """What of a layer looks at other tokens. `models.layer` runs it by its class."""

    @property
    def kv_shape(self) -> KVShape | None:
        """Of its K and V; None if it has none."""

    @property
    def state_shape(self) -> StateShape | None:
        """Of a state that each token changes; None if it has none."""


@dataclass(frozen=True)
class Dense:
    """A gated MLP: `down(act(gate(x)) * up(x))`."""

    width: int
    activation: Activation = "silu"


@dataclass(frozen=True)
class Experts:
    """Gated MLPs, of which each token goes through a few.

    Attributes:
        count: MLPs of the layer.
        per_token: those few.
        width: of one expert.
        normalized: the weights of a token's experts are made to sum to 1.
        shared: width of one more expert, which every token goes through; a gate of its own weighs it. 0 for none.
    """

    count: int
    per_token: int
    width: int
    activation: Activation = "silu"
    normalized: bool = False
    shared: int = 0


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm.

    Attributes:
        plus_one: a checkpoint stores w, and 1 + w is what is multiplied with; in memory such a weight is 1 + w, in FP32.
    """

    eps: float
    plus_one: bool = False


@dataclass(frozen=True)
class Layer:
    """One decoder layer: `x += mixer(norm(x)); x += mlp(norm(x))`.

    Attributes:
        norm: of all its norms.
        norms_behind: the mixer's and the MLP's results are normed as well, before they are added.
    """

    mixer: Mixer
    mlp: Dense | Experts
    norm: Norm
    norms_behind: bool = False

    @property
    def attention(self) -> Attention:
        """Its mixer, where that is attention; a TypeError if it is something else."""
        if not isinstance(self.mixer, Attention):
            raise TypeError(f"this layer's mixer is {type(self.mixer).__name__}, not attention")
        return self.mixer


@dataclass(frozen=True)
class ModelConfig:
    """One model, of whatever family.

    Attributes:
        model_type: its family, a key of `models.families.FAMILIES`.
        final_norm: before the head.
        embedding_scale: what embeddings are multiplied with, rounded to the model's dtype.
        tied: the head is the embedding.
        max_position_embeddings: positions that there are; with YaRN those that its factor reaches, if they are more.
        eos_token_ids: tokens that end a text.
    """

    model_type: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    final_norm: Norm
    embedding_scale: float = 1.0
    tied: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_shapes(self) -> tuple[KVShape | None, ...]:
        """Of each layer's K and V, for a cache."""
        return tuple(layer.mixer.kv_shape for layer in self.layers)

    @property
    def state_shapes(self) -> dict[int, StateShape]:
        """What layers remember beside K and V, by layer."""
        shapes = {index: layer.mixer.state_shape for index, layer in enumerate(self.layers)}
        return {index: shape for index, shape in shapes.items() if shape is not None}

    @property
    def state_bytes(self) -> int:
        """Of those, one sequence's, in as many versions as are kept."""
        return sum(shape.nbytes for shape in self.state_shapes.values())

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers that are attention, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def heads(self) -> Heads:
        """The sizes that all of its attention has, or a ValueError; windows and RoPE may differ."""
        sizes = {mixer.heads for mixer in self.attentions}
        if len(sizes) != 1:
            raise ValueError("its layers have heads of different numbers or sizes")
        return sizes.pop()

    @property
    def common(self) -> Layer:
        """The one declaration of all layers, for what is built of equal layers; a ValueError if they differ."""
        if len(set(self.layers)) != 1:
            raise ValueError("its layers differ")
        return self.layers[0]

    def declaration(self) -> dict[str, Any]:
        """All that decides what K, V and logits become, as JSON has it: what a stored file says of its model.

        Every field of every part is in it but `_EXCLUDED_FIELDS`. Layers that are alike stand once, under their numbers with
        spaces between.
        """
        indices_by_layer: dict[Layer, list[str]] = {}
        for index, layer in enumerate(self.layers):
            indices_by_layer.setdefault(layer, []).append(str(index))
        layers = {" ".join(indices): _part_declaration(layer) for layer, indices in indices_by_layer.items()}
        return {**_part_declaration(replace(self, layers=())), "layers": layers}

    def for_drafts(self, tokens: int) -> ModelConfig:
        """The same model, whose states are kept in enough versions to take back so many drafted tokens and the one before."""

        def keeping(layer: Layer) -> Layer:
            if layer.mixer.state_shape is None:
                return layer
            mixer: Any = layer.mixer
            return replace(layer, mixer=replace(mixer, versions=VERSIONS + tokens))

        return replace(self, layers=tuple(map(keeping, self.layers)))

    def with_layers(self, count: int) -> ModelConfig:
        """The same model with its first layers alone."""
        return replace(self, layers=self.layers[:count])


_EXCLUDED_FIELDS = frozenset({"model_type", "max_position_embeddings", "eos_token_ids", "versions"})
"""Fields that change no number of a forward. What a model type and its positions decide, such as windows, is declared."""


def _part_declaration(part: Any) -> Any:
    """A part of a declaration as JSON: its `declared_fields` or its fields; floats as `decimal`, so that a GGUF file and
    its folder say the same."""
    if (declared_fields := getattr(part, "declared_fields", None)) is not None:
        return {name: decimal(value) for name, value in declared_fields.items()}
    if not is_dataclass(part):
        return decimal(part)
    field_values = {
        item.name: _part_declaration(getattr(part, item.name)) for item in fields(part) if item.name not in _EXCLUDED_FIELDS
    }
    return {name: value for name, value in field_values.items() if value is not None}


def decimal(value: Any) -> Any:
    """A number that a file holds as FP32, as the shortest decimal that stands for it: 1e-06 and not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def unknown_part(layer: Layer, knows: Collection[str] = ()) -> str | None:
    """For a path that runs plain dense layers: what of a declaration it does not know, in words; None if it may take it.

    Plain is attention with RoPE on whole heads and a SiLU-gated MLP, of any sizes, `theta`, scaling and `eps`. The declaration
    is compared as a whole: one that says anything else, in whatever field, is not known.

    Args:
        knows: fields beside those in which the path takes any value: of `head_norms`, `bias`, `window`, `activation`,
            `plus_one` and `norms_behind`. With `experts` the MLP may be some of those, of which none is shared.
    """
    mixer, mlp = layer.mixer, layer.mlp
    if type(mixer) is not Attention:
        return f"it mixes tokens by {type(mixer).__name__}"
    if type(mlp) is not Dense and "experts" not in knows:
        return "it has experts"
    attention = Attention(
        mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, Rope(mixer.rope.theta, mixer.head_dim, mixer.rope.scaling),
        mixer.scale, **{name: getattr(mixer, name) for name in ("window", "head_norms", "bias") if name in knows},
    )  # fmt: skip
    activation: Any = {"activation": mlp.activation} if "activation" in knows else {}
    if isinstance(mlp, Experts):
        plain_mlp: Dense | Experts = Experts(mlp.count, mlp.per_token, mlp.width, normalized=mlp.normalized, **activation)
    else:
        plain_mlp = Dense(mlp.width, **activation)
    norm = Norm(layer.norm.eps, **({"plus_one": layer.norm.plus_one} if "plus_one" in knows else {}))
    plain = Layer(attention, plain_mlp, norm, **({"norms_behind": layer.norms_behind} if "norms_behind" in knows else {}))
    return None if layer == plain else _difference(layer, plain)


def _difference(part: Any, plain_part: Any) -> str:
    """The first field in which two declarations of one class differ, and its value."""
    for item in fields(part):
        value, expected = getattr(part, item.name), getattr(plain_part, item.name)
        if value != expected:
            is_nested = is_dataclass(value) and type(value) is type(expected)
            return _difference(value, expected) if is_nested else f"{item.name} is {value}"
    return f"it is a {type(part).__name__}"


def unknown_layer(config: ModelConfig, knows: Collection[str] = ()) -> str | None:
    """The first layer that `unknown_part` names, and why; None if a path may take all layers."""
    for index, layer in enumerate(config.layers):
        if part := unknown_part(layer, knows):
            return f"layer {index} of this {config.model_type} model is another than it knows: {part}"
    return None
