"""Commands and groups: headings in `--help`, near names for mistyped ones, command modules imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import InputError, RankLostError
from tq.options import IntRange, written_options

if TYPE_CHECKING:
    from haarkv.models.parallel import Ranks

_MANY = 12
"""Number of options from which a command's help has headings."""
_WIDEST = 110

_SECTIONS: Mapping[str, Sequence[str]] = {
    "Sides": ("--a", "--b"),
    "Text": (
        "--prompt", "--prompt-file", "--prompt-tokens", "--text", "--chat", "--system", "--template-arg", "--parse-special",
        "--max-new-tokens", "--max-context", "--stop",
    ),
    "Model and machine": (
        "--model", "--executor", "--device", "--dtype", "--layers", "--threads", "--isa", "--activation-bits", "--mmap",
        "--reference", "--tensor-parallel", "--rank-timeout", "--any-versions",
    ),
    "KV cache": (
        "--kv", "--kv-loss", "--calibration", "--kv-tail", "--kv-sink", "--kv-skip-layers", "--kv-plan", "--balance",
        "--allow-collapse", "--load-cache", "--save-cache",
    ),
    "Sampling": ("--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed"),
    "Drafts": ("--draft", "--draft-tokens", "--draft-kv"),
    "How much": (
        "--steps", "--repeat", "--repeats", "--contexts", "--batches", "--window", "--tokens", "--verify-tokens",
        "--only", "--memory", "--verify", "--budget", "--candidates", "--tails", "--sinks", "--context",
    ),
    "Results": (
        "--json", "--csv", "--html", "--replay", "--verbose", "--compare", "--save", "--out",
        "--resume", "--force", "--session",
    ),
}  # fmt: skip
"""Headings of long lists of options."""


class Command(click.Command):
    """A command; many options stand under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*_SECTIONS, "Options")}
        for option in options:
            heading = option_section(option) if len(options) > _MANY else ""
            if record := option.get_help_record(ctx):
                rows[heading or "Options"].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def option_section(option: click.Option) -> str:
    """The heading of an option; "" for none."""
    return next((heading for heading, names in _SECTIONS.items() if option.opts[0] in names), "")


class Group(click.Group):
    """Commands under headings, imported on use.

    Args:
        sections: heading -> command -> `module:attribute`, or a module with a `command`; empty where decorators add commands.
    """

    command_class = Command

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in self.sections.values() for name in commands] or list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for commands in self.sections.values():
            if cmd_name in commands:
                module, _, attribute = commands[cmd_name].partition(":")
                command: click.Command = getattr(import_module(module), attribute or "command")
                return command
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, names = args[0], self.list_commands(ctx)
        if name in names or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = get_close_matches(name, names, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"`{ctx.command_path} --help` lists them all"
        raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: Mapping[str, Mapping[str, Any]] = self.sections or {"Commands": self.commands}
        for heading, names in sections.items():
            commands = {name: command for name in names if (command := self.get_command(ctx, name)) and not command.hidden}
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(_WIDEST)) for name, command in commands.items()])


# -- Ranks -----------------------------------------------------------------------------------------------------------------


def tensor_parallel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--tensor-parallel` and `--rank-timeout`, and an argument `ranks`: processes that torchrun started."""

    @click.option(
        "--tensor-parallel",
        "size",
        type=IntRange(min=1),
        metavar="N",
        default=1,
        show_default=True,
        help="Split the model over the N processes that torchrun started: N GPUs, N NPUs, or N processes on the CPU.",
    )
    @click.option(
        "--rank-timeout", "timeout_s", type=click.FloatRange(min=1), metavar="S", default=600, show_default=True,
        help="End if one of them does not answer for S seconds.",
    )  # fmt: skip
    @wraps(function)
    def run(*args: Any, size: int, timeout_s: float, **kwargs: Any) -> Any:
        from haarkv.models.parallel import SINGLE_RANK

        if size == 1:
            if "timeout_s" in written_options():
                raise click.UsageError("--rank-timeout is of ranks that wait for each other; give --tensor-parallel as well")
            return function(*args, ranks=SINGLE_RANK, **kwargs)
        from haarkv.engine.ranks import join, started_by_torchrun
        from haarkv.models.catalog import read_config
        from haarkv.models.parallel import Split

        if "model" in kwargs:
            Split(read_config(kwargs["model"], kwargs.get("layers")), 0, size)  # refuses a number that does not divide it
        if not started_by_torchrun():
            raise click.UsageError(f"torchrun starts the ranks: torchrun --nproc-per-node {size} -m tq and this command")
        with join(size, timeout_s) as ranks, _rank_0_prints(ranks):
            return function(*args, ranks=ranks, **kwargs)

    return run


@contextmanager
def _rank_0_prints(ranks: Ranks) -> Iterator[None]:
    """Silence the other ranks; they end with exit code 2 where rank 0 says why."""
    if ranks.rank == 0:
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            yield
        except RankLostError:
            raise
        except InputError:
            raise SystemExit(2) from None
