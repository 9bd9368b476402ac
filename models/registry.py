"""Model families by the `model_type` of their `config.json`. A family is imported only when a model of it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:
    from haarkv.models.base import Family

FAMILIES = {
    "qwen3": "haarkv.models.qwen3_14b",
    "qwen3_moe": "haarkv.models.qwen3_moe",
    "llama": "haarkv.models.llama",
    "mistral": "haarkv.models.llama",
    "qwen2": "haarkv.models.llama",
    "gemma": "haarkv.models.gemma",
    "gemma3_text": "haarkv.models.gemma",
    "qwen3_5": "haarkv.models.qwen3_hybrid",
    "qwen3_5_text": "haarkv.models.qwen3_hybrid",
    "qwen3_5_moe": "haarkv.models.qwen3_hybrid",
    "qwen3_5_moe_text": "haarkv.models.qwen3_hybrid",
    "qwen3_next": "haarkv.models.qwen3_hybrid",
}
"""The module of each `model_type`; what it must hold says `models.base.Family`."""


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        InputError: there is none.
    """
    if model_type not in FAMILIES:
        raise InputError(f"{model_type!r} models are not built here; known are {', '.join(FAMILIES)}")
    return cast("Family", import_module(FAMILIES[model_type]))
