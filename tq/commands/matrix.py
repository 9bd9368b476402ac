"""`tq matrix`: every cache of ours and of others, on several models and texts, as rows of one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import check_writable, write_whole
from tq import __version__
from tq.commands.eval import read_text
from tq.groups import Command
from tq.option_kinds import IntRange, Numbers
from tq.options import set_threads, threads_option
from tq.output import loading, print_table, scoring, warn

if TYPE_CHECKING:
    from haarkv.validation.fidelity.matrix import Results
    from haarkv.validation.fidelity.matrix_models import Named, Task


class _Besides(click.ParamType[tuple[tuple[int, int], ...]]):
    """Pairs TAIL:SINKS, separated by commas."""

    name = "pairs"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[tuple[int, int], ...]:
        if isinstance(value, tuple):
            return value
        pairs = [re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", part.strip()) for part in str(value).split(",")]
        if not all(pairs):
            self.fail(f"{shown(value)} is not a list of TAIL:SINKS such as 0:0,128:4", param, ctx)
        return tuple(dict.fromkeys((int(pair[1]), int(pair[2])) for pair in pairs if pair))


@click.command("matrix", cls=Command)
@click.argument("models", nargs=-1, metavar="MODEL...")
@click.option("--text", "texts", multiple=True, metavar="FILE", help="A UTF-8 text; repeatable. Its kind is the file's name.")
@click.option("--out", "out_file", metavar="FILE", type=click.Path(path_type=Path), required=True, help="Results, JSON lines.")
@click.option("--kv", "kvs", multiple=True, metavar="LIST", help="Formats, separated by commas; repeatable [default: all].")
@click.option("--windows", type=Numbers(), default=(1024,), metavar="LIST", show_default="1024", help="Tokens of a window.")
@click.option(
    "--beside", type=_Besides(), default=((0, 0), (128, 4)), metavar="LIST", show_default="0:0,128:4",
    help="TAIL:SINKS, how many tokens stay in BF16, the same for all caches.",
)  # fmt: skip
@click.option(
    "--tokens", type=IntRange(min=1), default=8192, show_default=True, metavar="N", help="Score N of each text at most."
)
@click.option("--learn", "learn_file", metavar="FILE", help="A text for what learns: OSCAR, lr2 to lr5, layers:BITS.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--plot", "plot_file", metavar="FILE", type=click.Path(path_type=Path), help="Draw what --out holds, as SVG.")
@threads_option
def command(
    models: tuple[str, ...], texts: tuple[str, ...], out_file: Path, kvs: tuple[str, ...], windows: tuple[int, ...],
    beside: tuple[tuple[int, int], ...], tokens: int, learn_file: str | None, dtype: str, plot_file: Path | None,
    threads: int | None,
) -> None:  # fmt: skip
    """Measure every cache of ours and of others on models and texts, against each model's own bf16 cache.

    \b
      tq matrix a.gguf b.gguf --text prose.txt --text code.txt --out matrix.jsonl --windows 1024,4096
      tq matrix --out matrix.jsonl --plot matrix.svg          # draw what is there

    A row is written as soon as it is measured, and one that --out holds is not measured again: Ctrl-C loses one row. Models
    are as `tq eval` takes them.
    """
    for file in (out_file, *([plot_file] if plot_file else [])):
        check_writable(file)
    if plot_file is not None and plot_file.resolve() == out_file.resolve():
        raise click.UsageError("--out and --plot name the same file")
    from haarkv.validation.fidelity.matrix import Results
    from haarkv.validation.fidelity.plot import matrix_svg, require_matplotlib

    if plot_file is not None:
        require_matplotlib()
    if not ((models and texts) or (plot_file and not models and not texts)):
        raise click.UsageError("name models and --text files to measure, or --plot alone to draw what --out holds")
    set_threads(threads)
    results = Results(out_file)
    if models:
        _measure(models, _task(texts, kvs, windows, beside, tokens, learn_file, dtype), results)
    if not results.rows:
        raise click.UsageError(f"{out_file} holds no rows; name models and --text files")
    _print(results.rows)
    if plot_file is not None:
        write_whole(plot_file, matrix_svg(results.rows))


def _task(
    texts: Sequence[str], kvs: Sequence[str], windows: Sequence[int], beside: Sequence[tuple[int, int]], tokens: int,
    learn: str | None, dtype: str,
) -> Task:  # fmt: skip
    from haarkv.validation.fidelity.entries import BY_LAYER, ENTRIES, entry_of
    from haarkv.validation.fidelity.matrix_models import Beside, Task, Text
    from haarkv.validation.fidelity.setup import parse_list

    if len({Path(file).stem for file in texts}) < len(texts):
        raise click.UsageError("two texts have the same kind, the name of their file; rename one")
    entries = tuple(entry_of(kv) for kv in parse_list(kvs, taken=lambda part: part.startswith(BY_LAYER))) or ENTRIES
    if kvs and learn is None and (learned := [entry.kv for entry in entries if entry.learned]):
        raise click.UsageError(f"{learned[0]} is learned of a model; give --learn a text of ten thousand tokens")
    read = [Text(Path(file).stem, read_text(file, "--text")) for file in texts]
    learn_from = None if learn is None else Text("learn", read_text(learn, "--learn"))
    pairs = [Beside(*pair) for pair in beside]
    return Task(entries, read, tuple(dict.fromkeys(windows)), pairs, tokens, learn_from, dtype)


def _measure(models: Sequence[str], task: Task, results: Results) -> None:
    from haarkv.benchmarks.report import machine
    from haarkv.validation.fidelity.matrix import measure, tokens_of
    from haarkv.validation.fidelity.matrix_models import Subject, prepare

    prepared = [prepare(model, task) for model in dict.fromkeys(models)]
    for named in prepared:
        _warn_of_missing(named, task)
    about = machine() | {"haarkv": __version__, "date": datetime.now(UTC).date().isoformat()}
    for named in prepared:
        with loading(named.name) as progress:
            subject = Subject(named, task, progress)
        with scoring(tokens_of(named, task)) as on_step:
            measure(subject, named, task, results, about, on_step)


def _warn_of_missing(named: Named, task: Task) -> None:
    """Say which entries have no row for a model."""
    from haarkv.validation.fidelity.matrix import entries_for

    for beside in task.beside:
        left_out = [entry.label for entry in task.entries if entry not in entries_for(named, task, beside)]
        if left_out:
            warn(f"{named.short}, tail {beside.tail}: no row for {', '.join(left_out)}, which cannot hold its vectors or tail"
                 f"{'' if task.learn else ', or learn: see --learn'}")  # fmt: skip


def _print(rows: Sequence[dict[str, Any]]) -> None:
    """One table a model, text, window and tail."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        where = tuple(row[name] for name in ("model", "text", "tokens", "window", "tail", "sink"))
        groups.setdefault(where, []).append(row)
    for (model, text, tokens, window, tail, sink), group in groups.items():
        cells = [
            (r["label"], f"{r['bits_per_value']:.3f}", f"{r['kl_mean']:.3g}", f"{r['kl_median']:.3g}", f"{r['kl_p999']:.3g}",
             f"{r['top1']:.2%}", f"{r['ppl']:.4f}", f"{r['ppl_delta']:+.4f}")
            for r in sorted(group, key=lambda r: r["bits_per_value"])
        ]  # fmt: skip
        title = f"{model}: {tokens:,} tokens of {text}, windows of {window:,}, tail {tail}, {sink} sinks"
        print_table(title, ["cache", "bits", "KL mean", "median", "99.9 %", "same top", "PPL", "ΔPPL"], cells)
    print("bits: a value, everything counted as allocated for a window; KL in nats, against the model's own bf16 cache")
