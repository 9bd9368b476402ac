"""The page of a run: attention time by context beside the best of the others and a plain copy, and every other figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from haarkv.benchmarks.gpu.drawing import STYLE, Series, plot, table
from haarkv.benchmarks.gpu.log import Row, is_result, outcomes

PAGE = "index.html"
PREDICTIONS = Path(__file__).with_name("predictions.jsonl")
"""What was computed before anything was measured, from counted instructions and bytes: a line a kernel and case."""
_FORMAT = "tq4"


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Draw a run's page, in one step: a reader finds the old page or the new one."""
    target, new = folder / PAGE, folder / f".{PAGE}.new"
    new.write_text(html(rows, predictions()), encoding="utf-8")
    new.replace(target)


def predictions() -> list[Row]:
    """What was predicted."""
    lines = PREDICTIONS.read_text(encoding="utf-8").splitlines() if PREDICTIONS.exists() else []
    return [json.loads(line) for line in lines]


def html(rows: Sequence[Row], predicted: Sequence[Row]) -> str:
    """The whole page."""
    found = outcomes(rows)
    parts = {part: {key: row for (of, key), row in found.items() if of == part} for part in {of for of, _ in found}}
    attention = parts.get("attention", {})
    sections = [
        ("Checks", _checks(parts.get("checks", {}))),
        ("Decode attention of one layer", _attention(attention, predicted)),
        ("Predicted and measured", _predicted(attention, predicted)),
        ("Attention of a prompt's new tokens", _timed(parts.get("prefill", {}), ("new", "stored"), "tflops", "TFLOP/s")),
        ("Storing new tokens in one layer", _timed(parts.get("append", {}), ("batch", "new"), None, "")),
        ("Whole decode steps", _steps(parts.get("steps", {}))),
        ("What is wrong or missing", _wrong(found.values())),
    ]
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections if text)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>haarkv on a GPU</title>'
        f"<style>{STYLE}</style></head><body><h1>haarkv on a GPU</h1>{_machine(parts.get('machine', {}))}{body}"
        "</body></html>\n"
    )


def _machine(rows: dict[str, Row]) -> str:
    facts, best = rows.get("facts", {}), rows.get("best", {})
    packages = [f"{name} {number}" for name, number in facts.get("packages", {}).items() if number != "absent"]
    clocks = [f"{name} {facts[name]}" for name in ("clocks.max.sm", "clocks.mem", "power.limit") if name in facts]
    driver = [f"driver {facts['driver_version']}"] if "driver_version" in facts else []
    words = [str(facts.get("gpu", facts.get("cpu", "an unknown machine"))), *driver, *packages, *clocks]
    if "commit" in facts:
        words.append(f"commit {facts['commit']}")
    if "copy_gbps" in best:
        words.append(f"a copy of 512 MiB moves {best['copy_gbps'] / 1e3:.2f} TB/s, read and written")
    warning = "" if "gpu" in facts else '<p class="bad">This is a rehearsal on a CPU: its times mean nothing.</p>'
    return f'<p class="soft">{escape(" · ".join(words))}</p>{warning}'


def _checks(rows: dict[str, Row]) -> str:
    lines: list[tuple[str, Sequence[str]]] = []
    for key, row in rows.items():
        ok = is_result(row)
        cases = f"{row['passed']} of {row['passed'] + row['failed']}" if "passed" in row else ""
        lines.append(
            ("" if ok else "bad", [key, "passed" if ok else str(row.get("error", row.get("missing"))), cases, _s(row)])
        )
    return table(("check", "result", "cases", "seconds"), lines, left=2) if lines else ""


def _s(row: Row) -> str:
    return f"{row['seconds']:.0f}" if "seconds" in row else ""


def _attention(rows: dict[str, Row], predicted: Sequence[Row]) -> str:
    timed = [row for row in rows.values() if "us" in row]
    figures = "".join(plot(f"Batch {batch}", list(_series(timed, predicted, batch))) for batch in _batches(timed))
    note = (
        '<p class="soft">Microseconds of a call in a captured graph, median; K and V are cold. A copy moves the bytes of '
        f"{_FORMAT} K and V once, half of them read and half written.</p>"
    )
    return f'{note}<div class="plots">{figures}</div>{_timed(rows, ("batch", "context"), "tb_s", "TB/s")}' if timed else ""


def _batches(rows: Iterable[Row]) -> list[int]:
    return sorted({row["batch"] for row in rows})


def _series(timed: Sequence[Row], predicted: Sequence[Row], batch: int) -> Iterator[Series]:
    rows = [row for row in timed if row["batch"] == batch]
    peers: dict[int, float] = {}
    for row in rows:
        if row["side"] == "peer":
            peers[row["context"]] = min(row["us"], peers.get(row["context"], row["us"]))
    ours = {row["context"]: row for row in rows if row["who"] == _FORMAT}
    yield Series("bf16, the best of all peers", "peer", peers)
    yield Series(f"haarkv, {_FORMAT}", "ours", {context: row["us"] for context, row in ours.items()})
    copied = {
        row["context"]: row["us"]
        for row in rows
        if row["side"] == "copy" and row["context"] in ours and row["bytes"] == ours[row["context"]]["bytes"]
    }
    yield Series("a copy of the same bytes", "copy", copied)
    points = {row["context"]: row["likely_us"] for row in predicted if row["batch"] == batch and row["drawn"]}
    yield Series("predicted", "predicted", points)


def _predicted(rows: dict[str, Row], predicted: Sequence[Row]) -> str:
    lines = []
    for row in predicted:
        measured = rows.get(f"{row['batch']} x {row['context']} {row['who']}", {}).get("us")
        least, likely = row["least_us"], row["likely_us"]
        ratio = f"{measured / likely:.2f}" if measured else ""
        cells = [
            f"{row['batch']} x {row['context']:,}", row["kernel"], f"{row['bytes_us']:,.1f}", f"{least:,.1f}", row["bound_by"],
            f"{likely:,.1f}", f"{measured:,.1f}" if measured else "", ratio,
        ]  # fmt: skip
        lines.append(("bad" if measured and measured < least else "", cells))
    columns = ("case", "kernel", "bytes alone, µs", "least, µs", "bound by", "likely, µs", "measured, µs", "measured / likely")
    note = (
        '<p class="soft">Least: no unit of the card can be faster. Likely: that unit is busy 80 % of the time, and launches '
        "take theirs. Measured below the least, the count is wrong; above the likely by half, something else is slow.</p>"
    )
    return note + table(columns, lines, left=2) if lines else ""


def _timed(rows: dict[str, Row], shape: tuple[str, str], rate: str | None, unit: str) -> str:
    """A table of all times of a part, case by case, each case's fastest peer and its ratio to ours named."""
    lines: list[tuple[str, Sequence[str]]] = []
    cases = dict.fromkeys((row[shape[0]], row[shape[1]]) for row in rows.values() if "us" in row)
    for case in cases:
        of_case = [row for row in rows.values() if "us" in row and (row[shape[0]], row[shape[1]]) == case]
        best = min((row["us"] for row in of_case if row["side"] == "peer"), default=None)
        copied = {row["bytes"]: row["us"] for row in of_case if row["side"] == "copy"}
        for row in sorted(of_case, key=lambda row: row["us"]):
            gain = f"{best / row['us']:.2f}" if best and row["side"] == "ours" else ""
            off = f"{row['off']:.1e}" if "off" in row else ""
            more = [f"{row.get(rate, 0.0):.2f}"] if rate else []
            if rate == "tb_s":
                more.append(f"{100 * copied[row['bytes']] / row['us']:.0f} %" if row["bytes"] in copied else "")
            cells = [
                f"{case[0]} x {case[1]:,}",
                row["who"],
                f"{row['us']:,.1f}",
                f"{row['low_us']:,.1f}",
                f"{row['high_us']:,.1f}",
            ]
            lines.append(("ours" if row["side"] == "ours" else "", [*cells, *more, gain, off]))
    more = [unit, *["of a copy"] * (rate == "tb_s")] if rate else []
    columns = (" x ".join(shape), "who", "µs", "least", "most", *more, "best peer / this", "off")
    return table(columns, lines, left=2) if lines else ""


def _steps(rows: dict[str, Row]) -> str:
    lines: list[tuple[str, Sequence[str]]] = []
    for key, row in rows.items():
        if "us" in row:
            gain = rows.get(key.removesuffix(row["who"]) + "best", {}).get("gain") if row["who"] == _FORMAT else None
            cells: list[Any] = [
                f"{row['batch']} x {row['context']:,}", row["who"], row.get("attention", ""), row["layers"],
                f"{row['us'] / 1e3:,.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['tb_s']:.2f}", f"{gain:.2f}" if gain else "",
            ]  # fmt: skip
            lines.append(("ours" if row["who"] == _FORMAT else "", [str(cell) for cell in cells]))
    columns = ("batch x context", "who", "attention", "layers", "ms", "tokens a second", "TB/s", "bf16 / this")
    return table(columns, lines, left=3) if lines else ""


def _wrong(rows: Iterable[Row]) -> str:
    lines = [
        ("bad" if "error" in row else "", [row["part"], row["key"], str(row.get("error", row.get("missing")))])
        for row in rows
        if "error" in row or "missing" in row
    ]
    return table(("part", "row", "why"), lines, left=3) if lines else ""
