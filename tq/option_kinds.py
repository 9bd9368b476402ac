"""What options are made of: kinds of values, several options as one, and which of them a user wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import click

from haarkv.tq_ops.input_files import parse_json

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Decorator) -> Decorator:
    """Several options as one, in the order in which `--help` shall list them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def written() -> dict[str, str]:
    """Of the command that runs, the options that its user wrote: by the names of their arguments, as they are written."""
    context, default = click.get_current_context(), click.core.ParameterSource.DEFAULT
    return {
        option.name: option.opts[0] for option in context.command.params
        if option.name and context.get_parameter_source(option.name) is not default
    }  # fmt: skip


# -- Kinds of values -------------------------------------------------------------------------------------------------------


def integers(text: str) -> tuple[int, ...]:
    """Integers with commas between; nothing if one of the parts is none, or is longer than any that means something."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[+-]?[0-9]{1,18}", part) for part in parts):
        return ()
    return tuple(map(int, parts))


class IntRange(click.IntRange):
    """click's, which would say of `abc` that it is no valid "integer range"."""

    name = "integer"


_LAYERS = "layers; write numbers with commas between, such as 0,1,-1"


class Numbers(click.ParamType[tuple[int, ...]]):
    """Integers, separated by commas.

    Args:
        least: the smallest that is taken; None takes layers, of which negative ones count from the end.
    """

    name = "numbers"

    def __init__(self, least: int | None = 1) -> None:
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers = integers(str(value))
        if not numbers or min(numbers) < (min(numbers) if self._least is None else self._least):
            kind = "positive integers" if self._least == 1 else f"integers from {self._least} up"
            wanted = _LAYERS if self._least is None else f"{kind} such as 512,4096"
            self.fail(f"{shown(value)} is not a list of {wanted}", param, ctx)
        return numbers


class Assignment(click.ParamType[tuple[str, Any]]):
    """NAME=VALUE; the value is JSON if it can be, else text."""

    name = "assignment"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{shown(value)} is no NAME=VALUE, such as enable_thinking=false", param, ctx)
        try:
            return name, parse_json(text)
        except ValueError:
            return name, text


def numbers(name: str, about: str, default: str | None = None, *, least: int = 1, metavar: str | None = None) -> Decorator:
    """An option that takes a list of integers; with a default, which `--help` then shows."""
    shows = default is not None
    return click.option(name, type=Numbers(least), default=default, show_default=shows, metavar=metavar, help=about)


def count(
    name: str, about: str | None = None, default: int | None = None, *, least: int = 1, metavar: str | None = None
) -> Decorator:
    """An option that takes an integer from `least` up; with a default, which `--help` then shows."""
    kind, shows = IntRange(min=least), default is not None
    return click.option(name, type=kind, default=default, show_default=shows, metavar=metavar, help=about)


def file(name: str, about: str, variable: str | None = None, *, metavar: str = "FILE", required: bool = False) -> Decorator:
    """An option that takes a path, under `variable` unless that is what it is called."""
    names = (name, variable) if variable else (name,)
    return click.option(*names, type=click.Path(path_type=Path), metavar=metavar, required=required, help=about)


def new_tokens(default: int = 64) -> Decorator:
    """Give a command `--max-new-tokens`."""
    return count("--max-new-tokens", default=default, metavar="N")


_THREADS = 2
"""That every machine takes: some commands ask for as many where nobody says otherwise."""


def set_threads(threads: int | None) -> None:
    """Use `threads` CPU threads, if a number was asked for.

    Raises:
        click.UsageError: more than this machine has processors, which would only wait for each other.
    """
    if threads is not None:
        processors = os.cpu_count() or 1
        most = max(_THREADS, processors)
        if threads > most:
            has = f"{processors} processor{'s' * (processors != 1)}"
            raise click.UsageError(f"--threads {shown(threads)}: this machine has {has}; give at most {most}")
        import torch

        torch.set_num_threads(threads)
