"""Commands and groups of them: what `--help` looks like, and what a mistyped name is answered with.

A group imports the module of a command when it is used. Commands stand under headings, and so do the options of a command that
has many. On a narrow terminal what explains a name stands beneath it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from shutil import get_terminal_size
from typing import Any, ClassVar

import click

_MANY = 12
"""Options of a command that are still one list."""
_WIDEST = 110
_NAMES, _NARROW = 30, 60
"""Columns of names at most, and the width of a terminal below which each name has a line of its own."""

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
        "--greedy-prompts", "--only", "--memory", "--verify", "--budget", "--candidates", "--tails", "--sinks", "--context",
    ),
    "Results": (
        "--json", "--csv", "--html", "--replay", "--verbose", "--compare", "--compress", "--save", "--out",
        "--resume", "--force", "--session",
    ),
}  # fmt: skip
"""Headings of long lists of options."""


class _Formatter(click.HelpFormatter):
    """Leaves room for explanations on a narrow terminal too; click's own takes at least 50 columns."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = min(get_terminal_size().columns, max_width or _WIDEST) - 2
        super().__init__(indent_increment, width or max(columns, 24), max_width)

    def write_dl(self, rows: Any, col_max: int = _NAMES, col_spacing: int = 2) -> None:
        """As click's; below `_NARROW` columns names stand on lines of their own."""
        super().write_dl(rows, col_max if self.width >= _NARROW else 4, col_spacing)


class _Context(click.Context):
    formatter_class = _Formatter


class Command(click.Command):
    """A command; its options stand under headings where they are many."""

    context_class = _Context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rows in self._sections(ctx):
            with formatter.section(heading):
                formatter.write_dl(rows)

    def _sections(self, ctx: click.Context) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Heading and rows of each list of options."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in options:
            record = option.get_help_record(ctx)
            heading = option_section(option) if len(options) > _MANY else ""
            if record:
                rows.setdefault(heading or "Options", []).append(record)
        yield from ((heading, rows[heading]) for heading in (*_SECTIONS, "Options") if heading in rows)


def option_section(option: click.Option) -> str:
    """The heading under which an option stands in a long list; "" for one of no group."""
    return next((heading for heading, names in _SECTIONS.items() if option.opts[0] in names), "")


class Group(click.Group):
    """Commands under headings, each imported when it is used.

    Attributes:
        sections: heading -> name of a command -> where it is, as `module:attribute` or a module whose `command` it is; empty
            where commands are added by decorators.
    """

    context_class = _Context
    command_class = Command
    sections: ClassVar[Mapping[str, Mapping[str, str]]] = {}

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
