"""The description of a model in stored files: shapes, and every setting that changes K, V or logits, as comparable data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.kv.recurrent import StateShape
from haarkv.tq_ops.kv.shapes import KVShape


@dataclass(frozen=True)
class ModelShape:
    """Identifies the model for which a file was written. Models of one shape may share a plan, whatever their weights.

    Attributes:
        layers: K and V of each layer, or None.
        states: of other mixers, by layer, ascending.
        declaration: `ModelConfig.declaration` as JSON with sorted keys; "" if unknown.
    """

    layers: tuple[KVShape | None, ...]
    hidden_size: int
    vocab_size: int
    states: tuple[tuple[int, StateShape], ...] = ()
    declaration: str = ""

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, hidden_size: int, vocab_size: int) -> ModelShape:
        """Of a model whose layers are all alike and keep all tokens."""
        return cls((KVShape(num_kv_heads, head_dim),) * num_layers, hidden_size, vocab_size)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def require_same(self, other: ModelShape, what: str, remedy: str) -> None:
        """Refuse a file of another model or declaration; warn where that is unknown.

        Args:
            other: of the model at hand.
            what, remedy: what was made, and how to make it anew, for messages.
        Raises:
            InputError: naming the first field that differs, and its two values.
        """
        if replace(self, declaration="") != replace(other, declaration=""):
            raise InputError(f"{what} was made for another model: {self}; this one has {other}; {remedy}")
        if not other.declaration or self.declaration == other.declaration:
            return
        if not self.declaration:
            warn(f"{what} does not say how its model was configured; if config.json has changed since, {remedy}")
        elif difference := _first_difference(_by_single_layer(self.declaration), _by_single_layer(other.declaration)):
            path, file_value, model_value = difference
            where = f" of layer {path[1]}" if path[0] == "layers" and len(path) > 2 else ""
            name = ".".join(path[2:] if where else path)
            raise InputError(
                f"{what} was made with {name} {_brief(file_value)}{where}; this model has {_brief(model_value)}: {remedy}"
            )

    def as_json(self) -> dict[str, Any]:
        """For a file: five integers where all layers are alike and keep all tokens; else also each layer that differs."""
        first = next((shape for shape in self.layers if shape is not None), None)
        plain = replace(first, window=None) if first else KVShape(1, 1)
        entry: dict[str, Any] = {
            "num_layers": self.num_layers, "num_kv_heads": plain.num_kv_heads, "head_dim": plain.head_dim,
            "hidden_size": self.hidden_size, "vocab_size": self.vocab_size,
        }  # fmt: skip
        if others := {str(i): shape and asdict(shape) for i, shape in enumerate(self.layers) if shape != plain}:
            entry["layers"] = others
        if self.states:
            entry["states"] = {str(layer): shape.as_json() for layer, shape in self.states}
        if self.declaration:
            entry["declaration"] = json.loads(self.declaration)
        return entry

    @classmethod
    def read(cls, raw: object) -> ModelShape:
        """From a file's entry; a ValueError if it is not what `as_json` writes."""
        names = ("num_layers", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")
        if not isinstance(raw, dict) or raw.keys() - {"layers", "states", "declaration"} != set(names):
            raise ValueError(f"its model is not described by {', '.join(names)}")
        if bad := [name for name in names if not _is_count(raw[name])]:
            raise ValueError(f"{bad[0]} of its model is not a positive integer")
        if raw["num_layers"] > _MOST_LAYERS:
            raise ValueError(f"num_layers of its model is above {_MOST_LAYERS}")
        layers: list[KVShape | None] = [KVShape(raw["num_kv_heads"], raw["head_dim"])] * raw["num_layers"]
        for index, entry in _by_layer_of(raw, "layers", len(layers)):
            layers[index] = _layer_shape(entry)
        states = tuple((index, StateShape.read(entry)) for index, entry in _by_layer_of(raw, "states", len(layers)))
        return cls(tuple(layers), raw["hidden_size"], raw["vocab_size"], states, _as_text(raw.get("declaration")))

    def __str__(self) -> str:
        kinds = Counter(str(shape) if shape else "no K and V" for shape in self.layers)
        layers = " and ".join(f"{count} layers of {words}" for words, count in kinds.items())
        return f"{layers}, hidden {self.hidden_size}, vocabulary {self.vocab_size}"


def _as_text(declaration: object) -> str:
    if not isinstance(declaration, dict | None):
        raise ValueError("the declaration of its model is no object")
    try:
        return json.dumps(declaration, sort_keys=True) if declaration else ""
    except RecursionError:
        raise ValueError("the declaration of its model is nested too deeply") from None


_MOST_LAYERS = 2**14
_MOST_SHOWN = 200


def _by_single_layer(declaration: str) -> Any:
    """A declaration whose layers that are alike stand one by one again."""
    whole = json.loads(declaration)
    if isinstance(whole, dict) and isinstance(layers := whole.get("layers"), dict):
        whole["layers"] = {index: layer for indices, layer in layers.items() for index in indices.split()}
    return whole


def _first_difference(one: Any, other: Any, path: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any, Any] | None:
    """Path and both values of the first difference. None, false and 0 equal a missing entry: a new field changes no file."""
    if isinstance(one, dict) and isinstance(other, dict):
        inner = (_first_difference(one.get(key), other.get(key), (*path, key)) for key in {**one, **other})
        return next(filter(None, inner), None)
    return None if (one or None) == (other or None) else (path, one, other)


def _brief(value: Any) -> str:
    text = "none" if value is None else json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _by_layer_of(raw: Mapping[str, Any], name: str, count: int) -> list[tuple[int, object]]:
    """The entries of one layer each, of an object by the layers' numbers; none where there is no such object."""
    entries = raw.get(name, {})
    if not isinstance(entries, dict):
        raise ValueError(f"the {name} of its model are no object")
    for index in entries:
        if not (index.isascii() and index.isdigit() and len(index) < 6 and int(index) < count):
            raise ValueError(f"its model has no layer {index}")
    return sorted((int(index), entry) for index, entry in entries.items())


def _layer_shape(entry: object) -> KVShape | None:
    """The inverse of `asdict`, of a file's entry."""
    match entry:
        case None:
            return None
        case {"num_kv_heads": heads, "head_dim": dim, "window": window, **others} if not others:
            if _is_count(heads) and _is_count(dim) and (window is None or _is_count(window)):
                return KVShape(heads, dim, window)
    raise ValueError("a layer of its model is not described by num_kv_heads, head_dim and window")
