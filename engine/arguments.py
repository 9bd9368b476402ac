"""Arguments of a method: a mistyped one is answered in the words of the method that was called, a wrong value by its name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from operator import index
from typing import Any

from haarkv.tq_ops.errors import InputError


def require_arguments(
    called: str, method: Callable[..., Any], given: Mapping[str, Any], more: Iterable[str] = (), but: Container[str] = ()
) -> None:  # fmt: skip
    """Refuse an argument that nothing takes.

    Args:
        called: how the method is called, as `Session.generate`.
        method: its keyword arguments are known.
        given: what it was handed beside them.
        more: names that are known as well.
        but: of the method's, those that it is not handed.
    Raises:
        TypeError: as Python's own, with the name that was meant where one is near.
    """
    named = [name for name, each in signature(method).parameters.items() if each.kind is Parameter.KEYWORD_ONLY]
    known = [name for name in (*named, *more) if name not in but]
    for name in given:
        if name not in known:
            close = [] if name in but else get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{meant}")


def require_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no integer, or too small a one.

    Raises:
        InputError: by the argument's name.
    """
    try:
        count = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name} must be a whole number, not {value!r}") from None
    if count < least:
        raise InputError(f"{name} must be at least {least}, not {value}")
