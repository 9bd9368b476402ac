"""`tq dev replay`: run one failing layer from a file that `tq validate --replay` wrote, on any executor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq import options
from tq.commands.validate_report import print_rows, print_verdict
from tq.commands.validate_run import make_pair
from tq.groups import Command
from tq.output import print_table, unread_is_fine, visible

if TYPE_CHECKING:
    from haarkv.validation.layers.replay.case import LayerCase, Make
    from haarkv.validation.layers.replay.file import ReplayFile
    from haarkv.validation.layers.report import Report


@click.command("replay", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@options.executor_option()
@options.device_option
@options.threads_option
@click.option("--reference", default="reference", show_default=True, help="The executor to compare with.")
@options.json_option
def command(file: Path, executor: str, device: str | None, threads: int | None, reference: str, as_json: bool) -> int:
    """Run the failing layer of FILE, which `tq validate --replay FILE` wrote, and compare it with the reference.

    FILE holds all that the layer needs: no model is loaded. Exit code 0 if there is no fault, 1 if there is, 2 if nothing
    could be compared.
    """
    with unread_is_fine():
        options.set_threads(threads)
        from haarkv.validation.layers.replay.case import judged, require_expected
        from haarkv.validation.layers.replay.file import load
        from haarkv.validation.layers.report import as_json as plain

        found = load(file)
        trusted, on_trial = makers(found.case, executor, device, reference)
        require_expected(found.case, found.made, trusted)
        report = judged(found.case, trusted, on_trial)
        if as_json:
            print(json.dumps({"file": _about(found), "same_failure": is_same_failure(found, report), **plain(report)}))
        else:
            _print(found, report)
        return 0 if report.passed else 1


def makers(case: LayerCase, executor: str, device: str | None, reference: str) -> tuple[Make, Make]:
    """What makes the reference and the executor on trial.

    Raises:
        InputError: no such executor, or it cannot run the layer.
    """
    from haarkv.executors.catalog import AUTO, check, select

    config, plan = case.config, case.plan
    dtype = str(case.hidden.dtype).removeprefix("torch.")
    trusted = select(reference, config, [plan], dtype=dtype).name
    name = select(executor, config, [plan], device=device, dtype=dtype).name
    if executor == AUTO and name == trusted:
        raise click.UsageError(f"auto is {name} here, the reference itself; name another --executor")
    check(trusted, config, plan)
    check(name, config, plan, device)
    return make_pair(trusted, name, device)


def is_same_failure(found: ReplayFile, report: Report) -> bool:
    """Whether the layer fails at the stage, and for the reason, of the file."""
    first = report.first_divergence
    return bool(first and (first.stage, first.reason) == (found.finding["stage"], found.finding["reason"]))


def _about(found: ReplayFile) -> dict[str, Any]:
    return {
        "layer": found.case.describe(), "finding": dict(found.finding), "reference": found.reference,
        "candidate": found.candidate, "versions": dict(found.versions),
    }  # fmt: skip


def _print(found: ReplayFile, report: Report) -> None:
    was, versions = found.finding, ", ".join(f"{name} {value}" for name, value in found.versions.items())
    where = f"{was['phase']} {was['step']}, layer {was['layer']}, {was['stage']}: {was['reason']}"
    rows = [
        ("the file", f"{found.case.describe()}, {found.case.kv}"),
        ("written for", f"{found.candidate} against {found.reference}: {where} ({was['detail']})"),
        ("written by", versions),
        ("now", "the same failure" if is_same_failure(found, report) else "passes" if report.passed else "another failure"),
    ]
    print_table("replay", [], [(name, visible(" ".join(str(text).split()))) for name, text in rows])
    print_verdict(report)
    print_rows(report, verbose=True)
