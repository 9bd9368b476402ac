"""A KV plan as a file: JSON, every layer's formats written out, and the shape of the model that it was made for.

A plan of learned formats is kept in its calibration's file, so that the two cannot be parted; `load` reads either.

    {"haarkv_plan": 1, "model": {"num_layers": 28, …}, "layers": ["k=tq5,v=tq4", …], "tail": null, "sink": 0, "measured": {…}}

`measured` is for people; nothing reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, is_calibration
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec, ModelShape

_VERSION = 1
_KEYS = {"haarkv_plan", "model", "layers", "tail", "sink"}


def dumps(plan: KVPlan, shape: ModelShape, measured: Mapping[str, Any] | None = None) -> str:
    """The text of a plan file.

    Args:
        measured: what the plan was chosen by.
    """
    content = {
        "haarkv_plan": _VERSION,
        "model": asdict(shape),
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
        content = json.loads(text)
        if not isinstance(content, dict) or not content.keys() >= _KEYS:
            raise ValueError("it lacks " + ", ".join(sorted(_KEYS - set(content if isinstance(content, dict) else ()))))
        if content["haarkv_plan"] != _VERSION:
            raise ValueError(f"its version is {content['haarkv_plan']}, not {_VERSION}")
        shape = ModelShape(**{key: int(value) for key, value in content["model"].items()})
        layers, tail, sink = content["layers"], content["tail"], content["sink"]
        if not isinstance(layers, list) or len(layers) != shape.num_layers:
            raise ValueError(f"it does not name the formats of {shape.num_layers} layers")
        if not isinstance(sink, int) or not (tail is None or isinstance(tail, int)):
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
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"the plan {path} cannot be read: {error.strerror}") from None
    if is_calibration(content):
        learned = calibration_file.loads(content, str(path))
        if not learned.plan:
            raise InputError(f"{path} is a calibration without a plan; `tq plan --calibration {path}` makes one")
        return loads(learned.plan, str(path), learned)
    try:
        return loads(content.decode(), str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path} is no KV plan: it is not UTF-8; `tq plan` writes one") from None
