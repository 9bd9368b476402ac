"""A KV plan as a file: JSON, every layer's formats written out, and the shape of the model that it was made for.

A plan of learned formats is kept in its calibration's file, so that the two cannot be parted; `load` reads either.

    {"haarkv_plan": 1, "model": {"num_layers": 28, …}, "layers": ["k=tq5,v=tq4", …], "tail": null, "sink": 0, "measured": {…}}

`measured` is for people; nothing reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import parse_json, read_file
from haarkv.tq_ops.kv import calibration_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, is_calibration
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.safetensors_header import lacks, metadata_of, start_of

_VERSION = 1
_KEYS = {"haarkv_plan", "model", "layers", "tail", "sink"}


def dumps(plan: KVPlan, shape: ModelShape, measured: Mapping[str, Any] | None = None) -> str:
    """The text of a plan file.

    Args:
        measured: what the plan was chosen by.
    """
    content = {
        "haarkv_plan": _VERSION,
        "model": shape.as_json(),
        "layers": [formats.describe(*pair) for pair in plan.layers],
        "tail": plan.recent,
        "sink": plan.sink,
        "measured": dict(measured or {}),
    }
    return json.dumps(content, indent=1) + "\n"


def loads(text: str, name: str, learned: CalibrationFile | None = None) -> KVSpec:
    """What the text of a plan file asks for.

    Args:
        name: of the file, for messages.
        learned: the calibration that the plan is of, if its formats are learned.
    Raises:
        InputError: no plan, one of another version, or one that contradicts itself.
    """
    try:
        content = parse_json(text)
        if not isinstance(content, dict) or not content.keys() >= _KEYS:
            raise ValueError("it lacks " + ", ".join(sorted(_KEYS - set(content if isinstance(content, dict) else ()))))
        if content["haarkv_plan"] != _VERSION:
            raise ValueError(f"its version is {shown(content['haarkv_plan'])}, not {_VERSION}")
        shape = ModelShape.read(content["model"])
        layers, tail, sink = content["layers"], content["tail"], content["sink"]
        if not isinstance(layers, list) or len(layers) != shape.num_layers:
            raise ValueError(f"it does not name the formats of {shape.num_layers} layers")
        if type(sink) is not int or not (tail is None or type(tail) is int):
            raise ValueError("tail and sink are not numbers of tokens")
        calibration = learned.calibration if learned else None
        for spec in layers:
            formats.parse(str(spec), calibration)
        return KVSpec(
            tail=tail, sink=sink, layers=dict(enumerate(map(str, layers))), made_for=shape, calibration=calibration,
            weights=learned.fingerprint if learned else "",
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{name} is no KV plan: {error}; `tq plan` writes one") from None


def load(path: Path | str) -> KVSpec:
    """Read a plan file.

    Raises:
        InputError: it cannot be read or is no plan.
    """
    begin = start_of(Path(path), "the plan ")
    if is_calibration(begin):
        metadata: Mapping[str, str] | None = None
        with suppress(ValueError):  # damaged, which is said below
            metadata = metadata_of(begin)
        if metadata is not None and "haarkv_calibration" not in metadata:
            raise InputError(f"{path} is no KV plan: {lacks(metadata, 'haarkv_calibration')}; `tq plan` writes one")
        learned = calibration_file.load(path)
        if not learned.plan:
            raise InputError(f"{path} is a calibration without a plan; `tq plan --calibration {path}` makes one")
        return loads(learned.plan, str(path), learned)
    try:
        return loads(read_file(Path(path), what="the plan ").decode(), str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path} is no KV plan: it is not UTF-8; `tq plan` writes one") from None
