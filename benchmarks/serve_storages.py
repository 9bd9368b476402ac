"""How a server of the benchmark keeps K and V: a format, a pair of them, learned coordinates, or a plan's file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from haarkv.engine.plans import shape_of
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, calibration_of
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

_ANY_WEIGHTS = "0" * 16
"""The fingerprint of made-up coordinates: they belong to random weights, which are not compared."""


@dataclass(frozen=True)
class Storage:
    """One way to keep K and V.

    Attributes:
        name: what rows call it.
        flags: of `tq serve`.
        spec: the same here.
    """

    name: str
    flags: tuple[str, ...]
    spec: KVSpec

    def plan(self, config: ModelConfig) -> KVPlan:
        """For a model of these shapes."""
        return self.spec.plan(config.num_layers)


def names_in(text: str) -> list[str]:
    """Formats with commas between: `bf16,tq4,k=lr128,v=lr64` names three.

    Raises:
        InputError: one of them is none.
    """
    names = list(dict.fromkeys(part.strip() for part in re.split(r",(?!\s*v=)", text)))
    for name in names:
        formats.parse(name, made_up.calibration())  # of any model: which nibbles there are does not depend on it
    return names


def storages(
    names: Sequence[str],
    plans: Sequence[Path],
    calibration: Path | None,
    config: ModelConfig,
    scratch: Path,
    *,
    random: bool,
) -> list[Storage]:
    """What is asked for, in order, formats first.

    Args:
        names: of formats.
        plans: files of `tq plan`.
        calibration: a file of `tq calibrate`, for formats `lrN`.
        config: of the model that is served.
        scratch: a folder for made-up coordinates: they take as long as learned ones, and random weights fit any.
        random: whether its weights are.
    Raises:
        InputError: learned formats of a model with weights, without a calibration; or a file that does not fit.
    """
    found, learned = [], None
    for name in names:
        if not formats.needs_calibration(name):
            found.append(Storage(name, ("--kv", name), KVSpec(name)))
            continue
        if learned is None:
            if calibration is None and not random:
                raise InputError(f"{name} needs coordinates of this model; give --calibration FILE")
            learned = calibration or _made_up(config, scratch)
        spec = replace(calibration_file.load(learned).spec, kv=name)
        found.append(Storage(name, ("--kv", name, "--calibration", str(learned)), spec))
    found += [Storage(file.stem, ("--kv-plan", str(file)), plan_file.load(file)) for file in plans]
    for storage in found:
        storage.spec.plan(config.num_layers, shape_of(config))
    return found


def _made_up(config: ModelConfig, scratch: Path) -> Path:
    made = made_up.calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
    path = scratch / "made-up.safetensors"
    file = CalibrationFile(calibration_of(made.k, made.v), shape_of(config), _ANY_WEIGHTS)
    path.write_bytes(calibration_file.dumps(file))
    return path
