"""Options of the commands, and those that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.input_files import parse_json
from tq.output import compiling, loading, warn

if TYPE_CHECKING:
    from haarkv.engine.draft_choice import DraftSpec
    from haarkv.engine.session import Session

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Decorator) -> Decorator:
    """Several options as one, in the order of `--help`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def written_options() -> dict[str, str]:
    """Options that the user wrote for the running command: argument name to option."""
    context, default = click.get_current_context(), click.core.ParameterSource.DEFAULT
    return {
        option.name: option.opts[0] for option in context.command.params
        if option.name and context.get_parameter_source(option.name) is not default
    }  # fmt: skip


# -- Kinds of values -------------------------------------------------------------------------------------------------------


def integers(text: str) -> tuple[int, ...]:
    """Integers separated by commas; () if a part is none, or has more than 18 digits."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[+-]?[0-9]{1,18}", part) for part in parts):
        return ()
    return tuple(map(int, parts))


class IntRange(click.IntRange):
    """click's, with a type name that reads well in errors."""

    name = "integer"


_LAYERS = "layers; write numbers with commas between, such as 0,1,-1"


class Numbers(click.ParamType[tuple[int, ...]]):
    """Integers separated by commas, from `least` up; None takes layers, of which negative ones count from the end."""

    name = "numbers"

    def __init__(self, least: int | None = 1) -> None:
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers = integers(str(value))
        if not numbers or min(numbers) < (min(numbers) if self._least is None else self._least):
            kind = "positive integers" if self._least == 1 else f"integers from {self._least} up"
            expected = _LAYERS if self._least is None else f"{kind} such as 512,4096"
            self.fail(f"{shown(value)} is not a list of {expected}", param, ctx)
        return numbers


class Assignment(click.ParamType[tuple[str, Any]]):
    """NAME=VALUE; the value is JSON if possible, else text."""

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
    """An option for a list of integers."""
    shows = default is not None
    return click.option(name, type=Numbers(least), default=default, show_default=shows, metavar=metavar, help=about)


def count(
    name: str, about: str | None = None, default: int | None = None, *, least: int = 1, metavar: str | None = None
) -> Decorator:
    """An option for an integer from `least` up."""
    kind, shows = IntRange(min=least), default is not None
    return click.option(name, type=kind, default=default, show_default=shows, metavar=metavar, help=about)


def file(name: str, about: str, variable: str | None = None, *, metavar: str = "FILE", required: bool = False) -> Decorator:
    """An option for a path, passed as `variable`."""
    names = (name, variable) if variable else (name,)
    return click.option(*names, type=click.Path(path_type=Path), metavar=metavar, required=required, help=about)


_THREADS = 2
"""Accepted by every machine: some commands default to it."""


def set_threads(threads: int | None) -> None:
    """Use `threads` CPU threads, at most this machine's processors."""
    if threads is not None:
        processors = os.cpu_count() or 1
        most = max(_THREADS, processors)
        if threads > most:
            has = f"{processors} processor{'s' * (processors != 1)}"
            raise click.UsageError(f"--threads {shown(threads)}: this machine has {has}; give at most {most}")
        import torch

        torch.set_num_threads(threads)


# -- What is run, and on what ----------------------------------------------------------------------------------------------


def model_option(default: str = "tiny") -> Decorator:
    """`--model`."""
    about = (
        "tiny, random:SIZE, a folder in Hugging Face format or a .gguf file (~ is home), or the Hub id of a downloaded model."
    )
    return click.option("--model", "-m", default=default, show_default=True, help=about)


prompt_options = together(
    click.option("--prompt", "-p", "prompts", multiple=True, metavar="TEXT", help="Repeat it for a batch."),
    click.option("--prompt-file", "files", multiple=True, metavar="FILE", help="A UTF-8 file as one prompt; - is stdin."),
)


_EXECUTOR_HELP = "auto, cuda, npu, cpu, onnx or reference; auto is the fastest here that reads the cache."


def executor_option(multiple: bool = False) -> Decorator:
    """`--executor`, or `executors` if it can be repeated."""
    if not multiple:
        return click.option("--executor", default="auto", show_default=True, help=_EXECUTOR_HELP)
    repeat = f"{_EXECUTOR_HELP} Repeat it."
    return click.option("--executor", "executors", multiple=True, default=["auto"], show_default=True, help=repeat)


def say_if_interpreted(*executors: str, device: str | None) -> None:
    """Warn if one of these executors runs in an interpreter."""
    from haarkv.executors.catalog import NAMES, interpreter_warning

    messages = [interpreter_warning(name, device) for name in executors if name in NAMES]
    if first := next(filter(None, messages), None):
        warn(first)


activation_option = click.option(
    "--activation-bits", type=click.Choice([16, 8]), default=16, show_default=True,
    help="8: cpu rounds what meets quantised weights to 8 bits, as llama.cpp does; faster, less exact.",
)  # fmt: skip
mmap_option = click.option(
    "--mmap/--no-mmap", default=None, show_default="copied on cpu where twice the memory is free",
    help="Leave weights in the file's pages, or copy them into memory, which cpu reads faster.",
)  # fmt: skip
layers_option = click.option("--layers", type=int, metavar="N", help="For random:SIZE: build only N layers.")
device_option = click.option("--device", "--provider", help="cuda: cuda:N; npu: sim or npu:N.")
threads_option = click.option(
    "--threads", type=IntRange(min=1), metavar="N", callback=lambda *of: set_threads(of[-1]), expose_value=False,
    help="CPU threads; 1 is best for tiny.",
)  # fmt: skip


def dtype_option(dtype: str | None = None) -> Decorator:
    """`--dtype`, with a default, or the executor's own."""
    shown_default = dtype or "bfloat16 on cuda and npu, else float32"
    return click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default=dtype, show_default=shown_default)


def run_options(dtype: str | None = None) -> Decorator:
    """`--device`, `--dtype`, `--layers` and `--threads`, which no command sees: it is set where it is read."""
    return together(device_option, dtype_option(dtype), layers_option, threads_option)


max_context_option = count("--max-context", "Tokens the cache holds for each prompt.", metavar="N")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")

resume_option = file("--resume", "Save progress here; resume from it if it exists.", "resume_file")


# -- The KV cache --------------------------------------------------------------------------------------------------------


loss_option = click.option(
    "--kv-loss", type=float, metavar="NATS", help="What --kv auto may lose: mean KL a token [default: 0.002]."
)
plan_option = click.option("--kv-plan", metavar="FILE", help="A plan from `tq plan`; it sets every layer's formats.")
calibration_option = click.option(
    "--calibration", metavar="FILE", help="Learned coordinates from `tq calibrate`, for formats lr2 to lr5."
)
bf16_options = together(
    click.option("--kv-tail", type=IntRange(min=0), metavar="R", help="Keep the last R tokens in BF16."),
    click.option("--kv-sink", type=IntRange(min=0), metavar="S", help="Keep the first S tokens in BF16."),
    click.option(
        "--kv-skip-layers", type=Numbers(least=None), default=(), metavar="LIST", help="Keep these layers in BF16: 0,1,-1."
    ),
)
balance_option = click.option(
    "--balance", type=click.Choice(["auto", "off"]), default="auto", show_default=True,
    help="Scale uneven channels of K and V; the model stays the same, and the cache loses less.",
)  # fmt: skip
collapse_option = click.option("--allow-collapse", is_flag=True, help="Only warn where text from this cache would be garbage.")


def kv_options(default: str = "auto") -> Decorator:
    """All options of a cache; help shows `default` for `--kv`."""
    kv_option = click.option(
        "--kv", show_default=default,
        help="A format of `tq formats`, or k=NAME,v=NAME; auto: the smallest cache that loses at most --kv-loss.",
    )  # fmt: skip
    return together(kv_option, loss_option, calibration_option, bf16_options, plan_option)


# -- Sessions --------------------------------------------------------------------------------------------------------------

session_options = together(
    kv_options(), balance_option, collapse_option, executor_option(), run_options(), activation_option, mmap_option
)
"""Options of `open_session`, without `--model`."""

seed_option = click.option("--seed", type=IntRange(0, 2**62), default=0, show_default=True)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling options that a model's generation_config.json may set too."""
sampling_options = together(
    click.option("--temperature", type=float, help="0 takes the most likely token."),
    click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1: make tokens less likely once used."),
    seed_option,
)
draft_options = together(
    click.option(
        "--draft", metavar="NAME",
        help="Guess tokens ahead and check them together: ngram, mtp (the model's own layer for it), or a smaller model of "
        "the same tokenizer.",
    ),
    click.option(
        "--draft-tokens", type=IntRange(1, 32), metavar="K", help="Guess at most K tokens a step [default: 4]."
    ),
    click.option("--draft-kv", metavar="FORMAT", help="Cache of the draft [default: tq4]."),
)  # fmt: skip


def draft_spec(args: Mapping[str, Any]) -> DraftSpec | None:
    """The draft that a command's arguments ask for."""
    from haarkv.engine.draft_choice import MTP_LAYER, NGRAM, DraftSpec

    others = {name: args[f"draft_{name}"] for name in ("tokens", "kv") if args[f"draft_{name}"] is not None}
    if args["draft"] is not None:
        names = (NGRAM, MTP_LAYER)
        close = get_close_matches(args["draft"], names, n=1, cutoff=0.7)
        if close and args["draft"] not in names and not Path(args["draft"]).exists():
            raise click.UsageError(f"there is no draft {args['draft']!r}; did you mean {close[0]}?")
        return DraftSpec(args["draft"], **others)
    if others:
        raise click.UsageError(f"--draft-{next(iter(others))} says how to draft; give --draft as well")
    return None


message_options = together(
    click.option("--system", metavar="TEXT", help="The chat template's system message."),
    click.option(
        "--template-arg", "template_args", type=Assignment(), multiple=True, metavar="K=V", callback=lambda *of: dict(of[-1]),
        help="An argument of the chat template, such as enable_thinking=false. Repeat it.",
    ),
    click.option(
        "--parse-special", is_flag=True, help="Let what a message spells, such as <|im_end|>, be that token; else it is text."
    ),
)  # fmt: skip
chat_options = together(
    click.option(
        "--chat/--no-chat", default=None, help="Wrap prompts in the chat template, or do not [default: if there is one]."
    ),
    message_options,
)
CHAT = ("chat", "system", "template_args", "parse_special")
"""Arguments of `chat_options` that `Session.generate` takes."""


def sampling_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings that the user gave."""
    return {name: args[name] for name in SAMPLING if args.get(name) is not None}


def open_session(args: Mapping[str, Any], **others: Any) -> Session:
    """Load the session of `--model` and `session_options`, with a progress bar; sampling, draft and `stop` arguments are
    checked first.
    """
    # The bar is there before torch is, whose import takes a second.
    with loading(args["model"]) as progress:
        from haarkv.engine.loading import load
        from haarkv.engine.sampling import Sampling, require_drawn
        from haarkv.engine.text import stop_list
        from haarkv.models.text import generation_settings
        from tq.loading import kv_request

        spec, draft = kv_request(args), draft_spec(args) if "draft" in args else None
        stop_list(args.get("stop", ()))
        Sampling(**sampling_settings(args))
        if filters := sampling_settings(args):
            require_drawn(generation_settings(args["model"]), filters)
        names = ("executor", "device", "dtype", "layers", "allow_collapse", "activation_bits", "mmap")
        return load(
            args["model"], kv=spec, progress=progress, on_program=compiling, on_warning=warn, draft=draft,
            balance=args["balance"] == "auto", **{name: args[name] for name in names}, **others,
        )  # fmt: skip


def check_outputs(**outputs: Path | None) -> None:
    """Refuse, before any work, outputs that cannot be written, or two options that name one file; keys are option names."""
    from haarkv.tq_ops.output_files import check_writable

    targets = {name: path for name, path in outputs.items() if path is not None}
    if len({path.resolve() for path in targets.values()}) < len(targets):
        raise click.UsageError(f"{' and '.join(f'--{name}' for name in targets)} name the same file")
    for path in targets.values():
        check_writable(path)
