"""Declaration of a decoder model: its layers (a mixer and an MLP each), its embedding and its head.

Plain data. The forward follows the declaration; a fused path runs a layer only if it knows its whole declaration.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from haarkv.tq_ops.kv.recurrent import VERSIONS, StateShape
from haarkv.tq_ops.kv.shapes import KVShape

Activation = Literal["silu", "gelu_tanh"]
"""Activation of an MLP's gate."""


class RopeScaling(Protocol):
    """A change to RoPE's frequencies for a longer context; `models.rope` has the classes."""

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin; scores grow by its square."""

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        """Scaled frequencies [dims / 2] fp32."""


@dataclass(frozen=True)
class Rope:
    """Half-split rotary embedding.

    Attributes:
        dims: RoPE rotates the first `dims` coordinates of a head, and leaves the others.
    """

    theta: float
    dims: int
    scaling: RopeScaling | None = None


class Heads(NamedTuple):
    """Sizes of an attention layer: Hq, Hkv and D."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Attention:
    """A mixer: softmax attention over K and V of the tokens so far.

    Attributes:
        window: number of newest tokens that a query sees, its own token included; None for all tokens.
        scale: factor of the logits.
        head_norms: whether each head of Q and K is normed before RoPE.
        bias: whether the projections to Q, K and V have biases.
        gated: whether the projection to Q also gives a gate; its sigmoid multiplies the head's output.
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
    state_shape = None  # K and V are all that it keeps

    @property
    def heads(self) -> Heads:
        """Hq, Hkv and D."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def kv_shape(self) -> KVShape:
        """Shape of this layer's K and V in the cache."""
        return KVShape(self.num_kv_heads, self.head_dim, self.window)


class Mixer(Protocol):
    """The part of a layer that looks at other tokens; `models.layer.MIXERS` has a row for each class."""

    @property
    def kv_shape(self) -> KVShape | None:
        """Shape of its K and V; None without them."""

    @property
    def state_shape(self) -> StateShape | None:
        """Shape of its recurrent state; None without one."""


@dataclass(frozen=True)
class Dense:
    """A gated MLP: `down(act(gate(x)) * up(x))`."""

    width: int
    activation: Activation = "silu"


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: `count` gated MLPs; each token goes through `per_token` of them.

    Attributes:
        width: width of one expert.
        normalized: whether the routing weights of a token are normalized to sum to 1.
        shared: width of an additional expert that every token goes through, with a gate; 0 for none.
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
        plus_one: whether checkpoints store w, but the norm multiplies with 1 + w; in memory the weight is 1 + w in FP32.
    """

    eps: float
    plus_one: bool = False


@dataclass(frozen=True)
class Layer:
    """One decoder layer: `x += mixer(norm(x)); x += mlp(norm(x))`.

    Attributes:
        norm: declaration of all norms of the layer.
        post_norms: whether the outputs of mixer and MLP are normed too, before they are added to the residual.
    """

    mixer: Mixer
    mlp: Dense | Experts
    norm: Norm
    post_norms: bool = False

    @property
    def attention(self) -> Attention:
        """The mixer; a TypeError if it is not attention."""
        if not isinstance(self.mixer, Attention):
            raise TypeError(f"this layer's mixer is {type(self.mixer).__name__}, not attention")
        return self.mixer


@dataclass(frozen=True)
class ModelConfig:
    """One model of any family.

    Attributes:
        model_type: a key of `models.families.FAMILIES`.
        embedding_scale: factor of embeddings, rounded to the model's dtype.
        tied: whether the head uses the embedding's weight.
        max_position_embeddings: length of the longest context; with YaRN the scaled length, if it is longer.
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
        """Shape of K and V of each layer."""
        return tuple(layer.mixer.kv_shape for layer in self.layers)

    @property
    def state_shapes(self) -> dict[int, StateShape]:
        """Shapes of recurrent states, by layer."""
        shapes = {index: layer.mixer.state_shape for index, layer in enumerate(self.layers)}
        return {index: shape for index, shape in shapes.items() if shape is not None}

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states, all versions."""
        return sum(shape.nbytes for shape in self.state_shapes.values())

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers that are attention, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def heads(self) -> Heads:
        """The sizes that all attention layers have; a ValueError if they differ."""
        sizes = {mixer.heads for mixer in self.attentions}
        if len(sizes) != 1:
            raise ValueError("its layers have heads of different numbers or sizes")
        return sizes.pop()

    @property
    def common(self) -> Layer:
        """The declaration that all layers have; a ValueError if they differ."""
        if len(set(self.layers)) != 1:
            raise ValueError("its layers differ")
        return self.layers[0]

    def declaration(self) -> dict[str, Any]:
        """Every field that changes K, V or logits, as JSON for stored files; equal layers appear once, under their indices."""
        indices_by_layer: dict[Layer, list[str]] = {}
        for index, layer in enumerate(self.layers):
            indices_by_layer.setdefault(layer, []).append(str(index))
        layers = {" ".join(indices): _part_declaration(layer) for layer, indices in indices_by_layer.items()}
        return {**_part_declaration(replace(self, layers=())), "layers": layers}

    def for_drafts(self, tokens: int) -> ModelConfig:
        """The same model with enough versions of recurrent states to take back `tokens` drafted tokens and the one before."""

        def with_versions(mixer: Any) -> Any:
            return mixer if mixer.state_shape is None else replace(mixer, versions=VERSIONS + tokens)

        return replace(self, layers=tuple(replace(layer, mixer=with_versions(layer.mixer)) for layer in self.layers))

    def with_layers(self, count: int) -> ModelConfig:
        """The same model with its first `count` layers."""
        return replace(self, layers=self.layers[:count])


_EXCLUDED_FIELDS = frozenset({"model_type", "max_position_embeddings", "eos_token_ids", "versions"})
"""Fields that change no number of a forward."""

_KEYS = {"post_norms": "norms_behind"}
"""Field -> its key in files, if that is another name."""


def _part_declaration(part: Any) -> Any:
    """A part's `declared_fields`, or all its fields, as JSON; floats by `decimal`, so that a GGUF file equals its folder."""
    if (declared_fields := getattr(part, "declared_fields", None)) is not None:
        return {name: decimal(value) for name, value in declared_fields.items()}
    if not is_dataclass(part):
        return decimal(part)
    field_values = {
        _KEYS.get(item.name, item.name): _part_declaration(getattr(part, item.name))
        for item in fields(part)
        if item.name not in _EXCLUDED_FIELDS
    }
    return {name: value for name, value in field_values.items() if value is not None}


def decimal(value: Any) -> Any:
    """The shortest decimal of an FP32 number: 1e-06 for 9.999999974752427e-07; other values as they are."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def unknown_part(layer: Layer, knows: Collection[str] = ()) -> str | None:
    """The first field of a layer that a fused path cannot run, in words; None if the path runs the layer.

    Every fused path runs attention with RoPE on whole heads and a SiLU-gated MLP, with any sizes, `theta`, scaling and `eps`.

    Args:
        knows: fields that may differ from their defaults: `head_norms`, `bias`, `window`, `activation`, `plus_one`,
            `post_norms`; with "experts", the MLP may be experts without a shared one.
    """
    mixer, mlp = layer.mixer, layer.mlp
    if type(mixer) is not Attention:
        return f"it mixes tokens by {type(mixer).__name__}"
    if type(mlp) is not Dense and not (type(mlp) is Experts and "experts" in knows):
        return "it has experts"
    if mixer.rope.dims != mixer.head_dim:
        return f"dims is {mixer.rope.dims}"
    for part in (mixer, mlp, layer.norm, layer):
        for item in fields(part):
            value = getattr(part, item.name)
            if item.default not in (MISSING, value) and item.name not in (*knows, "normalized"):
                return f"{item.name} is {value}"
    return None


def unknown_layer(config: ModelConfig, knows: Collection[str] = ()) -> str | None:
    """The first layer that a fused path cannot run, and the reason from `unknown_part`; None if it runs all layers."""
    for index, layer in enumerate(config.layers):
        if part := unknown_part(layer, knows):
            return f"layer {index} of this {config.model_type} model is another than it knows: {part}"
    return None
