"""Keyword arguments that a method hands on: a mistyped one is answered in the words of the method that was called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any


def require_arguments(called: str, method: Callable[..., Any], given: Mapping[str, Any], more: Iterable[str] = ()) -> None:
    """Refuse an argument that nothing takes.

    Args:
        called: how the method is called, as `Session.generate`.
        method: its keyword arguments are known.
        given: what it was handed beside them.
        more: names that are known as well.
    Raises:
        TypeError: as Python's own, with the name that was meant where one is near.
    """
    named = [name for name, each in signature(method).parameters.items() if each.kind is Parameter.KEYWORD_ONLY]
    known = [*named, *more]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{meant}")
