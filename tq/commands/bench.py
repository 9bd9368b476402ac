"""`tq bench`: repeatable measurements, as tables or one JSON line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from tq import options
from tq.groups import Group
from tq.output import loading, print_table, telling

if TYPE_CHECKING:
    from haarkv.benchmarks.decode import Request
    from haarkv.benchmarks.report import Report


@click.group("bench", cls=Group)
def command() -> None:
    """Measure what executors and caches cost."""


_kvs = click.option(
    "--kv", "kvs", multiple=True, metavar="LIST",
    help="Caches, separated by commas; repeatable. Each a format, or several with / between that layers take in turn, and "
    "+tailN and +sinkN for tokens in BF16; or the file of a plan [default: bf16,tq4].",
)  # fmt: skip
contexts_option = partial(options.numbers, "--contexts", "Tokens in the cache.")
repeats_option = partial(options.count, "--repeats", "Timed runs of each variant.")
_isa = click.option("--isa", metavar="NAME", help="Instruction set of the CPU kernels, as avx2 [default: the best].")
save_option = click.option("--save", is_flag=True, help="Append the result to benchmarks/results as a JSON line.")
KINDS = ("attention", "prompt", "step")
DEFAULT_KINDS = ("attention", "step")


of_a_layer = options.together(
    options.model_option("random:0.6b"), _kvs, options.executor_option(multiple=True),
    options.run_options("bfloat16"), contexts_option("1024,4096"), options.numbers("--batches", "Sequences at once.", "1"),
    repeats_option(7), _isa, save_option,
    options.activation_option, options.mmap_option, options.json_option,
)  # fmt: skip


def finish(report: Report, args: dict[str, Any]) -> None:
    """Save and print a report."""
    if args["save"]:
        report.save()
    if args["as_json"]:
        print(report.line())
        return
    for number, table in enumerate(report.tables):
        print_table(table.title, table.columns, table.rows)
        for note in report.notes.get(number, ()):
            print(note)
    memory = {name: count / 2**30 for name, count in report.memory.items()}
    print(f"memory: {memory['peak_bytes']:.2f} GiB at most, {memory['mapped_bytes']:.2f} of it pages of the model's file")


@contextmanager
def turning() -> Iterator[Callable[[str], None]]:
    """Name the timed variant on stderr."""
    with telling() as tell:
        yield lambda who: tell(f"timing {who}")


def kv_list(args: dict[str, Any]) -> list[str]:
    """The caches of `--kv`."""
    from haarkv.benchmarks.cases import parse_caches

    return parse_caches(args["kvs"]) or ["bf16", "tq4"]


def request_of(args: dict[str, Any], **more: Any) -> Request:
    """A request of `of_a_layer`'s options and `more`."""
    from haarkv.benchmarks.decode import Request

    kvs = kv_list(args)
    executors = list(dict.fromkeys(_fastest(args, kvs) if name == "auto" else name for name in args["executors"]))
    options.say_if_interpreted(*executors, device=args["device"])
    names = ("model", "contexts", "batches", "dtype", "layers", "device", "repeats", "isa", "activation_bits", "mmap")
    return Request(executors=executors, kvs=kvs, **{name: args[name] for name in names}, **more)


def _fastest(args: dict[str, Any], kvs: Sequence[str]) -> str:
    """The fastest executor here that reads at least one of the formats."""
    from haarkv.benchmarks.cases import benchmark_plan
    from haarkv.executors.catalog import AUTO, FASTEST_FIRST, select
    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.errors import InputError

    config = read_config(args["model"], args["layers"])
    names: list[str] = []
    errors: list[InputError] = []
    for plan in [benchmark_plan(kv, config) for kv in kvs]:
        try:
            names.append(select(AUTO, config, [plan], device=args["device"], dtype=args["dtype"]).name)
        except InputError as error:  # on a device that was named, no executor may read this one
            errors.append(error)
    if not names:
        raise errors[0]
    return min(names, key=FASTEST_FIRST.index)


@command.command("decode")
@of_a_layer
@click.option("--only", "kinds", multiple=True, type=click.Choice(KINDS),
              help="Measure attention of a layer, prompts, or steps; repeatable [default: all but prompts].")  # fmt: skip
def decode(kinds: tuple[str, ...], **args: Any) -> None:
    """Measure decode latency by context, batch, executor and format: attention of one layer, whole prompts, whole steps.

    The variants of a case hold the same K and V and take turns. `floor` is the least time that this machine allows, measured
    in the same run: moving the bytes at the speed of a copy or computing at that of a matrix product, whichever is longer.
    auto is the fastest executor here that reads one of the formats; a format that an executor does not read is left out.

    A GPU or NPU is timed by its own events. The first call of each variant may compile: it is named beneath the table, and no
    figure counts it. A simulated device gives no times.

    Whole prompts are of random tokens. Steps follow random K and V, since no time depends on them.
    """
    from haarkv.benchmarks.decode import measure, report

    with turning() as on_turn, loading(args["model"]) as progress:
        request = request_of(args, kinds=kinds or DEFAULT_KINDS)
        machine, rows = measure(request, progress, on_turn)
    finish(report("decode", request, machine, rows), args)
