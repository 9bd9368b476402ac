"""Caches that were chosen for models, kept in the user's cache folder with their coordinates.

A choice is found by the model's settings, weights and tokenizer, the files' sizes and times, and the bound. Its calibration
names the weights, which a session checks. An unreadable file is chosen anew. A GGUF file may hold the choice for the default
bound itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from haarkv.engine.plans import plan_for, shape_signature
from haarkv.models.catalog import open_source, read_config, weights_fingerprint
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.output_files import write_whole
from haarkv.validation.planning.auto import LOSS, TOKENS, CacheChoice, choose, reading
from haarkv.validation.planning.calibrate import load_subject

_VERSION = 9


def home() -> Path:
    """The folder of all choices."""
    return Path.home() / ".cache" / "haarkv" / "kv-auto"


def file_for(model: str, loss: float, layers: int | None = None, executor: str | None = None) -> Path:
    """Where the choice for a model is kept; an executor that reads few formats has one of its own."""
    source, config = open_source(model), read_config(model, layers)
    files = [] if source is None else source.files()
    file_stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    about = [
        _VERSION,
        model if source is None else "",
        layers,
        shape_signature(config).declaration,
        file_stamps,
        loss,
        asdict(reading(config, executor)),
        TOKENS,
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
        plan_file.save(file, plan_for(choice.spec, choice.config), shape_signature(choice.config), measurements, choice.file)
    except (OSError, InputError):
        return


def take(path: Path, model: str, loss: float, layers: int | None = None, executor: str | None = None) -> KVSpec:
    """Remember a plan file as the choice for a model; an InputError if it is of another model or other weights."""
    file, spec = file_for(model, loss, layers, executor), plan_file.load(path)
    plan_for(spec, read_config(model, layers))
    if spec.weights:
        spec.require_weights(weights_fingerprint(model, layers))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, path.read_bytes())
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from None
    return spec


def saved_choice(
    model: str,
    loss: float = LOSS,
    layers: int | None = None,
    executor: str | None = None,
    on_choice: Callable[[str], object] = lambda _: None,
) -> KVSpec | None:
    """The choice made before, or that in the model's own file, which is remembered if it is of the file's weights."""
    if (spec := chosen_before(file_for(model, loss, layers, executor))) is not None:
        return spec
    source, config = open_source(model), read_config(model, layers)
    content = source.kv_choice() if source else b""
    if not content or loss != LOSS or reading(config, executor) != reading(config):
        return None
    with suppress(OSError, InputError), TemporaryDirectory() as folder:
        path = Path(folder) / "choice"
        path.write_bytes(content)
        spec = take(path, model, loss, layers, executor)
        on_choice(f"taking the KV cache that is stored in {model}")
        return spec
    return None


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
    if (saved_spec := saved_choice(model, loss, layers, executor, on_choice)) is not None:
        return saved_spec
    choice = choose(load_subject(model, layers=layers, **how), loss, on_step, executor)
    remember(file_for(model, loss, layers, executor), choice)
    on_choice(str(choice))
    return choice.spec
