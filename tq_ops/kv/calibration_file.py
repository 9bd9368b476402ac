"""Learned coordinates as a file, and the model that they belong to.

tensors   layers.0.k.mean [H, D] F32, .forward and .back [H, D, D] BF16, .weights [H, D] F32, .inv_freq [R/2] F64, empty
          where the RoPE of keys is unknown; every layer that has K and V
metadata  haarkv_calibration: "4"; model: its shapes, as JSON; fingerprint; context: tokens of a sequence up to which it
          holds, or nothing; learned: how, as JSON, for people; plan: the text of a plan file, or nothing
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import CALIBRATION, Kind
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

_DTYPES = {
    "mean": torch.float32, "forward": torch.bfloat16, "back": torch.bfloat16, "weights": torch.float32,
    "inv_freq": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class CalibrationFile:
    """The contents of a calibration file.

    Attributes:
        calibration: its digest is the SHA-256 of the tensors.
        shape, fingerprint: of the model and its weights.
        learned: how they were learned, and the measured cost; for people.
        plan: the text of a plan file, or "".
    """

    calibration: Calibration
    shape: ModelShape
    fingerprint: str
    learned: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""

    @property
    def spec(self) -> KVSpec:
        """A request for a KV plan with these coordinates, in the default format until the caller replaces it."""
        return KVSpec(made_for=self.shape, calibration=self.calibration, weights=self.fingerprint)


def make_calibration(k: Sequence[Basis | None], context: int | None = None) -> Calibration:
    """Coordinates of every layer as formats take them, None where it has no keys, named by the SHA-256 of their numbers."""
    return Calibration(tuple(k), artifact.tensor_digest(_tensors(k), {}), context)


def _tensors(k: Sequence[Basis | None]) -> dict[str, Tensor]:
    return {
        f"layers.{layer}.k.{name}": getattr(basis, name).to(dtype).contiguous()
        for layer, basis in enumerate(k)
        if basis is not None
        for name, dtype in _DTYPES.items()
    }


def save(path: Path, file: CalibrationFile) -> None:
    """Write a calibration file; a ValueError if a number is not finite, an InputError if it cannot be written."""
    tensors = _tensors(file.calibration.k)
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor.float()).all()]:
        raise ValueError(f"{bad[0]} is not finite")
    metadata = {
        "model": json.dumps(file.shape.as_json(), sort_keys=True),
        "fingerprint": file.fingerprint,
        "context": str(file.calibration.context or ""),
        "learned": json.dumps(file.learned, sort_keys=True),
        "plan": file.plan,
    }
    artifact.write(path, CALIBRATION, metadata, tensors)


def load(path: Path | str, kind: Kind = CALIBRATION) -> CalibrationFile:
    """Read a calibration file, called `kind` in messages; an InputError if it cannot be read or is none."""
    metadata, tensors = artifact.read(Path(path), kind)
    with kind.refusing(path):
        shape, context = ModelShape.read(parse_json(metadata["model"])), metadata["context"]
        if context and not (context.isascii() and context.isdigit() and len(context) < 10 and int(context) > 0):
            raise ValueError("its context is not a number of tokens")
        calibration = make_calibration(
            [None if kv is None else _basis(tensors, layer, kv) for layer, kv in enumerate(shape.layers)],
            int(context) if context else None,
        )
        learned = parse_json(metadata["learned"])
        return CalibrationFile(calibration, shape, metadata["fingerprint"], learned, metadata["plan"])


def _basis(tensors: Mapping[str, Tensor], layer: int, kv: KVShape) -> Basis:
    heads, dim = kv.num_kv_heads, kv.head_dim
    matrices, vectors = (heads, dim, dim), (heads, dim)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "mean": (vectors,), "forward": (matrices,), "back": (matrices,), "weights": (vectors,),
        "inv_freq": tuple((count,) for count in range(dim // 2 + 1)),
    }  # fmt: skip
    parts = {}
    for name, dtype in _DTYPES.items():
        tensor = tensors[key := f"layers.{layer}.k.{name}"]
        if tuple(tensor.shape) not in shapes[name] or tensor.dtype != dtype:
            raise ValueError(f"{key} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shapes[name][-1])}")
        if not torch.isfinite(tensor.float()).all():
            raise ValueError(f"{key} is not finite")
        parts[name] = tensor if dtype == torch.float64 else tensor.float()
    return Basis(**parts)
