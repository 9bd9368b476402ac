"""`tq bench decode`, `prefill` and `ops`: what a step or a prompt takes here, and the least it could take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq.commands.bench_rows import print_rows
from tq.options import (
    Numbers,
    draft_options,
    draft_spec,
    executor_option,
    json_option,
    model_option,
    resume_option,
    run_options,
    set_threads,
)
from tq.output import err, loading, print_table
from tq.ranks import tensor_parallel

if TYPE_CHECKING:
    from haarkv.benchmarks.decode import Request
    from haarkv.benchmarks.decode_cost import CostRow
    from haarkv.benchmarks.decode_peers import HFCache
    from haarkv.benchmarks.ops import OpRow
    from haarkv.benchmarks.timing import Machine
    from haarkv.engine.draft_choice import DraftSpec
    from haarkv.models.base import DecoderConfig
    from haarkv.models.parallel import Ranks

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


no_peers_option = click.option("--no-peers", is_flag=True, help="Measure nobody else.")
_KINDS = ("attention", "layer", "step")


class Peers(click.ParamType[tuple[str, ...]]):
    """Names of peers, separated by commas."""

    name = "peers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from haarkv.benchmarks.decode_peers import PEERS

        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        if unknown := [name for name in names if name not in PEERS]:
            self.fail(f"{unknown[0]!r} is no peer; choose from {', '.join(PEERS)}", param, ctx)
        return names


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("decode")
@_options
@click.option(
    "--only",
    "kinds",
    multiple=True,
    type=click.Choice(["attention", "layer", "prompt", "step"]),
    help="Measure attention alone, one call of a layer, whole prompts, or whole steps; repeatable [default: all but prompts; "
    "with llama.cpp all].",
)
@click.option(
    "--peers",
    type=Peers(),
    default="sdpa,transformers",
    show_default=True,
    metavar="LIST",
    help="Whom to measure beside: torch's sdpa, transformers, llama.cpp.",
)
@no_peers_option
@click.option(
    "--peer-kv",
    metavar="LIST",
    default="f16,q8_0,q4_0",
    show_default=True,
    help="llama.cpp's KV caches. TYPE is with flash attention and, unless quantized, without; TYPE:flash or :plain is one.",
)
@resume_option
@click.option("--plot", "plot_file", metavar="FILE", type=click.Path(path_type=Path), help="Draw time by context, as SVG.")
@click.option("--isa", metavar="NAME", help="Instruction set of the CPU kernels, as avx512 [default: the best].")
@draft_options
@tensor_parallel
def decode(
    kinds: tuple[str, ...],
    peers: tuple[str, ...],
    no_peers: bool,
    peer_kv: str,
    resume_file: Path | None,
    plot_file: Path | None,
    ranks: Ranks,
    **given: Any,
) -> None:
    """Measure decode latency by context, batch, executor and format: attention of one layer, a layer's call, whole steps.

    The variants of a case hold the same K and V and take turns. `floor` is the least time that this machine allows, measured
    in the same run: moving the bytes at the speed of a copy or computing at that of a matrix product, whichever is longer.
    auto is the fastest executor here that reads one of the formats; a format that an executor does not read is left out.

    A GPU or NPU is timed by its own events. The first call of each variant may compile: it is named beneath the table, and no
    figure counts it. A simulated device gives no times.

    Whole prompts, and with llama.cpp whole steps, are of random tokens: each side computes the prompt and goes on from its own
    cache. A prompt is shorter than its context by the steps after it. --resume keeps these times as they come. llama.cpp gets
    the same weights as a GGUF, in a temporary folder, and as many threads; of transformers only DynamicCache is measured then.

    With --tensor-parallel only whole steps are measured, without peers, and bytes and floor are those of one rank.

    With --draft it continues the held-out text of tiny instead, with the draft and without in turns.
    """
    if (spec := draft_spec(given)) is not None:
        if kinds or plot_file or resume_file or ranks.size > 1 or given["isa"] or tuple(given["batches"]) != (1,):
            raise click.UsageError(
                "--draft measures whole texts, one at a time; leave out --only, --plot, --resume, --isa and --batches"
            )
        _drafted(spec, given)
        return
    from haarkv.benchmarks import decode_plot
    from haarkv.benchmarks.decode import measure
    from haarkv.benchmarks.decode_peers import LLAMA
    from haarkv.benchmarks.llama_process import parse_kinds
    from haarkv.benchmarks.report import emit
    from haarkv.tq_ops.output_files import check_writable, write_whole

    if plot_file is not None:
        decode_plot.require_matplotlib()
        check_writable(plot_file)
    together = ranks.size > 1
    if together and set(kinds) - {"step"}:
        raise click.UsageError(f"--only {kinds[0]} is measured on one rank; leave out --tensor-parallel")
    beside = () if no_peers or together else peers
    on_prompts = LLAMA in beside or "prompt" in kinds
    if resume_file is not None and not on_prompts:
        raise click.UsageError("--resume keeps the times of whole prompts; give --peers llama.cpp or --only prompt")
    kinds = kinds or (("step",) if together else (*_KINDS, "prompt") if on_prompts else _KINDS)
    kvs = _kvs(given)
    request = _request(
        given, kinds=kinds, peers=beside, llama_kvs=parse_kinds(peer_kv), isa=given["isa"], resume=resume_file, ranks=ranks,
        hf_caches=partial(_hf_caches, kvs),
    )  # fmt: skip
    with loading(request.model) as progress, _turning() as on_turn:
        machine, rows = measure(request, progress, on_turn)
    if ranks.rank:  # rank 0 says it for all
        return
    if plot_file is not None:
        write_whole(plot_file, decode_plot.svg(rows, f"{request.model}, {request.dtype}"))
    emit("decode", _line(request, machine, rows), save=given["save"], echo=given["as_json"])
    if not given["as_json"]:
        print_rows(request, machine, rows)


@click.command("prefill")
@_options
@no_peers_option
@click.option("--isa", metavar="NAME", help="Instruction set of the CPU kernels, as avx512 [default: the best].")
def prefill(no_peers: bool, **given: Any) -> None:
    """Measure attention of one layer over a whole prompt, by its length, executor and format, beside torch's.

    Each token attends to itself and those before it, over the packed cache. All variants of a case take turns; torch's is
    causal SDPA in BF16, which is flash attention. `--contexts` are the lengths of the prompt.
    """
    from haarkv.benchmarks.decode_peers import SDPA
    from haarkv.benchmarks.prefill import measure
    from haarkv.benchmarks.report import emit

    request = _request(given, peers=() if no_peers else (SDPA,), isa=given["isa"])
    with loading(request.model) as progress, _turning() as on_turn:
        machine, rows = measure(request, progress, on_turn)
    emit("prefill", _line(request, machine, rows), save=given["save"], echo=given["as_json"])
    if not given["as_json"]:
        print_rows(request, machine, rows)


@click.command("ops")
@_options
def ops(**given: Any) -> None:
    """Measure quantizing, storing and attention of one layer, for one new token and for a chunk of 64."""
    from haarkv.benchmarks.ops import measure
    from haarkv.benchmarks.report import emit

    request = _request(given)
    with loading(request.model) as progress, _turning() as on_turn:
        machine, rows = measure(request, progress, on_turn)
    emit("ops", _line(request, machine, rows), save=given["save"], echo=given["as_json"])
    if not given["as_json"]:
        columns = ("op", "who", "batch", "context", "new", "ms", "low … high")
        cells = [
            (r.op, r.who, str(r.batch), str(r.context), str(r.new_tokens), f"{r.ms:.3f}", f"{r.low:.3f} … {r.high:.3f}")
            for r in rows
        ]
        title = f"{request.model}, {request.dtype}: ops of one layer, caches cold, median of {request.repeats}"
        print_table(title, columns, cells)


_DRAFT_COLUMNS = (
    "context",
    "draft",
    "ms/token",
    "speed-up",
    "CPU ms/token",
    "CPU speed-up",
    "accepted",
    "tokens/step",
    "same text",
)


def _drafted(spec: DraftSpec, given: dict[str, Any]) -> None:
    """Measure decoding with a draft and without."""
    from haarkv.benchmarks.drafts import DraftRequest, measure
    from haarkv.benchmarks.report import emit

    kvs = _kvs(given) if given["kvs"] else ["tq4"]
    if len(kvs) != 1 or len(given["executors"]) != 1:
        raise click.UsageError("--draft takes one executor and one format at a time")
    set_threads(given["threads"])
    request = DraftRequest(
        executor=given["executors"][0], kv=kvs[0], drafts=[spec],
        **{name: given[name] for name in ("model", "contexts", "dtype", "layers", "device", "repeats")},
    )  # fmt: skip
    with loading(request.model) as progress, _turning() as on_turn:
        rows = measure(request, progress, on_turn)
    settings = {"model": request.model, "kv": request.kv, "draft": asdict(spec), "new_tokens": request.new_tokens}
    emit("drafts", settings | {"rows": [row.as_json() for row in rows]}, save=given["save"], echo=given["as_json"])
    if given["as_json"]:
        return
    cells = [
        (
            str(r.context), r.draft, f"{r.ms:.2f}", _times(r.speed_up), f"{r.cpu_ms:.2f}", _times(r.cpu_speed_up),
            "–" if r.drafting is None or r.drafting.acceptance is None else f"{r.drafting.acceptance:.0%}",
            "–" if r.drafting is None or r.drafting.tokens_per_step is None else f"{r.drafting.tokens_per_step:.2f}",
            "yes" if r.same_text else "no",
        )
        for r in rows
    ]  # fmt: skip
    title = f"{request.model}, {request.kv}: {request.new_tokens} new tokens, greedy, median of {request.repeats} turns"
    print_table(title, _DRAFT_COLUMNS, cells)
    for row in rows:
        if row.drafting:
            print(f"{row.context:,} tokens: {row.drafting.describe()}")


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _line(request: Request, machine: Machine, rows: Sequence[CostRow] | Sequence[OpRow]) -> dict[str, Any]:
    settings = {
        "model": request.model,
        "dtype": request.dtype,
        "layers": request.layers,
        "repeats": request.repeats,
        "isa": request.isa,
        "tensor_parallel": request.ranks.size,
    }
    return settings | {"machine": asdict(machine), "rows": [r.as_json() for r in rows]}


def _request(given: dict[str, Any], **more: Any) -> Request:
    from haarkv.benchmarks.decode import Request

    set_threads(given["threads"])
    kvs = _kvs(given)
    executors = list(dict.fromkeys(_fastest(given, kvs) if name == "auto" else name for name in given["executors"]))
    names = ("model", "contexts", "batches", "dtype", "layers", "device", "repeats")
    return Request(executors=executors, kvs=kvs, **{name: given[name] for name in names}, **more)


def _kvs(given: dict[str, Any]) -> list[str]:
    from haarkv.benchmarks.plans import parse_caches

    return parse_caches(given["kvs"]) or ["bf16", "tq4"]


def _hf_caches(kvs: Sequence[str], config: DecoderConfig) -> list[HFCache]:
    """`TQCache` in each format, read packed by transformers' model."""
    from haarkv.benchmarks.decode_peers import HFCache
    from haarkv.benchmarks.plans import plain, plan_of
    from haarkv.tq_ops import formats

    if find_spec("transformers") is None:
        return []
    from tq.hf.attention import IMPLEMENTATION
    from tq.hf.cache import TQCache

    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim  # of a token
    caches = []
    for kv in kvs:
        if plain(kv) and not formats.needs_calibration(kv):
            token_bytes = plan_of(kv, config).bytes_per_token(config.num_kv_heads, config.head_dim)
            make = partial(TQCache, kv=kv)
            caches.append(HFCache(f"TQCache {kv}", make, 8 * token_bytes / numbers, implementation=IMPLEMENTATION))
    return caches


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
def _turning() -> Iterator[Callable[[str], None]]:
    """Name on stderr what is being timed; silent when stderr is not a terminal."""

    def on_turn(who: str) -> None:
        if err().is_terminal:
            print(f"\r\x1b[Ktiming {who}", end="", file=sys.stderr, flush=True)

    try:
        yield on_turn
    finally:
        if err().is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
