"""Learned coordinates as a file: safetensors, the model that they belong to, and a SHA-256 of everything in it.

    tensors   layers.0.k.mean [H, D] F32, .forward and .back [H, D, D] BF16, .weights [H, D] F32; the same for v; every layer
    metadata  haarkv_calibration: "1"; model: its shapes, as JSON; fingerprint; learned: how, as JSON; sha256

`learned` is for people; nothing reads it. The SHA-256 is taken of all of the rest: the metadata but for itself, and of each
tensor in the order of its name, the name, dtype, shape and bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import ModelShape

VERSION = "1"
_KEYS = {"haarkv_calibration", "model", "fingerprint", "learned", "sha256"}
_DTYPES = {"mean": torch.float32, "forward": torch.bfloat16, "back": torch.bfloat16, "weights": torch.float32}
_SIDES = ("k", "v")


@dataclass(frozen=True)
class Calibration:
    """Learned coordinates of every layer's K and V.

    Attributes:
        layers: K's and V's of each layer.
        shape: of the model that they were learned from.
        fingerprint: of its weights, as `models.fingerprint` takes it.
        learned: how they were learned and what they were found to cost; nothing reads it.
        sha256: of the file's content; of a calibration that was never in a file, what it would be.
    """

    layers: tuple[tuple[Basis, Basis], ...]
    shape: ModelShape
    fingerprint: str
    learned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Of the content, as its file says it."""
        return _digest(_tensors(self), _metadata(self))

    def require_model(self, shape: ModelShape, fingerprint: str | None = None, name: str = "the calibration") -> None:
        """Refuse another model.

        Args:
            shape, fingerprint: of the model at hand; without its fingerprint only the shape counts.
            name: of the file, for the message.
        Raises:
            InputError: naming what differs.
        """
        if self.shape != shape:
            raise InputError(f"{name} was learned from another model: {self.shape}; this one has {shape}")
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise InputError(
                f"{name} was learned from a model of the same shape with other weights "
                f"(fingerprint {self.fingerprint}, this model's is {fingerprint}); run `tq calibrate` on this one"
            )


def _tensors(calibration: Calibration) -> dict[str, Tensor]:
    return {
        f"layers.{layer}.{side}.{name}": getattr(basis, name).to(dtype).contiguous()
        for layer, pair in enumerate(calibration.layers)
        for side, basis in zip(_SIDES, pair, strict=True)
        for name, dtype in _DTYPES.items()
    }


def _metadata(calibration: Calibration) -> dict[str, str]:
    return {
        "haarkv_calibration": VERSION,
        "model": json.dumps(asdict(calibration.shape), sort_keys=True),
        "fingerprint": calibration.fingerprint,
        "learned": json.dumps(calibration.learned, sort_keys=True),
    }


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(metadata.items()):
        digest.update(f"{key}={value}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def dumps(calibration: Calibration) -> bytes:
    """The bytes of a calibration file.

    Raises:
        ValueError: a number that is not finite.
    """
    tensors, metadata = _tensors(calibration), _metadata(calibration)
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor.float()).all()]:
        raise ValueError(f"{bad[0]} is not finite")
    content: bytes = save_tensors(tensors, metadata | {"sha256": _digest(tensors, metadata)})
    return content


def loads(content: bytes, name: str) -> Calibration:
    """What the bytes of a calibration file say.

    Args:
        name: of the file, for messages.
    Raises:
        InputError: no calibration, one of another version, or a damaged one.
    """
    try:
        metadata = _read_metadata(content)
        tensors = load_tensors(content)
        stated = metadata.pop("sha256")
        if _digest(tensors, metadata) != stated:
            raise ValueError("its content is not what its SHA-256 was taken of")
        shape = ModelShape(**{key: int(value) for key, value in json.loads(metadata["model"]).items()})
        layers = tuple(_read_layer(tensors, layer, shape) for layer in range(shape.num_layers))
        return Calibration(layers, shape, metadata["fingerprint"], json.loads(metadata["learned"]))
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"{name} is no calibration: {error}; `tq calibrate` writes one") from None


def _read_metadata(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError(f"it is truncated or no safetensors file ({len(content)} bytes)")
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    if not isinstance(metadata, dict) or not metadata.keys() >= _KEYS:
        raise ValueError("it lacks " + ", ".join(sorted(_KEYS - set(metadata))))
    if metadata["haarkv_calibration"] != VERSION:
        raise ValueError(f"its version is {metadata['haarkv_calibration']}, not {VERSION}")
    return {str(key): str(value) for key, value in metadata.items()}


def _read_layer(tensors: Mapping[str, Tensor], layer: int, shape: ModelShape) -> tuple[Basis, Basis]:
    heads, dim = shape.num_kv_heads, shape.head_dim
    shapes = {"mean": (heads, dim), "forward": (heads, dim, dim), "back": (heads, dim, dim), "weights": (heads, dim)}
    pair = []
    for side in _SIDES:
        found = {}
        for of in fields(Basis):
            key = f"layers.{layer}.{side}.{of.name}"
            if key not in tensors:
                raise ValueError(f"it lacks {key}")
            tensor = tensors[key]
            if tensor.shape != shapes[of.name] or tensor.dtype != _DTYPES[of.name]:
                raise ValueError(
                    f"{key} is {tensor.dtype} {list(tensor.shape)}, not {_DTYPES[of.name]} {list(shapes[of.name])}"
                )
            if not torch.isfinite(tensor.float()).all():
                raise ValueError(f"{key} is not finite")
            found[of.name] = tensor.float()
        pair.append(Basis(**found))
    return pair[0], pair[1]


def load(path: Path | str) -> Calibration:
    """Read a calibration file.

    Raises:
        InputError: it cannot be read or is no calibration.
    """
    try:
        return loads(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"the calibration {path} cannot be read: {error.strerror}") from None
