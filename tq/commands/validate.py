"""`tq validate`: compare an executor with a reference, layer by layer, and name the layer and stage where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from haarkv.tq_ops.output_files import write_whole
from tq import options
from tq.commands.generate import read_prompts
from tq.commands.validate_report import about, as_csv, compare, print_rows, print_verdict, unexercised, write_replay
from tq.commands.validate_run import validated
from tq.groups import Command
from tq.output import unread_is_fine
from tq.ranks import tensor_parallel


@click.command("validate", cls=Command)
@options.model_option()
@options.prompt_options
@options.count("--prompt-tokens", "Use only the first N tokens of each prompt.", metavar="N")
@options.kv_options()
@options.executor_option()
@options.run_options()
@options.activation_option
@click.option("--reference", default="reference", show_default=True, help="The executor to compare with.")
@options.count("--steps", "Decode steps after the prefill.", 4, least=0)
@options.file("--csv", "Write the rows, with Ascend's columns.", "csv_file")
@options.file("--html", "Write a page with plots.", "html_file")
@options.file("--replay", "On failure, write the failing layer for `tq dev replay`.", "replay_file")
@click.option("--verbose", is_flag=True, help="Print a row for each layer too.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A.json B.json",
    help="Run nothing: what got better or worse from one --json report to another?",
)
@options.count("--repeat", "Run each layer so often again, and compare the executor with itself.", 1, least=0)
@click.option("--self-test", "moved", flag_value="self-test", hidden=True)
@click.option("--sensitivity", "moved", flag_value="sensitivity", hidden=True)
@options.json_option
@click.pass_context
@tensor_parallel
def command(context: click.Context, /, **given: Any) -> int:
    """Compare an executor with a reference, layer by layer.

    Each layer runs twice: on the reference's own input (which layer is wrong?), and on what the executor made of the layer
    before (how do errors grow?). Without --executor, the fastest executor of this machine is compared. Without --prompt, some
    are chosen that exercise everything; with your own, the verdict says what they did not.

    Exit code 0 if there is no fault, 1 if there is, 2 if nothing could be compared.
    """
    # Whoever reads only the first line of the output still gets the files and the exit code.
    with unread_is_fine():
        if moved := given.pop("moved"):
            raise click.UsageError(f"--{moved} is a command of its own now: `tq dev {moved}`")
        options.set_threads(given["threads"])
        if given["compare"]:
            _alone({"compare", "as_json", "threads"}, "--compare runs nothing")
            before, after = given["compare"]
            return compare(before, after, given["as_json"])
        if given["replay_file"] and given["ranks"].size > 1:
            raise click.UsageError("--replay writes a layer that one process runs; leave out --tensor-parallel")
        options.check_outputs(**{name: given[f"{name}_file"] for name in ("csv", "html", "replay")})
        has_prompts = bool(given["prompts"] or given["files"])
        if given["prompt_tokens"] and not has_prompts:
            raise click.UsageError("--prompt-tokens cuts your own prompts; give --prompt or --prompt-file as well")
        texts = read_prompts(given["prompts"], given["files"], given["ranks"]) if has_prompts else []
        ran = validated(texts, **given)
        if ran is None:  # rank 0 has the report
            return 0
        from haarkv.executors import catalog

        report, replay_note = ran.report, ""
        simulated = given["device"] == "sim" or bool(catalog.interpreted(report.candidate, given["device"]))
        if given["replay_file"]:
            failed = not report.passed
            replay_note = write_replay(given["replay_file"], ran.runs) if failed else "nothing failed, so no file is written"
        if given["csv_file"]:
            write_whole(given["csv_file"], as_csv(report))
        if given["html_file"]:
            from haarkv.validation.layers.page import page

            write_whole(given["html_file"], page(report, about(context, given["model"], ran.texts)))
        if given["as_json"]:
            from haarkv.validation.layers.report import as_json

            extra = {"replay": replay_note} if replay_note else {}
            print(json.dumps({"model": given["model"], "simulated": simulated, **extra, **as_json(report)}))
        else:
            more = [unexercised(report, chosen=not has_prompts)]
            more += [("executor", f"{report.candidate} ({ran.note})")] if ran.note else []
            more += [("replay", replay_note)] if replay_note else []
            print_verdict(report, more, "in PyPTO's interpreter, on no card" if simulated else "")
            print_rows(report, given["verbose"])
        return 0 if report.passed else 1


def _alone(own: set[str], why: str) -> None:
    """Refuse options beside those that a way of running this command has a use for."""
    if others := [option for name, option in options.written().items() if name not in own]:
        raise click.UsageError(f"{why}; leave out {others[0]}")
