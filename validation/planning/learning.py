"""How far a calibration has come, so that another run can go on: bytes in, bytes out, no files here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.safetensors_header import metadata_of
from haarkv.tq_ops.kv.tensor_digest import digest_of

_VERSION = "3"


@dataclass
class Learning:
    """The layers that have been learned, and what enters the next one.

    Attributes:
        layers: K's and V's coordinates of each layer so far.
        fits: of the same layers, how many times as much K and V cost on held-back text as on the text learned from.
        hidden: [T, hidden] of all windows one after the other; None before the first layer.
    """

    layers: list[tuple[Basis, Basis]] = field(default_factory=list)
    fits: list[tuple[float, float]] = field(default_factory=list)
    hidden: Tensor | None = None


def dumps(learning: Learning, run: Mapping[str, str]) -> bytes:
    """The bytes of a resume file.

    Args:
        run: what another run must have in common with this one, by a word for the user.
    """
    tensors = {
        f"{layer}.{side}.{of.name}": getattr(basis, of.name).contiguous()
        for layer, pair in enumerate(learning.layers)
        for side, basis in zip("kv", pair, strict=True)
        for of in fields(Basis)
    }
    if learning.hidden is not None:
        tensors["hidden"] = learning.hidden.contiguous()
    metadata = {"haarkv_calibrating": _VERSION, "run": json.dumps(dict(run)), "fits": json.dumps(learning.fits)}
    content: bytes = save(tensors, metadata | {"sha256": digest_of(tensors, metadata)})
    return content


def loads(content: bytes, run: Mapping[str, str]) -> Learning:
    """What an earlier run has saved.

    Raises:
        InputError: bytes that are none of this, or of another run, or damaged.
    """
    try:
        metadata, tensors = metadata_of(content), load(content)
        version = metadata["haarkv_calibrating"]
        if version != _VERSION:
            raise InputError(f"--resume: the file is of version {version}, not {_VERSION}; begin a new one")
        if digest_of(tensors, {key: value for key, value in metadata.items() if key != "sha256"}) != metadata["sha256"]:
            raise InputError("--resume: the file is damaged; begin a new one")
        before = parse_json(metadata["run"])
        fits = [(float(k), float(v)) for k, v in parse_json(metadata["fits"])]
        layers = [
            tuple(Basis(**{of.name: tensors[f"{layer}.{side}.{of.name}"] for of in fields(Basis)}) for side in "kv")
            for layer in range(len(fits))
        ]
        hidden = tensors["hidden"]
    except InputError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError("--resume: the file is no half-done calibration; begin a new one") from None
    for what, value in run.items():
        if before.get(what) != value:
            raise InputError(f"--resume: the file was begun with another {what}; begin a new one")
    return Learning([(k, v) for k, v in layers], fits, hidden)
