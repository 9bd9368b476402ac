"""Executors by name. A module is imported only when its executor is asked for."""

from __future__ import annotations

from executors.base import Executor
from models.qwen3_14b.model import Qwen3
from tq_ops.errors import InputError
from tq_ops.formats import KVFormat

NAMES = ("reference",)


def create(name: str, model: Qwen3, k_format: KVFormat, v_format: KVFormat) -> Executor:
    """An executor for a model and a pair of KV formats.

    Raises:
        InputError: no such executor, or it cannot run this model with these formats, with its reason.
    """
    if name not in NAMES:
        raise InputError(f"unknown executor {name!r}; choose from {', '.join(NAMES)}")
    from executors.reference import ReferenceExecutor

    executor = ReferenceExecutor(model)
    for kv_format in (k_format, v_format):
        if reason := executor.supports(model.config, kv_format):
            raise InputError(f"executor {name} cannot run this: {reason}")
    return executor
