"""Measure every cache of ours and of others on models and texts, against each model's own bf16 cache.

  python -m lab.matrix a.gguf b.gguf --text prose.txt --text code.txt --out matrix.jsonl --windows 1024,4096
  python -m lab.matrix --out matrix.jsonl --plot matrix.svg          # draw what is there

A row is written as soon as it is measured, and one that --out holds is not measured again: Ctrl-C loses one row. Models
are as `tq eval` takes them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from haarkv.benchmarks.report import machine
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.output_files import check_writable, write_whole
from haarkv.validation.fidelity.setup import parse_list
from lab.matrix.entries import BY_LAYER, DEFAULT, ENTRIES, parse_entry
from lab.matrix.measure import Results, entries_for, measure, scored_tokens
from lab.matrix.models import ModelInfo, ResidualSizes, Subject, Task, Text, prepare
from lab.matrix.plot import matrix_svg
from lab.rivals import oscar, register
from tq import __version__
from tq.options import integers, set_threads
from tq.output import loading, print_table, scoring, warn


def _positive(text: str) -> tuple[int, ...]:
    numbers = integers(text)
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers such as 512,4096")
    return numbers


def _residuals(text: str) -> tuple[ResidualSizes, ...]:
    pairs = [re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of TAIL:SINKS such as 0:0,128:4")
    return tuple(dict.fromkeys(ResidualSizes(int(pair[1]), int(pair[2])) for pair in pairs if pair))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lab.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL")
    add("--text", dest="texts", action="append", default=[], metavar="FILE",
        help="a UTF-8 text; repeatable; its kind is the file's name")  # fmt: skip
    add("--out", type=Path, required=True, metavar="FILE", help="results, JSON lines")
    add("--kv", dest="kvs", action="append", default=[], metavar="LIST", help="formats by commas; repeatable [default: all]")
    add("--windows", type=_positive, default=(1024,), metavar="LIST", help="tokens of a window [default: 1024]")
    add("--beside", type=_residuals, default=(ResidualSizes(0, 0), ResidualSizes(128, 4)), metavar="LIST",
        help="TAIL:SINKS, how many tokens stay in BF16, the same for all caches [default: 0:0,128:4]")  # fmt: skip
    add("--tokens", type=int, default=8192, metavar="N", help="score N of each text at most [default: 8192]")
    add("--learn", metavar="FILE", help="a text for what learns: OSCAR, lr2 to lr5")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--plot", type=Path, metavar="FILE", help="draw what --out holds, as SVG")
    add("--threads", type=int, metavar="N", help="CPU threads")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 0, or 2 after one line on stderr."""
    options = _parser().parse_args(argv)
    try:
        _run(options)
    except InputError as error:
        print(f"lab.matrix: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    for file in (options.out, *([options.plot] if options.plot else [])):
        check_writable(file)
    if options.plot and options.plot.resolve() == options.out.resolve():
        raise InputError("--out and --plot name the same file")
    if options.plot and find_spec("matplotlib") is None:
        raise InputError("matplotlib is not installed, so nothing can be drawn; pip install 'haarkv[dev]'")
    measures = options.models and options.texts
    if not measures and (options.models or options.texts or not options.plot):
        raise InputError("name models and --text files to measure, or --plot alone to draw what --out holds")
    if options.tokens < 1:
        raise InputError("--tokens counts from 1")
    register()
    set_threads(options.threads)
    results = Results(options.out)
    if measures:
        _measure(options.models, _task(options), results)
    if not results.rows:
        raise InputError(f"{options.out} holds no rows; name models and --text files")
    _print(results.rows)
    if options.plot:
        write_whole(options.plot, matrix_svg(results.rows))


def _text(file: str, kind: str, option: str) -> Text:
    try:
        content = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{option} {file} cannot be read as UTF-8 text") from None
    if not content:
        raise InputError(f"{option} {file} is empty; give a text of a few thousand tokens")
    return Text(kind, content)


def _task(options: argparse.Namespace) -> Task:
    if len({Path(file).stem for file in options.texts}) < len(options.texts):
        raise InputError("two texts have the same kind, the name of their file; rename one")
    names = parse_list(options.kvs, accepts=lambda part: part.startswith(BY_LAYER) or part in (DEFAULT, oscar.NAME))
    entries = tuple(map(parse_entry, names)) or ENTRIES
    if names and options.learn is None and (learned_kvs := [entry.kv for entry in entries if entry.needs_learning]):
        raise InputError(f"{learned_kvs[0]} is learned of a model; give --learn a text of ten thousand tokens")
    texts = [_text(file, Path(file).stem, "--text") for file in options.texts]
    learn_from = None if options.learn is None else _text(options.learn, "learn", "--learn")
    windows = tuple(dict.fromkeys(options.windows))
    return Task(entries, texts, windows, options.beside, options.tokens, learn_from, options.dtype)


def _measure(models: Sequence[str], task: Task, results: Results) -> None:
    model_infos = [prepare(model, task) for model in dict.fromkeys(models)]
    for model_info in model_infos:
        _warn_of_missing(model_info, task)
    about = machine() | {"haarkv": __version__, "date": datetime.now(UTC).date().isoformat()}
    for model_info in model_infos:
        with loading(model_info.name) as progress:
            subject = Subject(model_info, task, progress)
        with scoring(scored_tokens(model_info, task)) as on_step:
            measure(subject, model_info, task, results, about, on_step)


def _warn_of_missing(info: ModelInfo, task: Task) -> None:
    """Say which entries have no row for a model."""
    for residual in task.residuals:
        left_out = [entry.label for entry in task.entries if entry not in entries_for(info, task, residual)]
        if left_out:
            warn(f"{info.short}, tail {residual.tail}: no row for {', '.join(left_out)}, which cannot hold its vectors or tail"
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


if __name__ == "__main__":
    sys.exit(main())
