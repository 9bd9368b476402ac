"""The options by which every command takes a KV plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from haarkv.tq_ops.kv.plan import KVSpec


class _Layers(click.ParamType[tuple[int, ...]]):
    """Layers with commas between; negative ones count from the end."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of layers; write numbers with commas between, as 0,1,-1", param, ctx)


_KV = click.option("--kv", default="tq4", show_default=True, help="A format of `tq formats`, or k=NAME,v=NAME.")
_PLAN = click.option("--kv-plan", metavar="FILE", help="A plan of `tq plan`; names every layer's formats.")
_BESIDE = (
    click.option("--kv-tail", type=click.IntRange(min=0), metavar="R", help="Recent tokens that stay in BF16."),
    click.option("--kv-sink", type=click.IntRange(min=0), default=0, metavar="S", help="First tokens that stay in BF16."),
    click.option("--kv-skip-layers", type=_Layers(), default=(), metavar="LIST", help="Layers left in bf16, as 0,1,-1."),
)


def kv_options(kv: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `--kv-tail`, `--kv-sink` and `--kv-skip-layers`.

    Args:
        kv: `--kv` and `--kv-plan` as well.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((_KV, *_BESIDE, _PLAN) if kv else _BESIDE):
            function = option(function)
        return function

    return decorate


def kv_spec(given: Mapping[str, Any]) -> KVSpec:
    """What those options ask for.

    Args:
        given: a command's arguments by name; of those that it has not, the default.
    Raises:
        click.UsageError: a plan file together with what it says already.
        InputError: a file that is no plan.
    """
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.tq_ops.kv.plan_file import load

    if (file := given.get("kv_plan")) is None:
        return KVSpec(given.get("kv", "tq4"), given["kv_tail"], given["kv_sink"], given["kv_skip_layers"])
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in ("kv", "kv_tail", "kv_sink", "kv_skip_layers"):
            source = context.get_parameter_source(option.name)
            if source is not click.core.ParameterSource.DEFAULT:
                raise click.UsageError(f"--kv-plan says all about the cache; leave out {option.opts[0]}")
    return load(file)
