"""`tq bench`: measurements that you can repeat. Each prints tables, or one JSON line; the work is done in `benchmarks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq import options
from tq.commands.eval import read_text
from tq.groups import Group
from tq.option_kinds import IntRange
from tq.output import loading, print_table, telling, warn
from tq.ranks import tensor_parallel

if TYPE_CHECKING:
    from haarkv.benchmarks.decode import Request
    from haarkv.benchmarks.decode_peers import HFCache
    from haarkv.benchmarks.report import Report
    from haarkv.models.config import ModelConfig
    from haarkv.models.parallel import Ranks


@click.group("bench", cls=Group)
def command() -> None:
    """Measure what executors, caches and servers cost."""


def _kvs(default: str) -> Callable[..., Any]:
    about = (
        "Caches, separated by commas; repeatable. Each a format, or several with / between that layers take in turn, and "
        f"+tailN and +sinkN for tokens in BF16; or the file of a plan [default: {default}]."
    )
    return click.option("--kv", "kvs", multiple=True, metavar="LIST", help=about)


_contexts = partial(options.numbers, "--contexts", "Tokens in the cache.")
_batches = partial(options.numbers, "--batches", "Sequences at once.")
_repeats = partial(options.count, "--repeats", "Timed runs of each variant.")
_isa = click.option("--isa", metavar="NAME", help="Instruction set of the CPU kernels, as avx512 [default: the best].")
_no_peers = click.option("--no-peers", is_flag=True, help="Measure nobody else.")
_save = click.option("--save", is_flag=True, help="Append the result to benchmarks/results as a JSON line.")
_plot = options.file("--plot", "Draw it by context, as SVG.")
_dtype = click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)


_of_a_layer = options.together(
    options.model_option("random:0.6b"), _kvs("bf16,tq4"), options.executor_option(multiple=True),
    options.run_options("bfloat16"), _contexts("1024,4096"), _batches("1"), _repeats(7), _isa, _save,
    options.activation_option, options.mmap_option, options.json_option,
)  # fmt: skip


def _finish(report: Report, given: dict[str, Any], svg: Callable[[], str] | None = None) -> None:
    """Draw, save and print what was found, as far as it was asked for. A busy machine is said first."""
    from haarkv.benchmarks.neighbours import warning
    from haarkv.tq_ops.output_files import write_whole

    report = replace(report, waited=given.get("waited"))
    if busy := warning(report.waited):
        warn(busy)
    if svg is not None and given.get("plot"):
        write_whole(given["plot"], svg())
    if given["save"]:
        report.save()
    if given["as_json"]:
        print(report.line())
        return
    for number, table in enumerate(report.tables):
        print_table(table.title, table.columns, table.rows)
        for note in report.notes.get(number, ()):
            print(note)
    memory = {name: count / 2**30 for name, count in report.memory.items()}
    print(f"memory: {memory['peak_bytes']:.2f} GiB at most, {memory['mapped_bytes']:.2f} of it pages of the model's file")


@contextmanager
def _turning(given: dict[str, Any]) -> Iterator[Callable[[str], None]]:
    """Name on stderr what is being timed; silent when stderr is not a terminal. What could end badly is refused before.

    `given` then holds, as `waited`, which share of the time other processes had the processors.
    """
    from haarkv.benchmarks.neighbours import share_waited, turns
    from haarkv.benchmarks.plots import require_matplotlib
    from haarkv.tq_ops.output_files import check_writable

    options.set_threads(given.get("threads"))
    if given.get("plot"):
        require_matplotlib()
        check_writable(given["plot"])
    before = turns()
    with telling() as tell:
        yield lambda who: tell(f"timing {who}")
    given["waited"] = share_waited(before, turns())


def _kv_list(given: dict[str, Any], default: Sequence[str] = ("bf16", "tq4")) -> list[str]:
    from haarkv.benchmarks.cases import parse_caches

    return parse_caches(given["kvs"]) or list(default)


def request_of(given: dict[str, Any], **more: Any) -> Request:
    """A request of the options that `decode` and `prefill` share, and of what a command adds."""
    from haarkv.benchmarks.decode import Request

    kvs = _kv_list(given)
    _require_known(*given["executors"])
    executors = list(dict.fromkeys(_fastest(given, kvs) if name == "auto" else name for name in given["executors"]))
    options.say_if_interpreted(*executors, device=given["device"])
    names = ("model", "contexts", "batches", "dtype", "layers", "device", "repeats", "isa", "activation_bits", "mmap")
    return Request(executors=executors, kvs=kvs, **{name: given[name] for name in names}, **more)


def _require_known(*executors: str) -> None:
    """Refuse a slip in a name before weights are made for it, or a process is started."""
    from haarkv.executors.catalog import AUTO, default_dtype

    for name in executors:
        if name != AUTO:
            default_dtype(name)


def _fastest(given: dict[str, Any], kvs: Sequence[str]) -> str:
    """The fastest executor here that reads at least one of the formats."""
    from haarkv.benchmarks.cases import plan_of
    from haarkv.executors.catalog import AUTO, FASTEST_FIRST, select
    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.errors import InputError

    config = read_config(given["model"], given["layers"])
    found: list[str] = []
    refused: list[InputError] = []
    for plan in [plan_of(kv, config) for kv in kvs]:
        try:
            found.append(select(AUTO, config, [plan], device=given["device"], dtype=given["dtype"]).name)
        except InputError as error:  # on a device that was named, no executor may read this one
            refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=FASTEST_FIRST.index)


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


@command.command("decode")
@_of_a_layer
@click.option("--only", "kinds", multiple=True, type=click.Choice(["attention", "layer", "prompt", "step"]),
              help="Measure attention alone, one call of a layer, whole prompts, or whole steps; repeatable [default: all but "
              "prompts; with llama.cpp all].")  # fmt: skip
@click.option("--peers", type=Peers(), default="sdpa,transformers", show_default=True, metavar="LIST",
              help="Whom to measure beside: torch's sdpa, transformers, llama.cpp.")  # fmt: skip
@_no_peers
@click.option("--peer-kv", metavar="LIST", default="f16,q8_0,q4_0", show_default=True,
              help="llama.cpp's KV caches. TYPE is with flash attention and, unless quantized, without; TYPE:flash or "
              "TYPE:plain is one.")  # fmt: skip
@_plot
@tensor_parallel
def decode(kinds: tuple[str, ...], peers: tuple[str, ...], no_peers: bool, peer_kv: str, ranks: Ranks, **given: Any) -> None:
    """Measure decode latency by context, batch, executor and format: attention of one layer, a layer's call, whole steps.

    The variants of a case hold the same K and V and take turns. `floor` is the least time that this machine allows, measured
    in the same run: moving the bytes at the speed of a copy or computing at that of a matrix product, whichever is longer.
    auto is the fastest executor here that reads one of the formats; a format that an executor does not read is left out.

    A GPU or NPU is timed by its own events. The first call of each variant may compile: it is named beneath the table, and no
    figure counts it. A simulated device gives no times.

    Whole prompts, and with llama.cpp whole steps, are of random tokens: each side computes the prompt and goes on from its own
    cache. A prompt is shorter than its context by the steps after it. llama.cpp gets the same weights as a GGUF, in a
    temporary folder, and as many threads; of transformers only DynamicCache is measured then.

    With --tensor-parallel only whole steps are measured, without peers, and bytes and floor are those of one rank.
    """
    from haarkv.benchmarks.decode import measure, report, svg
    from haarkv.benchmarks.decode_peers import LLAMA
    from haarkv.benchmarks.llama_process import parse_kinds

    if no_peers and "peers" in options.written():
        raise click.UsageError("--no-peers measures nobody else; leave out --peers")
    if ranks.size > 1 and set(kinds) - {"step"}:
        raise click.UsageError(f"--only {kinds[0]} is measured on one rank; leave out --tensor-parallel")
    beside = () if no_peers or ranks.size > 1 else peers
    every = ("attention", "layer", "step", *["prompt"] * (LLAMA in beside))
    kinds, caches = kinds or (("step",) if ranks.size > 1 else every), partial(_hf_caches, _kv_list(given))
    with _turning(given) as on_turn, loading(given["model"]) as progress:
        request = request_of(given, kinds=kinds, peers=beside, llama_kvs=parse_kinds(peer_kv), ranks=ranks, hf_caches=caches)
        machine, rows = measure(request, progress, on_turn)
    if ranks.rank == 0:  # it says it for all
        _finish(report("decode", request, machine, rows), given, partial(svg, request, rows))


@command.command("prefill")
@_of_a_layer
@click.option("--stored", type=IntRange(min=0), default=0, metavar="N", help="Tokens before the prompt.")
@_no_peers
def prefill(no_peers: bool, stored: int, **given: Any) -> None:
    """Measure attention of one layer over a whole prompt, by its length, executor and format, beside torch's.

    Each token attends to itself and those before it, over the packed cache. All variants of a case take turns; torch's is
    causal SDPA in BF16, which is flash attention. `--contexts` are the lengths of the prompt. On a GPU FlashAttention and
    FlashInfer are measured too, where they are installed.
    """
    from haarkv.benchmarks.decode import measure, report
    from haarkv.benchmarks.decode_peers import SDPA

    with _turning(given) as on_turn, loading(given["model"]) as progress:
        request = request_of(given, kinds=("prefill",), peers=() if no_peers else (SDPA,), stored=stored)
        machine, rows = measure(request, progress, on_turn)
    _finish(report("prefill", request, machine, rows), given)


def _hf_caches(kvs: Sequence[str], config: ModelConfig) -> list[HFCache]:
    """`TQCache` in each format, read packed by transformers' model."""
    from haarkv.benchmarks.cases import kv_numbers, plain, plan_of, token_bytes
    from haarkv.benchmarks.decode_peers import HFCache
    from haarkv.tq_ops import formats

    if find_spec("transformers") is None:
        return []
    from tq.hf.attention import IMPLEMENTATION
    from tq.hf.cache import TQCache

    chosen = {kv: 8 * sum(token_bytes(plan_of(kv, config), config)) / sum(kv_numbers(config))
              for kv in kvs if plain(kv) and not formats.needs_calibration(kv)}  # fmt: skip
    return [HFCache(f"TQCache {kv}", partial(TQCache, kv=kv), n, implementation=IMPLEMENTATION) for kv, n in chosen.items()]


@command.command("drafts")
@options.together(
    options.model_option(),
    click.option("--kv", default="tq4", show_default=True, help="A format of `tq formats`, or k=NAME,v=NAME."),
    options.executor_option(),
    options.run_options(),
    _contexts("1024"),
    _repeats(3),
    options.draft_options,
    click.option(
        "--text", "text_file", metavar="FILE", help="The UTF-8 text to continue; - is stdin [default: tiny's held-out text]."
    ),
    _save,
    options.json_option,
)
def drafts(text_file: str | None, **given: Any) -> None:
    """Continue a text with a draft and without, in turns, and measure what the draft is worth.

    A draft is measured twice: as in a session's first run, and, as "known", with what earlier runs have shown.
    """
    from haarkv.benchmarks.drafts import DraftRequest, measure, report

    if (spec := options.draft_spec(given)) is None:
        raise click.UsageError("name what guesses the tokens: --draft ngram, self, or a smaller model")
    names = ("model", "executor", "kv", "contexts", "dtype", "layers", "device", "repeats")
    text = None if text_file is None else read_text(text_file, "--text")
    request = DraftRequest(draft=spec, text=text, **{name: given[name] for name in names} | {"kv": given["kv"] or "tq4"})
    with _turning(given) as on_turn, loading(request.model) as progress:
        rows = measure(request, progress, on_turn)
    _finish(report(request, rows), given)


@command.command("long-context")
@options.together(options.model_option("random:14b"), _kvs("tq4"), options.executor_option(), _dtype, options.layers_option)
@options.count("--threads", "CPU threads; 1 measures CPU time, more wall time.", 1)
@_contexts("200000")
@options.count("--prefill", "Last tokens of a context that are computed.", 4096)
@options.count("--steps", "Decode steps that count.", 7)
@_save
@options.json_option
def long_context(**given: Any) -> None:
    """Measure the memory of a process that holds a long context, a chunked prefill at its end, and the steps behind it.

    The history is random K and V, and a model with fewer positions is extended by YaRN. Each format and context is measured in
    a process of its own, beside the bytes that `tq info --context` predicts. --executor is cpu or reference.
    """
    from haarkv.benchmarks.long_context import Request, measure, report

    names = ("model", "layers", "dtype", "executor", "prefill", "steps", "threads")
    of_all = {name: given[name] for name in names}
    _require_known(given["executor"])
    requests = [Request(kv=kv, context=c, **of_all) for kv in _kv_list(given, ["tq4"]) for c in given["contexts"]]
    with _turning(given) as on_turn:
        rows = list(measure(requests, on_turn))
    _finish(report(requests, rows), given)


@command.command("weights")
@options.model_option()
@click.option("--text", "text_file", metavar="FILE", required=True, help="The UTF-8 text to score; - is stdin.")
@options.count("--tokens", "The first N tokens of it.", 1024)
@click.option(
    "--other", "beside", multiple=True, metavar="FILE", help="Measure another file of this model instead, by this one."
)
@options.count("--threads", "CPU threads, of each side.", 2)
@options.together(_no_peers, _save, options.json_option)
def weights(model: str, text_file: str, tokens: int, no_peers: bool, beside: tuple[str, ...], **given: Any) -> None:
    """Measure what multiplying with a GGUF file's blocks changes: KL from the same weights restored, ours and llama.cpp's."""
    from haarkv.benchmarks.weights import measure, measure_beside, report

    text = read_text(text_file, "--text")
    with _turning(given) as on_turn, loading(model) as progress:
        if beside:
            rows = measure_beside(model, beside, text, tokens, progress, on_turn)
        else:
            rows = measure(model, text, tokens, not no_peers, given["threads"], progress, on_turn)
    _finish(report(Path(model).name, Path(text_file).name, tokens, rows, beside=bool(beside)), given)


@command.command("serve")
@options.model_option("random:0.6b")
@options.numbers("--users", "Requests at once.", "1,2,4,8,16,25")
@options.numbers("--prompt-tokens", "Of each prompt.", "128,1024,8192")
@click.option(
    "--kv", default="bf16,tq4", metavar="LIST", show_default=True, help="Formats; the last is measured by the first."
)
@options.together(
    options.calibration_option,
    click.option("--kv-plan", "plans", type=Path, multiple=True, metavar="FILE", help="Also a plan."),
)
@click.option("--layers", type=int, metavar="N", help="For random:SIZE: build only N layers [default: 4].")
@options.count("--output-tokens", "Of each answer.", 64)
@options.count("--memory", "MiB of KV cache of each server.", 1536)
@options.count("--cold", "Rounds of new prompts.", 1)
@options.count("--repeats", "Rounds that send the last of them again.", 3)
@options.seed_option
@_save
@options.json_option
def serve(**given: Any) -> None:
    """Measure vLLM's server under load with several storages of K and V, in turns, the same memory for each; needs vLLM."""
    from haarkv.benchmarks.serve import measure, request_of

    request = request_of(**{name: value for name, value in given.items() if name not in ("save", "as_json")})
    with _turning(given) as on_turn:
        report = measure(request, on_turn)
    _finish(report, given)


@command.command("npu")
@options.together(_contexts("512,1024,2048,4096,8192"), _batches("1,8"))
@click.option("--variant", "variants", multiple=True, help="A design to simulate; repeatable [default: all].")
@options.together(_plot, _save, options.json_option)
def npu(contexts: tuple[int, ...], batches: tuple[int, ...], variants: tuple[str, ...], **given: Any) -> None:
    """Count the cycles of decode attention at Qwen3-14B's shape, in PyPTO's cost model of an Ascend 910B.

    The cycles are simulated. Use them to compare designs, not as latencies. A point takes seconds to minutes.
    """
    from haarkv.benchmarks.npu import VARIANTS, measure, report, svg

    if unknown := set(variants) - set(VARIANTS):
        raise click.UsageError(f"no such variant: {unknown.pop()}; choose from {', '.join(VARIANTS)}")
    with _turning(given) as on_turn:
        points = list(measure(contexts, batches, variants or tuple(VARIANTS), on_turn))
    _finish(report(points), given, partial(svg, points))
