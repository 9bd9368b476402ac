"""Errors a user can cause, warnings, and words of messages. The command prints an error on one line and exits with 2."""

import sys
import warnings


class InputError(ValueError):
    """What was asked for cannot be done; the message says what is wrong and what to do."""


class RankLostError(InputError):
    """Another process that runs a part of the model has ended, or did not answer in time."""


class NonFiniteError(InputError):
    """A value that should be finite is infinite or NaN; the message says where it was first seen."""


_BETWEEN = frozenset({"haarkv", "tq", "torch", "transformers"})
"""Packages whose lines a user cannot change: this one, and those that call it back."""


class HaarkvWarning(UserWarning):
    """A warning of this package."""


def warn(message: str) -> None:
    """Warn, and name the line outside of `_BETWEEN` that led here; the outermost one if there is none."""
    frame, level = sys._getframe(1), 2  # 1 is this function's own line
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, HaarkvWarning, stacklevel=level)


def count_noun(number: int, noun: str) -> str:
    """A number and its noun, for messages: `1 token`, `2 tokens`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
