"""`tq validate`: hold an executor against another one, layer by layer, and name the layer and stage where they part."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq.commands.generate import read_prompt
from tq.files import check_writable, write_whole
from tq.kv_options import kv_options, kv_spec
from tq.output import err, loading, print_table

if TYPE_CHECKING:
    from haarkv.models.base import DecoderModel
    from haarkv.validation.layers.report import Finding, LayerRow, Report
    from haarkv.validation.layers.self_test import SelfTestRow

_SELF_TEST_PROMPTS = ("def main(argv):\n    return", "class ")


@click.command("validate")
@click.option("--model", default="tiny", show_default=True, help="tiny, a Hugging Face folder, or random:SIZE.")
@click.option("--executor", default="reference", show_default=True, help="The executor on trial.")
@click.option("--device", "--provider", help="Where it runs; npu: sim or npu:N; onnx: cpu, cuda or cann.")
@click.option("--reference", default="reference", show_default=True, help="The executor that it is held against.")
@kv_options()
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Repeat it for a ragged batch.")
@click.option("--prompt-file", "files", multiple=True, metavar="FILE", help="A UTF-8 file as one prompt; - is stdin.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), metavar="N", help="Only the first N tokens of each prompt.")
@click.option("--steps", type=click.IntRange(min=0), default=4, show_default=True, help="Decode steps after the prefill.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: bfloat16 with npu, else float32]")
@click.option("--layers", type=int, help="For random:SIZE: how many of its layers to build.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; 1 is best for tiny on a busy machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), metavar="FILE", help="Rows, with Ascend's columns.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="A page with plots.")
@click.option("--self-test", is_flag=True, help="Plant faults in the reference and see that each is found.")
@click.pass_context
def command(context: click.Context, /, **given: Any) -> int:
    """Compare an executor with a reference, layer by layer.

    Every layer is run twice: fed the reference's own input (who is guilty) and left to itself (how errors grow).
    Exit code 0 if all is within the bounds, 1 if not, 2 if nothing could be compared.
    """
    if given["threads"] is not None:
        import torch

        torch.set_num_threads(given["threads"])
    if given["self_test"]:
        return _self_test(context, dtype=given["dtype"], as_json=given["as_json"])
    files = [file for file in (given["csv_file"], given["html_file"]) if file is not None]
    if len({file.resolve() for file in files}) < len(files):
        raise click.UsageError("--csv and --html name the same file")
    for file in files:
        check_writable(file)
    report = _validate(**given)
    if given["csv_file"]:
        write_whole(given["csv_file"], _as_csv(report))
    if given["html_file"]:
        from haarkv.validation.layers.page import page

        write_whole(given["html_file"], page(report))
    if given["as_json"]:
        from haarkv.validation.layers.report import as_json

        print(json.dumps(as_json(report)))
    else:
        _print_verdict(report)
    return 0 if report.passed else 1


def _validate(
    *, model: str, executor: str, device: str | None, reference: str, prompts: tuple[str, ...],
    files: tuple[str, ...], prompt_tokens: int | None, steps: int, dtype: str | None, layers: int | None, as_json: bool,
    **others: Any,
) -> Report:  # fmt: skip
    texts = [*prompts, *(read_prompt(file) for file in files)]
    if not texts:
        raise click.UsageError("no prompt: give --prompt TEXT or --prompt-file FILE")
    from haarkv.engine.session import Session, plan_for
    from haarkv.executors.catalog import create, default_dtype
    from haarkv.models.catalog import load_model
    from haarkv.models.text import load_tokenizer
    from haarkv.validation.layers.runner import count_rows, validate

    spec = kv_spec(others)
    # Both run the same weights: in the dtype of the one that asks for less.
    shared = "bfloat16" if "bfloat16" in (default_dtype(reference), default_dtype(executor)) else "float32"
    with loading(model) as progress:
        loaded = load_model(model, dtype or shared, layers, progress)
    plan = plan_for(spec, loaded.config)
    trusted, on_trial = create(reference, loaded, plan), create(executor, loaded, plan, device)
    session = Session(model, loaded.config, on_trial, load_tokenizer(model, loaded.config), plan)
    ids = [tokens[:prompt_tokens] for tokens in session.encode(texts)]
    total = count_rows(ids, steps, loaded.config.num_layers) if all(ids) else 0
    with _watched(total, as_json) as on_row:
        return validate(trusted, on_trial, loaded, ids, steps, plan, on_row)


# -- While it runs -------------------------------------------------------------------------------------------------------
_COLUMNS = (
    ("phase", 10), ("layer", 5), ("mode", 14), ("K %", 8), ("V %", 8), ("unexpl.", 7), ("scale", 8), ("cosine", 10),
    ("rel. L2", 8), ("max abs", 8), ("", 7),
)  # fmt: skip


@contextmanager
def _watched(total: int, as_json: bool) -> Iterator[Callable[[LayerRow], None]]:
    """Rows as they come: a table on stdout, or a bar on stderr where stdout is for JSON."""
    if not as_json:
        # Not before the first row: what is refused prints nothing.
        printed = False

        def show(row: LayerRow) -> None:
            nonlocal printed
            if not printed:
                print(_line([name for name, _ in _COLUMNS]))
                printed = True
            print(_line(_cells(row)), flush=True)

        yield show
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda _: bar.advance(task)


def _line(cells: Sequence[str]) -> str:
    left = {"phase", "mode", ""}
    parts = [cell.ljust(w) if name in left else cell.rjust(w) for cell, (name, w) in zip(cells, _COLUMNS, strict=True)]
    return "  ".join(parts).rstrip()


def _cells(row: LayerRow) -> list[str]:
    return [
        f"{row.phase} {row.step}", str(row.layer), row.mode, f"{100 * row.k_match:.3f}", f"{100 * row.v_match:.3f}",
        str(row.unexplained), f"{row.scale_err:.1e}", f"{row.hidden_cos:.8f}", f"{row.rel_l2:.1e}", f"{row.max_abs:.1e}",
        "" if row.passed else "OUTSIDE",
    ]  # fmt: skip


# -- At the end ----------------------------------------------------------------------------------------------------------
def describe(finding: Finding) -> str:
    """Where and why, in one line."""
    place = f"layer {finding.layer}, " if finding.layer is not None else ""
    return f"{finding.phase} {finding.step}, {place}{finding.stage}: {finding.reason} ({finding.detail})"


def _print_verdict(report: Report) -> None:
    tokens = [row for row in report.logits if row.same_token < row.sequences]
    rows = [
        ("verdict", "passed" if report.passed else "FAILED"),
        ("first divergence", describe(report.first_divergence) if report.first_divergence else "none: equal to the last bit"),
        ("next tokens", f"the same in {len(report.logits) - len(tokens)} of {len(report.logits)} forwards, left to itself"),
    ]
    print()
    print_table(f"{report.candidate} against {report.reference}, {report.kv}, {report.dtype}", [], rows)


def _as_csv(report: Report) -> str:
    from haarkv.validation.layers.report import csv_rows

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(report))
    return text.getvalue()


# -- The self-test -------------------------------------------------------------------------------------------------------
_OWN = {"self_test", "dtype", "as_json", "threads"}


def _self_test(context: click.Context, *, dtype: str | None, as_json: bool) -> int:
    """Plant every fault, print what became of it; 0 if each was found where it was planted, else 1."""
    source = click.core.ParameterSource.DEFAULT
    for option in context.command.params:
        if option.name and option.name not in _OWN and context.get_parameter_source(option.name) is not source:
            raise click.UsageError(f"--self-test brings its own model, prompts and executor; leave out {option.opts[0]}")
    from haarkv.models.catalog import load_model
    from haarkv.models.text import load_tokenizer
    from haarkv.validation.layers.self_test import self_test

    models: list[DecoderModel] = [load_model("tiny", name) for name in ([dtype] if dtype else ["float32", "bfloat16"])]
    tokenizer = load_tokenizer("tiny", models[0].config)
    prompts = [tokenizer.encode(text) for text in _SELF_TEST_PROMPTS]
    rows = self_test(models, prompts, None if as_json else _show_fault)
    caught = sum(row.caught for row in rows)
    if as_json:
        print(json.dumps({"passed": caught == len(rows), "rows": [asdict(row) for row in rows]}))
    else:
        print(f"\n{caught} of {len(rows)} as they should be: " + ("passed" if caught == len(rows) else "FAILED"))
    return 0 if caught == len(rows) else 1


def _show_fault(row: SelfTestRow) -> None:
    widths = zip((8, 6, 40, 24, 24), (row.dtype, row.driven, row.fault, row.planted, row.found), strict=True)
    line = "  ".join(cell.ljust(width) for width, cell in widths)
    print(f"{'ok  ' if row.caught else 'MISS'}  {line}  {row.how}", flush=True)
