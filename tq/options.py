"""Kinds of values that several commands take."""

from __future__ import annotations

import click


class Numbers(click.ParamType[tuple[int, ...]]):
    """Positive integers, separated by commas."""

    name = "numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of positive integers such as 512,4096", param, ctx)
        return tuple(int(part) for part in parts)
