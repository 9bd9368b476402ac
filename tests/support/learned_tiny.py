"""Coordinates learned of `tiny` from a little text, and plans of them, as `tq calibrate` and `tq plan` would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from haarkv.models.tiny_qwen3.corpus import train_texts
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.validation.planning.calibrate import load_subject

WINDOWS, WINDOW = 8, 384


@cache
def tiny_calibration() -> CalibrationFile:
    """From windows of as many training files; in some seconds. It is no calibration to measure fidelity with."""
    subject = load_subject("tiny", executor="cpu", dtype="bfloat16")
    texts = [text for text in train_texts() if len(text) > 8 * WINDOW][::40][:WINDOWS]
    windows = [torch.tensor(subject.tokenizer.encode(text[: 8 * WINDOW])[:WINDOW]) for text in texts]
    return subject.calibration_file(subject.learn(windows, []), {})


def write_plan(path: Path, layers: Sequence[str], *, recent: int | None = None, sink: int = 0, **changes: object) -> Path:
    """A plan of these formats, layer by layer, with its calibration in one file.

    Args:
        recent, sink: tokens in BF16, as of `KVPlan`.
        changes: fields of the file, such as `fingerprint`.
    """
    file = tiny_calibration()
    plan = KVPlan(tuple(formats.parse(kv, file.calibration) for kv in layers), recent, sink)
    fields: Mapping[str, object] = {**vars(file), "plan": plan_file.dumps(plan, file.shape), **changes}
    calibration_file.save(path, CalibrationFile(**fields))
    return path
