"""What `tq validate` and `tq replay` print and write of a report."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from haarkv.validation.layers.report import FAILS, row_cells
from tq.output import print_table

if TYPE_CHECKING:
    from haarkv.validation.layers.page import About
    from haarkv.validation.layers.report import Finding, Report


def about(context: click.Context, model: str, prompts: Sequence[str]) -> About:
    """What the page says of how it was made."""
    from haarkv.validation.layers.page import About

    argv = context.find_root().obj.argv
    software, found = versions()
    return About(
        model=model,
        command=shlex.join(["tq", *argv]),
        prompts=prompts,
        versions=software,
        machine=found,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def versions() -> tuple[dict[str, str], dict[str, str]]:
    """Of the software that runs, and what is known of the machine, by name."""
    from haarkv.benchmarks.report import machine
    from tq import __version__

    found = {name: str(value) for name, value in machine().items()}
    software = {"haarkv": __version__, "python": found.pop("python"), "torch": found.pop("torch")}
    if commit := found.pop("commit", None):
        software["commit"] = commit
    return software, found


def describe(finding: Finding) -> str:
    """Where and why, in one line."""
    place = f"layer {finding.layer}, " if finding.layer is not None else ""
    reason = finding.reason if finding.reason in FAILS else f"{finding.reason}, no fault"
    return f"{finding.phase} {finding.step}, {place}{finding.stage}: {reason} ({finding.detail})"


def print_verdict(report: Report, more: Sequence[tuple[str, str]] = ()) -> None:
    """The verdict, and what it rests on.

    Args:
        more: rows that stand after it.
    """
    same = sum(row.same_token == row.predictions for row in report.logits)
    outside = [row for row in report.rows if not row.passed]
    first = report.first_divergence
    what = "first fault" if first and first.reason in FAILS else "first difference"
    rows = [
        ("verdict", "passed: no fault" if report.passed else "FAILED"),
        (what, describe(first) if first else "none: equal to the last bit"),
        *([("explained by", " or ".join(first.causes))] if first and first.causes else []),
        *([("may be wrong", ", ".join(first.stages))] if first and first.stages else []),
        ("layers", f"{len(report.rows)} rows, {len(outside)} outside their bounds"),
    ]
    if report.logits:
        rows.append(("next tokens", f"the same in {same} of {len(report.logits)} forwards"))
    rows += more
    print_table(f"{report.candidate} against {report.reference}, {report.kv}, {report.dtype}", [], rows)


def unexercised(report: Report, chosen: bool) -> tuple[str, str]:
    """What the prompts did not reach, as a row.

    Args:
        chosen: the prompts were not the user's own, so that no others would exercise more.
    """
    hint = " (leave out --prompt to exercise more)" if report.not_exercised and not chosen else ""
    return "not exercised", f"{'; '.join(report.not_exercised) or 'nothing'}{hint}"


_MOST_OUTSIDE = 4


def print_rows(report: Report, verbose: bool) -> None:
    """Every row, or only the first that are outside their bounds."""
    outside = [row for row in report.rows if not row.passed]
    if shown := report.rows if verbose else outside[:_MOST_OUTSIDE]:
        cells = [row_cells(row) | {"": "" if row.passed else "OUTSIDE"} for row in shown]
        print_table("", list(cells[0]), [list(row.values()) for row in cells])
    if not verbose and len(shown) < len(report.rows):
        print(f"{len(report.rows) - len(shown)} more rows: --verbose")


def as_csv(report: Report) -> str:
    """A CSV file of every row."""
    from haarkv.validation.layers.report import csv_rows

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(report))
    return text.getvalue()
