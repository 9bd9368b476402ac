"""What a bring-up leaves behind: one page to look at, and one file to send home that names no private path."""

from __future__ import annotations

import getpass
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from haarkv.validation.bringup.result import RUNGS, Drift, Folder, Result, Table
from haarkv.validation.html import STYLE, Line, plot, table

PAGE, REPORT = "index.html", "report.json"
_LOG_LINES = 60
# A figure that stands alone would fill the page.
_WIDTH = "figure { max-width: 660px; }"
_STYLES = {"passed": "good", "failed": "bad"}


# -- One file to send home -------------------------------------------------------------------------------------------------


def report(results: Sequence[Result], about: Mapping[str, str], folder: Folder) -> str:
    """Everything that was found, with the ends of the logs, as JSON; of a path only its last name is left."""
    rungs = []
    for result in results:
        plain = result.as_json()
        if result.log:
            text = (folder.path / result.log).read_text(encoding="utf-8", errors="replace")
            plain["log"] = text.splitlines()[-_LOG_LINES:]
        rungs.append(plain)
    missing = [name for name in RUNGS if name not in {result.name for result in results}]
    whole = {"bringup": verdict(results), **about, "rungs": rungs, "not run": missing}
    return json.dumps(_public(whole), indent=1) + "\n"


def _public(value: Any) -> Any:
    """A JSON value without what is the user's own: folders, and names of user and machine."""
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    return public_text(value) if isinstance(value, str) else value


def public_text(text: str) -> str:
    """A text in which of every path its last name is left, and neither user nor machine is named."""
    text = re.sub(r"(?<![\w.…/])(?:~|\.{1,2})?/+(?:[^\s/:'\"<>,;()\[\]]+/)*([^\s/:'\"<>,;()\[\]]*)", r"…/\1", text)
    for private in (Path.home().name, _user(), platform.node()):
        # A name such as `root` is a word like any other.
        if len(private) > 3 and private not in ("root", "home", "user", "localhost"):
            text = re.sub(rf"\b{re.escape(private)}\b", "…", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, in a container
        return ""


# -- One page --------------------------------------------------------------------------------------------------------------


def verdict(results: Sequence[Result]) -> str:
    """In one line."""
    passed = sum(result.verdict == "passed" for result in results)
    absent = [result.name for result in results if result.verdict == "not on this executor"]
    beside = f", not on this executor: {', '.join(absent)}" if absent else ""
    if failed := next((result for result in results if result.verdict == "failed"), None):
        where = f" at {failed.found.where}" if failed.found.where else ""
        return f"failed: {failed.name}{where}; {passed} of {len(RUNGS)} rungs passed{beside}"
    if len(results) < len(RUNGS):
        return f"unfinished: {passed} of {len(RUNGS)} rungs passed{beside}"
    return f"passed: {passed} of {len(RUNGS)} rungs{beside}"


def page(results: Sequence[Result], about: Mapping[str, str]) -> str:
    """One self-contained HTML page; the same arguments give the same page."""
    said = verdict(results)
    word = said.partition(":")[0]
    where = about.get("device", "")
    title = f"Bring-up of executor {about.get('executor', '')}" + f" on {where}" * bool(where)
    facts = "".join(
        f'<tr><th class="left">{escape(name)}</th><td class="left made">{escape(value)}</td></tr>'
        for name, value in about.items()
    )
    parts = "".join(_section(result) for result in results)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {escape(word)}</title><style>{STYLE}{_WIDTH}</style></head><body>
<h1>{escape(title)} <span class="verdict {_STYLES.get(word, "soft")}">{escape(word)}</span></h1>
<p class="soft">{escape(said)}.</p>
{_rungs(results)}
<h2>How it was made</h2>
<div class="table"><table>{facts}</table></div>
{parts}
</body></html>
"""


def _rungs(results: Sequence[Result]) -> str:
    known = {result.name: result for result in results}
    rows = []
    for number, (name, tried) in enumerate(RUNGS.items(), 1):
        result = known.get(name)
        cells = ("not run", "–", "–", "") if result is None else _cells(result)
        style = _STYLES.get(cells[0], "soft")
        rows.append(
            f'<tr><td>{number}</td><td class="left"><b>{name}</b><br><span class="soft">{tried}</span></td>'
            f'<td class="left {style}">{cells[0]}</td><td>{cells[1]}</td><td>{cells[2]}</td>'
            f'<td class="left made">{escape(cells[3])}</td></tr>'
        )
    head = "".join(
        f"<th{' class=left' * left}>{word}</th>"
        for word, left in (("", 0), ("rung", 1), ("verdict", 1), ("seconds", 0), ("compared", 0), ("found", 1))
    )
    return f'<div class="table"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _cells(result: Result) -> tuple[str, str, str, str]:
    found = result.found
    compared = f"{found.compared:,} {found.unit}" if found.compared else "–"
    log = f"\nThe whole message: {result.log}" if result.log else ""
    return result.verdict, f"{result.seconds:.1f}", compared, found.said + log


def _section(result: Result) -> str:
    found = result.found
    if not (found.tables or found.drifts or found.facts):
        return ""
    facts = ", ".join(f"{name} {value}" for name, value in found.facts.items())
    drifts = "".join(_drawn(drift) for drift in found.drifts)
    shown = f'<div class="plots">{drifts}</div>' * bool(drifts) + "".join(_table(one) for one in found.tables)
    about = f'<p class="soft">{escape(facts)}</p>' * bool(facts)
    return f'<h2>{escape(result.name)} <span class="soft">{escape(result.date)}</span></h2>{about}{shown}'


def _table(shown: Table) -> str:
    caption = f'<p class="soft">{escape(shown.title)}</p>'
    return caption + table(shown.columns, shown.rows, 1, [False] * len(shown.rows))


# Closer to 0 than float64 can tell.
_FLOOR = 1e-16


def _drawn(drift: Drift) -> str:
    lines = [
        Line(name, "ab"[number % 2], number > 1, {at: math.log10(max(value, _FLOOR)) for at, value in line.items()})
        for number, (name, line) in enumerate(drift.lines.items())
    ]
    bound = math.log10(drift.bound) if drift.bound else None
    values = [value for line in lines for value in line.values.values()] + ([bound] if bound is not None else [])
    low, high = math.floor(min(values)), math.ceil(max(values) + 1e-9)
    step = max(1, -(-(high - low) // 6))
    ticks = [(float(e), f"1e{e}") for e in range(low, high + step, step)]
    return plot(drift.title, lines, ticks, (bound, "bound") if bound is not None else None)
