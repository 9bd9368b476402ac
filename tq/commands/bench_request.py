"""What `tq bench decode`, `prefill` and `ops` are asked for: their common options, and the request that these make."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tq.options import Numbers, executor_option, json_option, model_option, run_options, set_threads
from tq.output import err

if TYPE_CHECKING:
    from haarkv.benchmarks.decode import Request

_OPTIONS = (
    model_option("random:0.6b"),
    click.option(
        "--kv",
        "kvs",
        multiple=True,
        metavar="LIST",
        help="Caches, separated by commas; repeatable. Each a format, or several with / between that layers take in turn, and "
        "+tailN and +sinkN for tokens in BF16 [default: bf16,tq4].",
    ),
    executor_option(multiple=True),
    run_options("bfloat16"),
    click.option("--contexts", type=Numbers(), default="1024,4096", show_default=True, help="Tokens in the cache."),
    click.option("--batches", type=Numbers(), default="1", show_default=True, help="Sequences at once."),
    click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Timed runs of each variant."),
    click.option("--save", is_flag=True, help="Append the result to benchmarks/results as a JSON line."),
    json_option,
)


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of all three."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def request_of(given: dict[str, Any], **more: Any) -> Request:
    """A request of the common options, and of what a command adds."""
    from haarkv.benchmarks.decode import Request

    set_threads(given["threads"])
    kvs = kvs_of(given)
    executors = list(dict.fromkeys(_fastest(given, kvs) if name == "auto" else name for name in given["executors"]))
    names = ("model", "contexts", "batches", "dtype", "layers", "device", "repeats")
    return Request(executors=executors, kvs=kvs, **{name: given[name] for name in names}, **more)


def kvs_of(given: dict[str, Any]) -> list[str]:
    """The caches that are asked for."""
    from haarkv.benchmarks.plans import parse_caches

    return parse_caches(given["kvs"]) or ["bf16", "tq4"]


def _fastest(given: dict[str, Any], kvs: Sequence[str]) -> str:
    """The fastest executor here that reads at least one of the formats."""
    from haarkv.benchmarks.plans import plan_of
    from haarkv.executors.catalog import AUTO, FASTEST_FIRST, select
    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.errors import InputError

    config = read_config(given["model"], given["layers"])
    plans = [plan_of(kv, config) for kv in kvs]
    found: list[str] = []
    refused: list[InputError] = []
    for plan in plans:
        try:
            found.append(select(AUTO, config, [plan], device=given["device"], dtype=given["dtype"]).name)
        except InputError as error:  # on a device that was named, no executor may read this one
            refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=FASTEST_FIRST.index)


@contextmanager
def turning() -> Iterator[Callable[[str], None]]:
    """Name on stderr what is being timed; silent when stderr is not a terminal."""

    def on_turn(who: str) -> None:
        if err().is_terminal:
            print(f"\r\x1b[Ktiming {who}", end="", file=sys.stderr, flush=True)

    try:
        yield on_turn
    finally:
        if err().is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
