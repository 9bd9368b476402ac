"""Caches that were chosen for models, kept in the user's cache folder with their coordinates.

A choice is found by the model's settings, weights and tokenizer, the files' sizes and times, and the bound. Its calibration
names the weights, which a session checks. An unreadable file is chosen anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from haarkv.engine.plans import plan_for, shape_signature
from haarkv.models.catalog import open_source, read_config
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning.auto import CHOSEN_BY, LOSS, CacheChoice, choose, names_for
from haarkv.validation.planning.calibrate import load_subject

_VERSION = 8

def home() -> Path:
    """The folder of all choices."""
    return Path.home() / ".cache" / "haarkv" / "kv-auto"


def file_for(model: str, loss: float, layers: int | None = None, executor: str | None = None) -> Path:
    """Where the choice for a model is kept; an executor that reads few formats has one of its own."""
    source, declaration = open_source(model), shape_signature(read_config(model, layers)).declaration
    files = [] if source is None else source.files()
    file_stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    about = [
        _VERSION,
        model if source is None else "",
        layers,
        declaration,
        file_stamps,
        loss,
        names_for(executor),
        *CHOSEN_BY,
    ]
    return home() / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]}.safetensors"


def chosen_before(file: Path) -> KVSpec | None:
    """The choice in a file, if it can be read."""
    if not file.exists():
        return None
    try:
        return plan_file.load(file)
    except InputError:
        return None


def remember(file: Path, choice: CacheChoice) -> None:
    """Keep a choice; a folder that cannot be written keeps none."""
    measurements = {"said": str(choice), "rows": [row.measurements for row in choice.rows]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        plan_file.save(file, plan_for(choice.spec, choice.config), choice.file.shape, measurements, choice.file)
    except (OSError, InputError):
        return


def cache_for(
    model: str,
    *,
    loss: float = LOSS,
    layers: int | None = None,
    executor: str | None = None,
    on_choice: Callable[[str], object] = lambda _: None,
    on_step: Callable[[str, int], None] = lambda *_: None,
    **how: Any,
) -> KVSpec:
    """The cache of a model where none is named: chosen before, or now.

    Args:
        executor: that will run it, if named; only formats that it reads are chosen.
        on_choice: gets in one line what was chosen now, and why.
        how: as in `calibrate.load_subject`.
    """
    read_config(model, layers)
    file = file_for(model, loss, layers, executor)
    if (saved_spec := chosen_before(file)) is not None:
        return saved_spec
    choice = choose(load_subject(model, layers=layers, **how), loss, on_step, names_for(executor))
    remember(file, choice)
    on_choice(str(choice))
    return choice.spec
