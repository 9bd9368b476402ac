"""`tq bench decode`, `prefill` and `ops`: what a step or a prompt takes here, and the least it could take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq.commands.bench_drafts import drafted
from tq.commands.bench_request import common_options, kvs_of, request_of, turning
from tq.commands.bench_rows import print_rows
from tq.options import draft_options, draft_spec, resume_option
from tq.output import loading, print_table
from tq.ranks import tensor_parallel

if TYPE_CHECKING:
    from haarkv.benchmarks.decode import Request
    from haarkv.benchmarks.decode_cost import CostRow
    from haarkv.benchmarks.decode_peers import HFCache
    from haarkv.benchmarks.ops import OpRow
    from haarkv.benchmarks.timing import Machine
    from haarkv.models.config import ModelConfig
    from haarkv.models.parallel import Ranks

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


@click.command("decode")
@common_options
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
        drafted(spec, given)
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
    if no_peers and click.get_current_context().get_parameter_source("peers") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--no-peers measures nobody else; leave out --peers")
    together = ranks.size > 1
    if together and set(kinds) - {"step"}:
        raise click.UsageError(f"--only {kinds[0]} is measured on one rank; leave out --tensor-parallel")
    beside = () if no_peers or together else peers
    on_prompts = LLAMA in beside or "prompt" in kinds
    if resume_file is not None and not on_prompts:
        raise click.UsageError("--resume keeps the times of whole prompts; give --peers llama.cpp or --only prompt")
    kinds = kinds or (("step",) if together else (*_KINDS, "prompt") if on_prompts else _KINDS)
    kvs = kvs_of(given)
    request = request_of(
        given, kinds=kinds, peers=beside, llama_kvs=parse_kinds(peer_kv), isa=given["isa"], resume=resume_file, ranks=ranks,
        hf_caches=partial(_hf_caches, kvs),
    )  # fmt: skip
    with loading(request.model) as progress, turning() as on_turn:
        machine, rows = measure(request, progress, on_turn)
    if ranks.rank:  # rank 0 says it for all
        return
    if plot_file is not None:
        write_whole(plot_file, decode_plot.svg(rows, f"{request.model}, {request.dtype}"))
    emit("decode", _line(request, machine, rows), save=given["save"], echo=given["as_json"])
    if not given["as_json"]:
        print_rows(request, machine, rows)


@click.command("prefill")
@common_options
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

    request = request_of(given, peers=() if no_peers else (SDPA,), isa=given["isa"])
    with loading(request.model) as progress, turning() as on_turn:
        machine, rows = measure(request, progress, on_turn)
    emit("prefill", _line(request, machine, rows), save=given["save"], echo=given["as_json"])
    if not given["as_json"]:
        print_rows(request, machine, rows)


@click.command("ops")
@common_options
def ops(**given: Any) -> None:
    """Measure quantizing, storing and attention of one layer, for one new token and for a chunk of 64."""
    from haarkv.benchmarks.ops import measure
    from haarkv.benchmarks.report import emit

    request = request_of(given)
    with loading(request.model) as progress, turning() as on_turn:
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


def _hf_caches(kvs: Sequence[str], config: ModelConfig) -> list[HFCache]:
    """`TQCache` in each format, read packed by transformers' model."""
    from haarkv.benchmarks.decode_peers import HFCache
    from haarkv.benchmarks.plans import plain, plan_of
    from haarkv.tq_ops import formats

    if find_spec("transformers") is None:
        return []
    from tq.hf.attention import IMPLEMENTATION
    from tq.hf.cache import TQCache

    numbers = 2 * config.num_layers * config.heads.num_kv_heads * config.heads.head_dim  # of a token
    caches = []
    for kv in kvs:
        if plain(kv) and not formats.needs_calibration(kv):
            token_bytes = plan_of(kv, config).bytes_per_token(config.heads.num_kv_heads, config.heads.head_dim)
            make = partial(TQCache, kv=kv)
            caches.append(HFCache(f"TQCache {kv}", make, 8 * token_bytes / numbers, implementation=IMPLEMENTATION))
    return caches
