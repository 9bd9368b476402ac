"""`tq validate`: compare an executor with a reference, layer by layer, and name the layer and stage where they differ."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import check_writable, write_whole
from tq.commands.generate import read_prompts
from tq.options import (
    executor_option,
    json_option,
    kv_options,
    kv_spec,
    model_option,
    prompt_options,
    run_options,
    set_threads,
)
from tq.output import compiling, err, loading, print_table, unread_is_fine
from tq.ranks import tensor_parallel

if TYPE_CHECKING:
    from haarkv.executors.catalog import Selection
    from haarkv.models.base import DecoderModel
    from haarkv.models.parallel import Ranks
    from haarkv.validation.layers.page import About
    from haarkv.validation.layers.report import Finding, LayerRow, Report
    from haarkv.validation.layers.self_test import SelfTestRow

_SELF_TEST_PROMPTS = ("def main(argv):\n    return", "class ")


@click.command("validate")
@model_option()
@prompt_options
@click.option("--prompt-tokens", type=click.IntRange(min=1), metavar="N", help="Use only the first N tokens of each prompt.")
@kv_options()
@executor_option()
@run_options()
@click.option("--reference", default="reference", show_default=True, help="The executor to compare with.")
@click.option("--steps", type=click.IntRange(min=0), default=4, show_default=True, help="Decode steps after the prefill.")
@click.option(
    "--csv", "csv_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows, with Ascend's columns."
)
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots.")
@click.option("--verbose", is_flag=True, help="Print a row for each layer too.")
@click.option("--self-test", is_flag=True, help="Plant faults in the reference and check that each is found.")
@json_option
@click.pass_context
@tensor_parallel
def command(context: click.Context, /, **given: Any) -> int:
    """Compare an executor with a reference, layer by layer.

    Each layer runs twice: on the reference's own input (which layer is wrong?), and on what the executor made of the layer
    before (how do errors grow?). Without --executor, the fastest executor of this machine is compared.

    Exit code 0 if everything is within its bounds, 1 if not, 2 if nothing could be compared.
    """
    # Whoever reads only the first line of the output still gets the files and the exit code.
    with unread_is_fine():
        set_threads(given["threads"])
        if given["self_test"]:
            return _self_test(context, dtype=given["dtype"], as_json=given["as_json"])
        files = [file for file in (given["csv_file"], given["html_file"]) if file is not None]
        if len({file.resolve() for file in files}) < len(files):
            raise click.UsageError("--csv and --html name the same file")
        for file in files:
            check_writable(file)
        texts = read_prompts(given["prompts"], given["files"], given["ranks"])
        validated = _validate(texts, **given)
        if validated is None:  # rank 0 has the report
            return 0
        report, note = validated
        if given["csv_file"]:
            write_whole(given["csv_file"], _as_csv(report))
        if given["html_file"]:
            from haarkv.validation.layers.page import page

            write_whole(given["html_file"], page(report, _about(context, given["model"], texts)))
        if given["as_json"]:
            from haarkv.validation.layers.report import as_json

            print(json.dumps({"model": given["model"], **as_json(report)}))
        else:
            _print_verdict(report, note)
            _print_rows(report, given["verbose"])
        return 0 if report.passed else 1


def _validate(
    texts: Sequence[str], *, model: str, executor: str, device: str | None, reference: str, prompt_tokens: int | None,
    steps: int, dtype: str | None, layers: int | None, ranks: Ranks, **others: Any,
) -> tuple[Report, str] | None:  # fmt: skip
    """The report, and why `auto` passed over a faster executor; on other ranks than 0 nothing.

    Of several ranks each has the executor on its part of the model, and rank 0 the reference on the whole.
    """
    with loading(model) as progress:
        from haarkv.engine.plans import plan_for
        from haarkv.engine.session import Session
        from haarkv.executors.catalog import AUTO, check, create, default_dtype, select
        from haarkv.models.catalog import load_model, read_config
        from haarkv.models.parallel import Split
        from haarkv.models.text import load_tokenizer
        from haarkv.validation.layers.ranks import follow, gathered
        from haarkv.validation.layers.runner import count_rows, validate

        config = read_config(model, layers)
        spec, split = kv_spec(others), Split(config, ranks.rank, ranks.size)
        part, plan, own = split.part, plan_for(spec, config), plan_for(spec, config, split)
        reference = select(reference, config, [plan], dtype=dtype).name  # a slip in the name is refused first
        selected = select(executor, part, [own], device=device, dtype=dtype)
        if executor == AUTO and selected.name == reference:
            raise click.UsageError(_itself(selected))
        check(reference, config, plan)
        check(selected.name, part, own, device, ranks)
        # Both run the same weights, in a dtype that both take.
        shared = "bfloat16" if "bfloat16" in (default_dtype(reference), default_dtype(selected.name)) else "float32"
        here = load_model(model, dtype or shared, layers, progress, ranks)
        on_trial = create(selected.name, here, own, device, compiling)
        if ranks.rank:
            follow(on_trial, ranks, config, own)
            return None
        loaded = here if ranks.size == 1 else load_model(model, dtype or shared, layers, progress)
    trusted = create(reference, loaded, plan, on_program=compiling)
    session = Session(model, loaded.config, trusted, load_tokenizer(model, loaded.config), plan)
    ids = [tokens[:prompt_tokens] for tokens in session.encode(texts)]
    total = count_rows(ids, steps, loaded.config.num_layers) if all(ids) else 0
    with _counted(total) as on_row, gathered(on_trial, ranks, config, own) as candidate:
        return validate(trusted, candidate, loaded, ids, steps, plan, on_row), selected.passed_over


def _itself(selected: Selection) -> str:
    """What is wrong when `auto` stands for the reference of the comparison."""
    from haarkv.executors.catalog import FASTEST_FIRST

    why = f" ({selected.passed_over})" if selected.passed_over else ""
    nothing = "compared with itself it proves nothing"
    if selected.name == FASTEST_FIRST[-1]:
        return f"only {selected.name} can run this here{why}, and {nothing}; change --kv or --model"
    return f"auto is {selected.name} here{why}, the reference itself, and {nothing}; name another --executor"


def _about(context: click.Context, model: str, prompts: Sequence[str]) -> About:
    """What the page says of how it was made."""
    from haarkv.benchmarks.report import machine
    from haarkv.validation.layers.page import About
    from tq import __version__

    argv = context.find_root().obj.argv
    found = {name: str(value) for name, value in machine().items()}
    versions = {"haarkv": __version__, "python": found.pop("python"), "torch": found.pop("torch")}
    if commit := found.pop("commit", None):
        versions["commit"] = commit
    return About(
        model=model,
        command=shlex.join(["tq", *argv]),
        prompts=prompts,
        versions=versions,
        machine=found,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


# -- While it runs -------------------------------------------------------------------------------------------------------
@contextmanager
def _counted(total: int) -> Iterator[Callable[[LayerRow], None]]:
    """A bar on stderr; silent when stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("comparing layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda _: bar.advance(task)


# -- At the end ----------------------------------------------------------------------------------------------------------
def describe(finding: Finding) -> str:
    """Where and why, in one line."""
    place = f"layer {finding.layer}, " if finding.layer is not None else ""
    return f"{finding.phase} {finding.step}, {place}{finding.stage}: {finding.reason} ({finding.detail})"


def _print_verdict(report: Report, note: str) -> None:
    same = sum(row.same_token == row.sequences for row in report.logits)
    outside = [row for row in report.rows if not row.passed]
    rows = [
        ("verdict", "passed" if report.passed else "FAILED"),
        ("first divergence", describe(report.first_divergence) if report.first_divergence else "none: equal to the last bit"),
        ("layers", f"{len(report.rows)} rows, {len(outside)} outside their bounds"),
        ("next tokens", f"the same in {same} of {len(report.logits)} forwards"),
    ]
    if note:
        rows.append(("executor", f"{report.candidate} ({note})"))
    print_table(f"{report.candidate} against {report.reference}, {report.kv}, {report.dtype}", [], rows)


_COLUMNS = (
    ("phase", 10), ("layer", 5), ("mode", 14), ("K %", 8), ("V %", 8), ("unexpl.", 7), ("scale", 8), ("cosine", 10),
    ("rel. L2", 8), ("max abs", 8), ("", 7),
)  # fmt: skip


def _print_rows(report: Report, verbose: bool) -> None:
    """Every row, or only the first that are outside their bounds."""
    outside = [row for row in report.rows if not row.passed]
    shown = report.rows if verbose else outside[:_MOST_OUTSIDE]
    if shown:
        print(_line([name for name, _ in _COLUMNS]))
    for row in shown:
        print(_line(_cells(row)))
    if not verbose and len(shown) < len(report.rows):
        print(f"{len(report.rows) - len(shown)} more rows: --verbose")


_MOST_OUTSIDE = 4


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


def _as_csv(report: Report) -> str:
    from haarkv.validation.layers.report import csv_rows

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(report))
    return text.getvalue()


# -- The self-test -------------------------------------------------------------------------------------------------------
_OWN = {"self_test", "dtype", "as_json", "threads"}


def _self_test(context: click.Context, *, dtype: str | None, as_json: bool) -> int:
    """Plant every fault and print what the validator said; 0 if each was found where it was planted, else 1."""
    source = click.core.ParameterSource.DEFAULT
    for option in context.command.params:
        if option.name and option.name not in _OWN and context.get_parameter_source(option.name) is not source:
            raise click.UsageError(f"--self-test uses its own model, prompts and executor; leave out {option.opts[0]}")
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
        print(
            f"\n{caught} of {len(rows)} faults and controls judged right: " + ("passed" if caught == len(rows) else "FAILED")
        )
    return 0 if caught == len(rows) else 1


def _show_fault(row: SelfTestRow) -> None:
    widths = zip((8, 6, 40, 24, 24), (row.dtype, row.driven, row.fault, row.planted, row.found), strict=True)
    line = "  ".join(cell.ljust(width) for width, cell in widths)
    print(f"{'ok  ' if row.caught else 'MISS'}  {line}  {row.how}", flush=True)
