"""What a bring-up leaves behind: one page to look at, and one file to send home that names no private path."""

from __future__ import annotations

import getpass
import json
import platform
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from haarkv.validation.bringup.result import RUNGS, Folder, Result
from haarkv.validation.html import Line, distances, document, facts, table

PAGE, REPORT = "index.html", "report.json"
_LOG_LINES = 60
# A figure that stands alone would fill the page.
_WIDTH = "figure { max-width: 660px; }"
_STYLES = {"passed": "good", "failed": "bad"}


# -- One file to send home -------------------------------------------------------------------------------------------------


def report(results: Sequence[Result], about: Mapping[str, str], folder: Folder, collected: Mapping[str, Sequence[str]]) -> str:
    """Everything that was found, with the ends of the logs, as JSON; of a path only its last name is left.

    Args:
        collected: what the machine's own tools say.
    """
    rungs = []
    for result in results:
        plain = result.as_json()
        if result.log:
            text = (folder.path / result.log).read_text(encoding="utf-8", errors="replace")
            plain["log"] = text.splitlines()[-_LOG_LINES:]
        rungs.append(plain)
    missing = [name for name in RUNGS if name not in {result.name for result in results}]
    whole = {"bringup": verdict(results), **about, "rungs": rungs, "not run": missing, "collected": collected}
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
    untried = [f"{result.name} ({result.found.lacking})" for result in results if result.verdict == "not tried"]
    beside += f", not tried: {', '.join(untried)}" if untried else ""
    beside += ", with versions that nobody published" if any(result.found.allowed for result in results) else ""
    if failed := next((result for result in results if result.verdict == "failed"), None):
        where = f" at {failed.found.where}" if failed.found.where else ""
        return f"failed: {failed.name}{where}; {passed} of {len(RUNGS)} rungs passed{beside}"
    if len(results) < len(RUNGS):
        return f"unfinished: {passed} of {len(RUNGS)} rungs passed{beside}"
    return f"passed: {passed} of {len(RUNGS)} rungs{beside}"


def page(results: Sequence[Result], about: Mapping[str, str], collected: Mapping[str, Sequence[str]] = {}) -> str:
    """One self-contained HTML page; the same arguments give the same page. `collected` as in `report`."""
    said = verdict(results)
    word, where = said.partition(":")[0], about.get("device", "")
    title = f"Bring-up of executor {about.get('executor', '')}" + f" on {where}" * bool(where)
    body = f"""<p class="soft">{escape(said)}.</p>
{_rungs(results)}
<h2>How it was made</h2>
{facts({escape(name): escape(value) for name, value in about.items()})}
{"".join(_section(result) for result in results)}
{"".join(f"<h2>{escape(name)}</h2><pre>{escape(chr(10).join(lines))}</pre>" for name, lines in collected.items())}"""
    return document(title, word, _STYLES.get(word, "soft"), body, _WIDTH)


def _rungs(results: Sequence[Result]) -> str:
    known = {result.name: result for result in results}
    rows = []
    for number, (name, tried) in enumerate(RUNGS.items(), 1):
        word, seconds, compared, said = _cells(known[name]) if name in known else ("not run", "–", "–", "")
        rows.append(
            f'<tr><td>{number}</td><td class="left"><b>{name}</b><br><span class="soft">{tried}</span></td>'
            f'<td class="left {_STYLES.get(word, "soft")}">{word}</td><td>{seconds}</td><td>{compared}</td>'
            f'<td class="left made">{escape(said)}</td></tr>'
        )
    words = {"": "", "rung": "left", "verdict": "left", "seconds": "", "compared": "", "found": "left"}
    head = "".join(f'<th class="{side}">{word}</th>' for word, side in words.items())
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
    named = ", ".join(f"{name} {value}" for name, value in found.facts.items())
    drifts = "".join(
        distances(
            drift.title,
            [Line(name, "ab"[number % 2], number > 1, line) for number, (name, line) in enumerate(drift.lines.items())],
            drift.bound or None, "bound",
        )
        for drift in found.drifts
    )  # fmt: skip
    tables = "".join(f'<p class="soft">{escape(one.title)}</p>{table(one.columns, one.rows, 1)}' for one in found.tables)
    about = f'<p class="soft">{escape(named)}</p>' * bool(named)
    shown = f'<div class="plots">{drifts}</div>' * bool(drifts) + tables
    return f'<h2>{escape(result.name)} <span class="soft">{escape(result.date)}</span></h2>{about}{shown}'
