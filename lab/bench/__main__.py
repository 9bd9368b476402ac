"""`python -m lab.bench NAME`: ours beside others', and what the product does not ask every day.

Each prints tables, or one JSON line. `gpu` is a program of its own: `python -m lab.bench.gpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from haarkv.benchmarks.cases import benchmark_plan, is_file, token_bytes
from haarkv.benchmarks.report import Report
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from lab.bench import neighbours
from lab.bench.peers import HFCache, kv_numbers
from tq import options
from tq.commands.bench import (
    DEFAULT_KINDS,
    KINDS,
    contexts_option,
    finish,
    kv_list,
    of_a_layer,
    repeats_option,
    request_of,
    save_option,
    turning,
)
from tq.commands.eval import read_text
from tq.options import IntRange
from tq.output import loading, one_line, warn

_INTERRUPT_CODE = 130
_no_peers = click.option("--no-peers", is_flag=True, help="Measure ours alone.")


@click.group("bench")
def command() -> None:
    """Measure ours beside others', and what the product does not ask every day."""


@contextmanager
def _processor_watch(params: dict[str, Any]) -> Iterator[Callable[[str], None]]:
    """As `turning`; `params` then holds, as `waited`, which share of the time other processes had the processors."""
    before = neighbours.thread_times()
    with turning() as on_turn:
        yield on_turn
    params["waited"] = neighbours.share_waited(before, neighbours.thread_times())


def _finish(report: Report, params: dict[str, Any]) -> None:
    """As `finish`. A busy machine is said first."""
    waiting_share = params.get("waited")
    if busy := neighbours.warning(waiting_share):
        warn(busy)
    finish(
        report if waiting_share is None else replace(report, values={**report.values, "waited": round(waiting_share, 4)}),
        params,
    )


class _PeerNames(click.ParamType[tuple[str, ...]]):
    """Names of peers, separated by commas."""

    name = "peers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from lab.bench.peers import PEERS

        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        if unknown := [name for name in names if name not in PEERS]:
            self.fail(f"{unknown[0]!r} is no peer; choose from {', '.join(PEERS)}", param, ctx)
        return names


@command.command("decode")
@of_a_layer
@click.option("--only", "kinds", multiple=True, type=click.Choice(KINDS), help="As of `tq bench decode`.")
@click.option("--peers", type=_PeerNames(), default="sdpa,transformers", show_default=True, metavar="LIST",
              help="Whom to measure beside: torch's sdpa, transformers, llama.cpp.")  # fmt: skip
@click.option("--peer-kv", metavar="LIST", default="f16,q8_0,q4_0", show_default=True,
              help="llama.cpp's KV caches. TYPE is with flash attention and, unless quantized, without; TYPE:flash or "
              "TYPE:plain is one.")  # fmt: skip
def decode(kinds: tuple[str, ...], peers: tuple[str, ...], peer_kv: str, **params: Any) -> None:
    """Measure as `tq bench decode` does, with others beside ours.

    With llama.cpp prompts of random tokens are measured as well; its steps follow such a prompt, ours random K and V. It gets
    the same weights as a GGUF, in a temporary folder, and as many threads.
    """
    from haarkv.benchmarks.decode import measure, report
    from lab.bench import llama_process
    from lab.bench.peers import LLAMA, TRANSFORMERS, Peers, beside_peers

    if LLAMA in peers:
        llama_process.require()
    kvs, llama_kvs = kv_list(params), llama_process.parse_kinds(peer_kv)
    kinds = kinds or (*DEFAULT_KINDS, *["prompt"] * (LLAMA in peers))
    with _processor_watch(params) as on_turn, loading(params["model"]) as progress, ExitStack() as stack:
        peer_rows = Peers(peers, params["model"], stack, llama_kvs, partial(_hf_caches, kvs), on_turn)
        request = request_of(params, kinds=kinds, peer_variants=peer_rows)
        machine, rows = measure(request, progress, on_turn)
    packages = [package for name, package in ((TRANSFORMERS, "transformers"), (LLAMA, "llama-cpp-python")) if name in peers]
    result = beside_peers(report("decode", request, machine, rows), rows)
    _finish(replace(result, packages=packages), params)


@command.command("prefill")
@of_a_layer
@click.option("--stored", type=IntRange(min=0), default=0, metavar="N", help="Tokens before the prompt.")
@_no_peers
def prefill(no_peers: bool, stored: int, **params: Any) -> None:
    """Measure attention of one layer over a whole prompt, by its length, executor and format, beside torch's.

    Each token attends to itself and those before it, over the packed cache. All variants of a case take turns; torch's is
    causal SDPA in BF16, which is flash attention. `--contexts` are the lengths of the prompt.
    """
    from lab.bench.prefill import measure, report

    with _processor_watch(params) as on_turn, loading(params["model"]) as progress:
        request = request_of(params)
        machine, rows = measure(request, stored, not no_peers, progress, on_turn)
    _finish(report(request, stored, machine, rows), params)


def _hf_caches(kvs: Sequence[str], config: ModelConfig) -> list[HFCache]:
    """`TQCache` in each format, read packed by transformers' model."""
    if find_spec("transformers") is None:
        return []
    from tq.hf.cache import TQCache
    from tq.hf.layer import IMPLEMENTATION

    bits_by_kv = {kv: 8 * sum(token_bytes(benchmark_plan(kv, config), config)) / sum(kv_numbers(config))
              for kv in kvs if not is_file(kv) and not set(kv) & set("+/") and not formats.needs_calibration(kv)}  # fmt: skip
    return [
        HFCache(f"TQCache {kv}", partial(TQCache, kv=kv), n, implementation=IMPLEMENTATION) for kv, n in bits_by_kv.items()
    ]


@command.command("drafts")
@options.together(
    options.model_option(),
    click.option("--kv", default="tq4", show_default=True, help="A format of `tq formats`, or k=NAME,v=NAME."),
    options.executor_option(),
    options.run_options(),
    contexts_option("1024"),
    repeats_option(3),
    options.draft_options,
    click.option(
        "--text", "text_file", metavar="FILE", help="The UTF-8 text to continue; - is stdin [default: tiny's held-out text]."
    ),
    save_option,
    options.json_option,
)
def drafts(text_file: str | None, **params: Any) -> None:
    """Continue a text with a draft and without, in turns, and measure what the draft is worth.

    A draft is measured twice: as in a session's first run, and, as "known", with what earlier runs have shown.
    """
    from lab.bench.drafts import DraftRequest, measure, report

    if (spec := options.draft_spec(params)) is None:
        raise click.UsageError("name what guesses the tokens: --draft ngram, self, or a smaller model")
    names = ("model", "executor", "kv", "contexts", "dtype", "layers", "device", "repeats")
    text = None if text_file is None else read_text(text_file, "--text")
    request = DraftRequest(draft=spec, text=text, **{name: params[name] for name in names} | {"kv": params["kv"] or "tq4"})
    with _processor_watch(params) as on_turn, loading(request.model) as progress:
        rows = measure(request, progress, on_turn)
    _finish(report(request, rows), params)


@command.command("weights")
@options.model_option()
@click.option("--text", "text_file", metavar="FILE", required=True, help="The UTF-8 text to score; - is stdin.")
@options.count("--tokens", "The first N tokens of it.", 1024)
@click.option(
    "--other", "beside", multiple=True, metavar="FILE", help="Measure another file of this model instead, by this one."
)
@options.count("--threads", "CPU threads, of each side.", 2)
@options.together(_no_peers, save_option, options.json_option)
def weights(model: str, text_file: str, tokens: int, no_peers: bool, beside: tuple[str, ...], **params: Any) -> None:
    """Measure what multiplying with a GGUF file's blocks changes: KL from the same weights restored, ours and llama.cpp's."""
    from lab.bench.weights import measure, measure_beside, report

    text = read_text(text_file, "--text")
    with _processor_watch(params) as on_turn, loading(model) as progress:
        if beside:
            rows = measure_beside(model, beside, text, tokens, progress, on_turn)
        else:
            rows = measure(model, text, tokens, not no_peers, params["threads"], progress, on_turn)
    _finish(report(Path(model).name, Path(text_file).name, tokens, rows, several_files=bool(beside)), params)


@command.command("serve")
@options.model_option("random:0.6b")
@options.numbers("--users", "Requests at once.", "1,2,4,8,16,25")
@options.numbers("--prompt-tokens", "Of each prompt.", "128,1024,8192")
@click.option(
    "--kv", default="bf16,tq4", metavar="LIST", show_default=True, help="Formats; the last is measured by the first."
)
@click.option("--layers", type=int, metavar="N", help="For random:SIZE: build only N layers [default: 4].")
@options.count("--output-tokens", "Of each answer.", 64)
@options.count("--memory", "MiB of KV cache of each server.", 1536)
@options.count("--cold", "Rounds of new prompts.", 1)
@options.count("--repeats", "Rounds that send the last of them again.", 3)
@options.seed_option
@save_option
@options.json_option
def serve(**params: Any) -> None:
    """Measure vLLM's server under load with several storages of K and V, in turns, the same memory for each; needs vLLM."""
    from lab.bench.serve import measure, request_of

    request = request_of(**{name: value for name, value in params.items() if name not in ("save", "as_json")})
    with _processor_watch(params) as on_turn:
        report = measure(request, on_turn)
    _finish(report, params)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0; 2 and one line for what the user can correct; 130 if interrupted."""
    try:
        command.main(args=None if argv is None else list(argv), prog_name="python -m lab.bench", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPT_CODE
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except (click.ClickException, InputError, OSError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"lab.bench: {one_line(message)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
