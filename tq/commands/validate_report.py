"""What `tq validate` and `tq dev replay` print and write of a report, of two, and of a failing layer."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import InputError
from haarkv.validation.layers.report import finite, row_cells
from tq.output import print_table, visible

if TYPE_CHECKING:
    from haarkv.validation.layers.page import About
    from haarkv.validation.layers.replay.case import OneRun
    from haarkv.validation.layers.replay.file import ReplayFile
    from haarkv.validation.layers.report import Report, Verdict


def about(context: click.Context, model: str, prompts: Sequence[str]) -> About:
    """How a report was made, for the page."""
    from haarkv.validation.layers.page import About

    software, machine = versions()
    return About(
        model=model,
        command=shlex.join(["tq", *context.find_root().obj]),
        prompts=prompts,
        versions=software,
        machine=machine,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def versions() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the software, and facts of the machine, by name."""
    from haarkv.benchmarks.report import machine
    from tq import __version__

    facts = {name: str(value) for name, value in machine().items()}
    software = {"haarkv": __version__, "python": facts.pop("python"), "torch": facts.pop("torch")}
    if commit := facts.pop("commit", None):
        software["commit"] = commit
    return software, facts


def describe(finding: Verdict) -> str:
    """A finding in one line."""
    reason = finding.reason if finding.fails else f"{finding.reason}, no fault"
    return f"{finding.phase} {finding.step}, {finding.where}: {reason} ({finding.detail})"


def print_verdict(report: Report, more: Sequence[tuple[str, str]] = (), where: str = "") -> None:
    """The verdict and what it rests on; `where` says that no device ran, `more` are further rows."""
    same = sum(row.same_token == row.predictions for row in report.logits)
    outside = [row for row in report.rows if not row.passed]
    first, verdict = report.first_divergence, "passed: no fault" if report.passed else "FAILED"
    what = "first fault" if first and first.fails else "first difference"
    rows = [
        ("verdict", (", " if report.passed else ": ").join(filter(None, (verdict, where)))),
        (what, describe(first) if first else "none: equal to the last bit"),
        ("layers", f"{len(report.rows)} rows, {len(outside)} outside what honest runs give"),
    ]
    if report.blocks:
        kinds = ", ".join(report.blocks)
        rows.append(("weights", f"multiplied as the blocks of the file: {kinds}; restored for {report.reference}"))
    if report.logits:
        rows.append(("next tokens", f"the same in {same} of {len(report.logits)} forwards"))
    rows += more
    print_table(f"{report.candidate} against {report.reference}, {report.kv}, {report.dtype}", [], rows)


def coverage_row(report: Report, is_chosen: bool) -> tuple[str, str]:
    """What the prompts did not reach, longer contexts included. If the prompts were chosen, no others would exercise more."""
    hint = " (leave out --prompt to exercise more)" if report.not_exercised and not is_chosen else ""
    return "not exercised", f"{'; '.join(report.beyond)}{hint}"


_MOST_OUTSIDE = 4


def print_rows(report: Report, verbose: bool) -> None:
    """Every row, or only the first faults."""
    outside = [row for row in report.rows if not row.passed]
    if rows := report.rows if verbose else outside[:_MOST_OUTSIDE]:
        cells = [row_cells(row) | {"": "" if row.passed else "OUTSIDE"} for row in rows]
        print_table("", list(cells[0]), [list(row.values()) for row in cells])
    if not verbose and len(rows) < len(report.rows):
        print(f"{len(report.rows) - len(rows)} more rows: --verbose")


# -- Two reports -------------------------------------------------------------------------------------------------------
def compare(before: Path, after: Path, as_json: bool) -> int:
    """Print what got better or worse; 0 if nothing is wrong that was right, else 1."""
    from haarkv.validation.layers.report import compare_files, is_new_fault

    comparison = compare_files(before, after)
    changes = comparison["changes"]
    if as_json:
        print(json.dumps(finite(comparison)))
        return int(comparison["worse"])
    words = ["passed" if is_pass else "failed" for is_pass in comparison["verdicts"]]
    counts = [sum(change["direction"] == way for change in changes) for way in ("worse", "better")]
    rows = [
        ("verdict", f"{words[0]} before, {words[1]} after"),
        ("tensors", f"{comparison['compared']} compared: {counts[0]} worse, {counts[1]} better, the others alike"),
        *(("the runs differ", visible(difference)) for difference in comparison["differences"]),
    ]
    if comparison["missing"]:
        rows.append(("not compared", f"{comparison['missing']} tensors that only one run has"))
    print_table(visible(f"{after} beside {before}"), [], rows)
    if changes:
        cells = []
        for change in changes:
            word = "WRONG NOW" if is_new_fault(change) else change["direction"]
            shares = [
                f"{'not finite' if math.isinf(change[when]) else f'{100 * change[when]:.3g} %'} ({change[f'found_{when}']})"
                for when in ("before", "after")
            ]
            cells.append((word, "–" if change["layer"] is None else str(change["layer"]), visible(change["stage"]), *shares))
        title = "Largest figures, as a share of what honest runs allow"
        print_table(title, ["", "layer", "stage", "before", "after"], cells)
    return int(comparison["worse"])


# -- A failing layer ---------------------------------------------------------------------------------------------------
def write_replay(file: Path, runs: Sequence[OneRun]) -> str:
    """Write the failing layer; in words what was written, or why nothing was."""
    from haarkv.validation.layers.replay.file import build_replay_file, save

    try:
        replay = build_replay_file(runs, versions()[0])
    except InputError as error:
        return f"nothing was written: {error}"
    save(file, replay)
    how = f"run it with tq dev replay {file} --executor {replay.candidate}"
    return f"{file} ({file.stat().st_size:,} bytes): {replay.case.describe()}; {how}"


def is_same_failure(replay_file: ReplayFile, report: Report) -> bool:
    """The layer fails at the stage and for the reason of the file."""
    first = report.first_divergence
    return bool(first and (first.stage, first.reason) == (replay_file.finding["stage"], replay_file.finding["reason"]))


def replay_as_json(replay_file: ReplayFile, report: Report) -> dict[str, Any]:
    """The file's finding, and whether its layer fails alike."""
    about = {
        "layer": replay_file.case.describe(), "finding": dict(replay_file.finding), "reference": replay_file.reference,
        "candidate": replay_file.candidate, "versions": dict(replay_file.versions),
    }  # fmt: skip
    return {"file": about, "same_failure": is_same_failure(replay_file, report)}


def print_replay(replay_file: ReplayFile, report: Report) -> None:
    """The file's finding and the result here."""
    was, versions = replay_file.finding, ", ".join(f"{name} {value}" for name, value in replay_file.versions.items())
    where = f"{was['phase']} {was['step']}, layer {was['layer']}, {was['stage']}: {was['reason']}"
    rows = [
        ("the file", f"{replay_file.case.describe()}, {replay_file.case.kv}"),
        ("written for", f"{replay_file.candidate} against {replay_file.reference}: {where} ({was['detail']})"),
        ("written by", versions),
        (
            "now",
            "the same failure" if is_same_failure(replay_file, report) else "passes" if report.passed else "another failure",
        ),
    ]
    print_table("replay", [], [(name, visible(" ".join(str(text).split()))) for name, text in rows])
    print_verdict(report)
    print_rows(report, verbose=True)
