"""Every KV format by name.

>>> from haarkv.tq_ops import formats
>>> formats.get("tq4").bytes_per_vector(128)
66.0
>>> [f.name for f in formats.parse("k=bf16,v=tq4")]
['bf16', 'tq4']

To add a format, write a subclass of `KVFormat`, or a `RotatedFormat` with a description, and an entry in `_FORMATS`. Its
description decides which executors run it (`kv.kernel_support`). CONTRIBUTING.md lists all files that you edit.
"""

from __future__ import annotations

from typing import Literal

import torch

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, KVFormat, NonFiniteVectorError, Plain, stored_bytes
from haarkv.tq_ops.formats.compared import FP8E4M3, BlockQ4, BlockQ8, HadamardTBQ4, HadamardTQ3, Manthan3, kivi_pair
from haarkv.tq_ops.formats.learned import COLUMNS, PREFIX, Calibration, learned_bits, unlearned
from haarkv.tq_ops.formats.rotated import SEED_EPS, TurboQuant, TurboQuant4Seed, rotated_pair

Side = Literal["k", "v"]

PUBLISHED = TurboQuant4Seed()
"""The layout of the published kernels, to repeat their experiment."""

# One entry for each format; a pair if K and V are stored differently. tq4 comes first: it is the default of options.
_FORMATS: tuple[KVFormat | tuple[KVFormat, KVFormat], ...] = (
    TurboQuant(4, "rotated; fastest to read"),
    PUBLISHED,
    *(rotated_pair(bits) for bits in (2, 3)),
    *(TurboQuant(bits, f"as tq4, with {bits} bits") for bits in (5, 6, 8)),
    Manthan3(),
    HadamardTQ3(),
    HadamardTBQ4(),
    *(kivi_pair(bits, group) for bits in (2, 4) for group in (32, 64, 128)),
    BlockQ4(),
    BlockQ8(),
    FP8E4M3(),
    Plain("bf16", torch.bfloat16, "no quantization, two bytes a value"),
    Plain("fp32", torch.float32, "exact, to check FP32 runs"),
)
BY_NAME = {k.name: (k, v) for k, v in (f if isinstance(f, tuple) else (f, f) for f in _FORMATS)}
"""K's and V's format by name; the laboratory adds others."""


def names() -> list[str]:
    """Every format's name, tq4 first."""
    return list(BY_NAME)


def learned_names() -> list[str]:
    """Names of the formats of learned keys, which need a calibration."""
    return [f"{PREFIX}{bits}" for bits in COLUMNS]


def get(name: str, side: Side = "k", calibration: Calibration | None = None) -> KVFormat:
    """The format with this name; `side` matters if K and V are stored differently.

    Args:
        calibration: learned coordinates for `lrB`.
    Raises:
        InputError: no format has this name (the message lists all), or `lrB` without a calibration.
    """
    if bits := learned_bits(name):
        if side == "v":
            raise InputError(f"{name} stores keys only; values have nothing to learn. Write k={name},v=tq{bits}")
        if calibration is None:
            needs = f"{name} needs the coordinates that `tq calibrate` learns of a model"
            raise InputError(f"{needs}; give its file with --calibration")
        return calibration.format(bits)
    if name not in BY_NAME:
        known_names = ", ".join(names())
        raise InputError(f"unknown KV format {name!r}; choose from {known_names}, or k=lrB with a calibration")
    k_format, v_format = BY_NAME[name]
    return k_format if side == "k" else v_format


def parse(spec: str, calibration: Calibration | None = None) -> tuple[KVFormat, KVFormat]:
    """The formats of K and V from `NAME` or `k=NAME,v=NAME`.

    Raises:
        InputError: spec has neither form, a name is unknown, or `lrB` has no calibration.
    """
    if "=" not in spec:
        # V first: if the format stores keys only, this error says what to write instead.
        v_format = get(spec, "v", calibration)
        return get(spec, "k", calibration), v_format
    sides = dict(part.strip().split("=", 1) for part in spec.split(",") if "=" in part)
    if sides.keys() != {"k", "v"} or spec.count(",") != 1:
        raise InputError(f"cannot read the KV format {spec!r}; write a name, or k=NAME,v=NAME")
    return get(sides["k"], "k", calibration), get(sides["v"], "v", calibration)


def needs_calibration(spec: str) -> bool:
    """Whether `NAME` or `k=NAME,v=NAME` names a format of learned keys."""
    names = [part.split("=")[-1].strip() for part in spec.split(",")]
    return any(learned_bits(name) for name in names)


def describe(k_format: KVFormat, v_format: KVFormat) -> str:
    """The inverse of `parse`."""
    return k_format.name if k_format.name == v_format.name else f"k={k_format.name},v={v_format.name}"


__all__ = [
    "BY_NAME",
    "PUBLISHED",
    "SEED_EPS",
    "Calibration",
    "Field",
    "KVFormat",
    "NonFiniteVectorError",
    "Side",
    "describe",
    "get",
    "learned_names",
    "names",
    "needs_calibration",
    "parse",
    "stored_bytes",
    "unlearned",
]
