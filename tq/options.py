"""Kinds of values that several commands take."""

from __future__ import annotations

import click


class Numbers(click.ParamType[tuple[int, ...]]):
    """Integers, separated by commas.

    Args:
        least: the smallest that is taken.
    """

    name = "numbers"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and int(part) >= self._least for part in parts):
            kind = "positive integers" if self._least == 1 else f"integers from {self._least} on"
            self.fail(f"{value!r} is not a list of {kind} such as 512,4096", param, ctx)
        return tuple(int(part) for part in parts)
