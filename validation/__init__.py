"""Holding executors against the reference: `validate(reference, candidate, model, prompts, steps, plan) -> Report`.

Imported on first use: bring-up looks at a new machine before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haarkv.validation.layers.report import Report
    from haarkv.validation.layers.runner import validate

__all__ = ["Report", "validate"]
_MODULES = {"Report": "haarkv.validation.layers.report", "validate": "haarkv.validation.layers.runner"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
