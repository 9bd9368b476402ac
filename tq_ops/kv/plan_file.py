"""A KV plan as a file: JSON, every layer's formats written out, and the shape of the model that it was made for.

A plan with learned formats is stored in the file of its calibration, so that the two stay together; `load` reads both kinds.

    {"haarkv_plan": 1, "model": {"num_layers": 28, …}, "layers": ["k=tq5,v=tq4", …], "tail": null, "sink": 0, "measured": {…}}

`measured` is for people; nothing reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from haarkv.tq_ops import formats
from haarkv.tq_ops.artifact import CALIBRATION, PLAN
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import file_size, parse_json, read_file
from haarkv.tq_ops.kv import calibration_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.output_files import write_whole


def dumps(plan: KVPlan, shape: ModelShape, measurements: Mapping[str, Any] | None = None) -> str:
    """The text of a plan file; `measurements` says what the plan was chosen by."""
    content = {
        "haarkv_plan": 1,
        "model": shape.as_json(),
        "layers": [formats.describe(*pair) for pair in plan.layers],
        "tail": plan.recent,
        "sink": plan.sink,
        "measured": dict(measurements or {}),
    }
    return json.dumps(content, indent=1) + "\n"


def save(
    path: Path, plan: KVPlan, shape: ModelShape, measurements: Mapping[str, Any] | None = None,
    source: CalibrationFile | None = None,
) -> None:  # fmt: skip
    """Write a plan, into its calibration's file if it has one; an InputError if it cannot be written."""
    text = dumps(plan, shape, measurements)
    if source:
        calibration_file.save(path, replace(source, plan=text))
    else:
        write_whole(path, text)


def loads(text: str, name: str, source: CalibrationFile | None = None) -> KVSpec:
    """Parse the text of file `name`, with the calibration of its learned formats; an InputError if it is no plan, of another
    version, or contradicts itself.
    """
    with PLAN.refusing(name):
        content = parse_json(text)
        PLAN.require(content if isinstance(content, dict) else {})
        shape = ModelShape.read(content["model"])
        layers, tail, sink = read_layers(content, shape)
        calibration = source.calibration if source else None
        for spec in layers:
            formats.parse(spec, calibration)
        return KVSpec(
            tail=tail, sink=sink, layers=dict(enumerate(layers)), made_for=shape, calibration=calibration,
            weights=source.fingerprint if source else "",
        )  # fmt: skip


def read_layers(content: Mapping[str, Any], shape: ModelShape) -> tuple[list[str], int | None, int]:
    """Formats of each layer, tail and sink from JSON; a ValueError names what is wrong."""
    layers, tail, sink = content["layers"], content["tail"], content["sink"]
    if not isinstance(layers, list) or len(layers) != shape.num_layers or not all(isinstance(word, str) for word in layers):
        raise ValueError(f"it does not name the formats of {shape.num_layers} layers")
    if type(sink) is not int or not (tail is None or type(tail) is int):
        raise ValueError("tail and sink are not numbers of tokens")
    return layers, tail, sink


def load(path: Path | str) -> KVSpec:
    """Read a plan file; an InputError if it cannot be read or is no plan."""
    path = Path(path)
    file_size(path, "the KV plan ")
    with PLAN.refusing(path), path.open("rb") as file:
        begin = file.read(10)
    if begin[4:] == b'\0\0\0\0{"':  # a safetensors file, damaged or not: the length of its header comes first
        source = calibration_file.load(path, replace(CALIBRATION, noun="KV plan", remedy=PLAN.remedy))
        if not source.plan:
            raise InputError(f"{path} is a calibration without a plan; `tq plan --calibration {path}` makes one")
        return loads(source.plan, str(path), source)
    with PLAN.refusing(path):
        text = read_file(path).decode()
    return loads(text, str(path))
