"""Python warnings in the name of whoever uses the package, however many of its own frames lie between."""

from __future__ import annotations

import sys
import warnings

_BETWEEN = frozenset({"haarkv", "tq", "torch", "transformers"})
"""Packages whose lines nobody can change who reads the warning: this one, and those that call it back."""


class HaarkvWarning(UserWarning):
    """A warning of this package."""


def warn(message: str) -> None:
    """Warn, and name the line outside of `_BETWEEN` that led here; the outermost one if there is none."""
    frame, level = sys._getframe(1), 2  # 1 is this function's own line
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, HaarkvWarning, stacklevel=level)
