"""Learned coordinates as a file: safetensors, the model that they belong to, and a SHA-256 of everything in it.

    tensors   layers.0.k.mean [H, D] F32, .forward and .back [H, D, D] BF16, .weights [H, D] F32, .inv_freq [R/2] F64, empty
              where nobody knows how keys turn; every layer
    metadata  haarkv_calibration: "4"; model: its shapes, as JSON; fingerprint; context: tokens of a sequence up to which it
              holds, or nothing; learned: how, as JSON; plan: the text of a plan file, or nothing; sha256

`learned` is for people; nothing reads it. The SHA-256 is taken of all of the rest: the metadata but for itself, and of each
tensor in the order of its name, the name, dtype, shape and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.safetensors_header import digest_of, metadata_of, read_promised

VERSION = "4"
_KEYS = {"haarkv_calibration", "model", "fingerprint", "context", "learned", "plan", "sha256"}
_DTYPES = {
    "mean": torch.float32, "forward": torch.bfloat16, "back": torch.bfloat16, "weights": torch.float32,
    "inv_freq": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class CalibrationFile:
    """What a calibration file holds.

    Attributes:
        calibration: learned coordinates of every layer's keys; its digest is the SHA-256 of the tensors.
        shape: of the model that they were learned from.
        fingerprint: of its weights, as `models.fingerprint` takes it.
        learned: how they were learned and what they were found to cost; nothing reads it.
        plan: the text of a plan file for formats of these coordinates; "" if the file is a calibration alone.
    """

    calibration: Calibration
    shape: ModelShape
    fingerprint: str
    learned: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""

    @property
    def spec(self) -> KVSpec:
        """A KV cache that may take these coordinates, in the default format until another is asked for."""
        return KVSpec(made_for=self.shape, calibration=self.calibration, weights=self.fingerprint)


def calibration_of(k: Sequence[Basis], context: int | None = None) -> Calibration:
    """Coordinates of every layer as formats take them, named by the SHA-256 of their numbers."""
    return Calibration(tuple(k), digest_of(_tensors(k), {}), context)


def _tensors(k: Sequence[Basis]) -> dict[str, Tensor]:
    return {
        f"layers.{layer}.k.{name}": getattr(basis, name).to(dtype).contiguous()
        for layer, basis in enumerate(k)
        for name, dtype in _DTYPES.items()
    }


def _metadata(file: CalibrationFile) -> dict[str, str]:
    return {
        "haarkv_calibration": VERSION,
        "model": json.dumps(file.shape.as_json(), sort_keys=True),
        "fingerprint": file.fingerprint,
        "context": str(file.calibration.context or ""),
        "learned": json.dumps(file.learned, sort_keys=True),
        "plan": file.plan,
    }


def dumps(file: CalibrationFile) -> bytes:
    """The bytes of a calibration file.

    Raises:
        ValueError: a number that is not finite.
    """
    tensors, metadata = _tensors(file.calibration.k), _metadata(file)
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor.float()).all()]:
        raise ValueError(f"{bad[0]} is not finite")
    content: bytes = save_tensors(tensors, metadata | {"sha256": digest_of(tensors, metadata)})
    return content


def loads(content: bytes, name: str) -> CalibrationFile:
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
        if digest_of(tensors, metadata) != stated:
            raise ValueError("its content is not what its SHA-256 was taken of")
        shape = ModelShape.read(parse_json(metadata["model"]))
        k = [_read(tensors, layer, shape) for layer in range(shape.num_layers)]
        learned, plan = parse_json(metadata["learned"]), metadata["plan"]
        calibration = calibration_of(k, _context(metadata["context"]))
        return CalibrationFile(calibration, shape, metadata["fingerprint"], learned, plan)
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"{name} is no calibration: {error}; `tq calibrate` writes one") from None


def _read_metadata(content: bytes) -> dict[str, str]:
    metadata = metadata_of(content)
    if not metadata.keys() >= _KEYS:
        raise ValueError("it lacks " + ", ".join(sorted(_KEYS - set(metadata))))
    if metadata["haarkv_calibration"] != VERSION:
        raise ValueError(f"its version is {metadata['haarkv_calibration']}, not {VERSION}")
    return metadata


def _context(text: str) -> int | None:
    if text and not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise ValueError("its context is not a number of tokens")
    return int(text) if text else None


def _read(tensors: Mapping[str, Tensor], layer: int, shape: ModelShape) -> Basis:
    kv = shape.layers[layer]
    if kv is None:
        raise ValueError(f"its model has no K and V in layer {layer}")
    heads, dim = kv.num_kv_heads, kv.head_dim
    matrices, vectors = (heads, dim, dim), (heads, dim)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "mean": (vectors,), "forward": (matrices,), "back": (matrices,), "weights": (vectors,),
        "inv_freq": tuple((count,) for count in range(dim // 2 + 1)),
    }  # fmt: skip
    found = {}
    for name, dtype in _DTYPES.items():
        key = f"layers.{layer}.k.{name}"
        if key not in tensors:
            raise ValueError(f"it lacks {key}")
        tensor = tensors[key]
        if tuple(tensor.shape) not in shapes[name] or tensor.dtype != dtype:
            raise ValueError(f"{key} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shapes[name][-1])}")
        if not torch.isfinite(tensor.float()).all():
            raise ValueError(f"{key} is not finite")
        found[name] = tensor if dtype == torch.float64 else tensor.float()
    return Basis(**found)


def is_calibration(content: bytes) -> bool:
    """Whether bytes begin as a calibration file does, damaged or not: safetensors, whose header's length comes first."""
    return content[8:10] == b'{"' and int.from_bytes(content[:8], "little") < 2**32


def load(path: Path | str) -> CalibrationFile:
    """Read a calibration file.

    Raises:
        InputError: it cannot be read or is no calibration.
    """
    try:
        return loads(read_promised(Path(path), "the calibration ", "haarkv_calibration"), str(path))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no calibration: {error}; `tq calibrate` writes one") from None
