"""The command `tq`; every error that a user can cause becomes one line and exit code 2."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from itertools import takewhile

import click

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.versions import leave_npu_alone
from tq import __version__
from tq.groups import Group
from tq.output import drop_output, one_line, unsaid_is_fine, warnings_in_a_line
from tq.start import EXIT_INTERRUPTED

_ELSEWHERE = {
    "formats": "tq.commands.info:formats_command", "export": "tq.commands.files:export_command",
    "quantize": "tq.commands.files:quantize_command", "dev": "tq.cli:dev",
}  # fmt: skip
"""Commands that are not the `command` of a module of their name."""
_SECTIONS = {
    heading: {name: _ELSEWHERE.get(name, f"tq.commands.{name}") for name in names}
    for heading, names in {
        "Run": ("generate", "chat", "serve"),
        "Choose a cache": ("info", "formats", "eval", "plan", "calibrate", "choice"),
        "Check": ("validate", "diff"),
        "Measure": ("bench",),
        "Files": ("export", "quantize"),
        "Workshop": ("dev",),
    }.items()
}
_WORKSHOP = {
    "A new machine": {"bringup": "tq.commands.bringup", "compile": "tq.commands.bringup:compile_command"},
    "The validator": {"replay": "tq.commands.validate:replay", "self-test": "tq.commands.validate:self_test"},
}
_FIRST_STEPS = (
    ("tq generate 'def main('", "The small model that ships writes Python."),
    ("tq info MODEL", "Does yours fit here, and how long a text?"),
    ("tq chat -m MODEL", "Talk with it."),
    ("tq eval -m MODEL --text FILE", "What would each smaller cache change?"),
)


# Said by torch's allocators, the C++ library, the loader of shared libraries, and threads.
_NO_MEMORY = (
    "can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory",
    "failed to map segment", "can't start new thread",
)  # fmt: skip


@click.command("dev", cls=Group, sections=_WORKSHOP)
def dev() -> None:
    """Bring up an executor, compile its programs, and test the validator."""


@click.command(
    "tq", cls=Group, sections=_SECTIONS, invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip
@click.version_option(__version__, prog_name="haarkv")
@click.option("--debug", is_flag=True, expose_value=False, help="Show where in the program an error arose.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run decoder models such as Qwen3 with a rotated low-bit KV cache.

    Start with `tq generate 'def main('`. Every command explains itself with --help.
    """
    if ctx.invoked_subcommand is None:
        _greet(ctx)


def _greet(ctx: click.Context) -> None:
    """What `tq` alone says: what it is, and where to begin."""
    page = ctx.make_formatter()
    page.write_text(f"haarkv {__version__}: long contexts in a third of the cache memory.")
    with page.section("First steps"):
        page.write_dl(_FIRST_STEPS)
    page.write_paragraph()
    page.write_text("MODEL is a .gguf file, or a folder in Hugging Face format.")
    page.write_text("All commands: tq --help")
    print(page.getvalue(), end="")


def _prepare_streams() -> None:
    """Let printing never fail because of the stream: a closed one drops the text, a narrow encoding shows `?`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if a comparison found a fault; 2 for an error that the user can correct (one line on stderr); 130 if interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    leave_npu_alone()
    _prepare_streams()
    cli._main_shell_completion({}, "tq")  # ends the process where a shell asks
    with unsaid_is_fine(), warnings_in_a_line():
        try:
            try:
                with cli.make_context("tq", args[:], obj=args) as context:  # reports name the command
                    result = cli.invoke(context)
            except click.exceptions.Exit as error:  # after --help, or --version
                result = error.exit_code
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except BaseException as error:  # a panic in a library of Rust is no Exception
            # Before the name of the subcommand it is ours; behind it, it may be the value of an option.
            return _exit_code(error, debug="--debug" in takewhile(lambda word: word.startswith("-"), args))


def _exit_code(error: BaseException, debug: bool) -> int:
    """Print why a command ended; exit codes as `main`."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return 2
    if isinstance(error, KeyboardInterrupt | click.Abort):
        # A terminal has shown ^C, and perhaps half a line of text; a bar that was beginning has hidden the cursor, and
        # stands between us and the terminal, where it drops what moves no text.
        stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        print("\x1b[?25h\n" * stream.isatty() + "tq: interrupted", file=stream)
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit):  # of a library that ends the process itself
        return error.code if isinstance(error.code, int) else 2
    if debug:
        traceback.print_exception(error)
    try:
        sys.stdout.flush()
    except OSError:
        # What could not be written stays in the buffer, and the interpreter would try it again at exit.
        drop_output(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0  # a reader that leaves early is no failure: commands with a verdict go on to it
    print(f"tq: {one_line(_reason(error))}", file=sys.stderr)
    return 2


def _reason(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, InputError):
        return str(error)
    message = str(error)
    if isinstance(error, MemoryError) or any(words in message for words in _NO_MEMORY):
        return "there is not enough memory; take a smaller model, text or context, or allow this process more"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}" if error.filename else str(error.strerror or error)
    return (
        f"this is a fault of tq itself: {type(error).__name__}: {message}; please report it with what `tq --debug …` prints "
        "for the same command"
    )


if __name__ == "__main__":
    sys.exit(main())
