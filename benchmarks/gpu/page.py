"""The page of a run: every figure in tables, and plots where matplotlib is installed; a lent machine may lack it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from haarkv.benchmarks import plots
from haarkv.benchmarks.gpu.log import Row, is_result, outcomes

PAGE = "index.html"
PREDICTIONS = Path(__file__).with_name("predictions.jsonl")
"""What was computed before anything was measured, from counted instructions and bytes: a line a kernel and case."""
_FORMAT = "tq4"
_STYLE = """:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }
td, th { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #8886; white-space: nowrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .left { text-align: left; }
.ours { font-weight: 600; } .bad { color: #d33; } svg { background: #fff; max-width: 100%; height: auto; }"""
Line = tuple[str, Sequence[str]]
"""A class for its style, or "", and its cells."""


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Draw a run's page, in one step: a reader finds the old page or the new one."""
    new = folder / f".{PAGE}.new"
    new.write_text(html(rows, predictions()), encoding="utf-8")
    new.replace(folder / PAGE)


def predictions() -> list[Row]:
    """What was predicted."""
    return [json.loads(line) for line in PREDICTIONS.read_text(encoding="utf-8").splitlines()]


def html(rows: Sequence[Row], predicted: Sequence[Row]) -> str:
    """The whole page."""
    found = outcomes(rows)
    parts = {part: {key: row for (of, key), row in found.items() if of == part} for part in {of for of, _ in found}}
    attention = parts.get("attention", {})
    sections = (
        ("Checks", _table("check", "result", "cases", "seconds", rows=_checks(parts.get("checks", {})))),
        ("Decode attention of one layer", _plot(attention, predicted) + _timed(attention, "batch", "context")),
        ("Predicted and measured", _table(*_PREDICTED, rows=_predicted(attention, predicted))),
        ("Attention of a prompt's new tokens", _timed(parts.get("prefill", {}), "new", "stored")),
        ("Storing new tokens in one layer", _timed(parts.get("append", {}), "batch", "new")),
        ("Whole decode steps", _timed(parts.get("steps", {}), "batch", "context")),
        ("What is wrong or missing", _table("part", "row", "why", rows=_wrong(found.values()))),
    )
    machine = parts.get("machine", {})
    facts = {**machine.get("facts", {}), **machine.get("best", {})}
    about = " · ".join(
        f"{name} {value}" for name, value in facts.items() if name not in ("part", "key", "benchmark", "seconds")
    )
    warning = "" if "gpu" in facts else '<p class="bad">This is a rehearsal on a CPU: its times mean nothing.</p>'
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections if text)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>haarkv on a GPU</title><style>{_STYLE}</style>'
        f"</head><body><h1>haarkv on a GPU</h1><p>{escape(about)}</p>{warning}{body}</body></html>\n"
    )


def _table(*columns: str, rows: Iterable[Line]) -> str:
    """Empty without rows; the first two columns hold words."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=left' * (index < 2)}>{escape(cell)}</{tag}>" for index, cell in enumerate(row))

    body = "".join(f'<tr class="{kind}">{cells("td", row)}</tr>' for kind, row in rows)
    return f"<table><tr>{cells('th', columns)}</tr>{body}</table>" if body else ""


def _checks(rows: dict[str, Row]) -> Iterator[Line]:
    for key, row in rows.items():
        result = "passed" if is_result(row) else str(row.get("error", row.get("missing")))
        cases = f"{row['passed']} of {row['passed'] + row['failed']}" if "passed" in row else ""
        yield ("" if is_result(row) else "bad", (key, result, cases, f"{row.get('seconds', 0):.0f}"))


def _plot(rows: dict[str, Row], predicted: Sequence[Row]) -> str:
    """Time by context, a panel a batch size: ours, the best of all peers, a copy of the same bytes, and what was predicted."""
    panels = []
    for batch in sorted({row["batch"] for row in rows.values() if "us" in row}):
        lines: dict[str, dict[int, plots.Point]] = {"bf16, the best of all peers": {}, f"haarkv, {_FORMAT}": {}, "a copy": {}}
        for row in (row for row in rows.values() if "ours_us" in row and row["batch"] == batch):
            points = (row.get("best_us"), row["ours_us"].get(_FORMAT), row.get("copy_us"))
            for line, us in zip(lines.values(), points, strict=True):
                line |= {} if us is None else {row["context"]: us}
        lines["predicted"] = {row["context"]: row["likely_us"] for row in predicted if row["batch"] == batch and row["drawn"]}
        drawn = {name: line for name, line in lines.items() if line}
        panels.append(plots.Panel(f"batch {batch}", "context, tokens", "µs", drawn, frozenset({"a copy", "predicted"})))
    if not panels or not find_spec("matplotlib"):
        return ""
    return plots.svg("µs of a call in a captured graph, K and V cold", panels)


_PREDICTED = ("case", "kernel", "bytes alone, µs", "least, µs", "bound by", "likely, µs", "measured, µs", "measured / likely")


def _predicted(rows: dict[str, Row], predicted: Sequence[Row]) -> Iterator[Line]:
    """No unit of the card can be faster than the least; measured below it, the count is wrong."""
    for row in predicted:
        measured = rows.get(f"{row['batch']} x {row['context']} {row['who']}", {}).get("us")
        given = [f"{row[name]:,.1f}" for name in ("bytes_us", "least_us", "likely_us")]
        found = [f"{measured:,.1f}", f"{measured / row['likely_us']:.2f}"] if measured else ["", ""]
        cells = [f"{row['batch']} x {row['context']:,}", row["kernel"], *given[:2], row["bound_by"], given[2], *found]
        yield ("bad" if measured and measured < row["least_us"] else "", cells)


def _timed(rows: dict[str, Row], *shape: str) -> str:
    """All times of a part, case by case, fastest first; ours with the best peer's time over it."""
    lines: list[Line] = []
    timed = [row for row in rows.values() if "us" in row]
    for case in dict.fromkeys(tuple(row[name] for name in shape) for row in timed):
        here = sorted((row for row in timed if tuple(row[name] for name in shape) == case), key=lambda row: row["us"])
        best = min((row["us"] for row in here if row["side"] not in ("ours", "copy")), default=None)
        copied = {row["bytes"]: row["us"] for row in here if row["side"] == "copy"}
        for row in here:
            times = [f"{row[name]:,.1f}" for name in ("us", "low_us", "high_us")]
            rates = [f"{row[name]:,.2f}" if name in row else "" for name in ("tb_s", "tflops", "tokens_per_s")]
            of_copy = f"{100 * copied[row['bytes']] / row['us']:.0f} %" if row.get("bytes") in copied else ""
            gain = f"{best / row['us']:.2f}" if best and row["side"] == "ours" else ""
            who = f"{row['who']} {row.get('attention', '')}"
            name = " x ".join(f"{n:,}" for n in case)
            cells = [name, who, *times, *rates, of_copy, gain, f"{row['off']:.1e}" if "off" in row else ""]
            lines.append(("ours" if row["side"] == "ours" else "", cells))
    columns = ("who", "µs", "least", "most", "TB/s", "TFLOP/s", "tokens/s", "of a copy", "best peer / this", "off")
    return _table(" x ".join(shape), *columns, rows=lines)


def _wrong(rows: Iterable[Row]) -> Iterator[Line]:
    for row in rows:
        if not is_result(row):
            yield ("bad" if "error" in row else "", (row["part"], row["key"], str(row.get("error", row.get("missing")))))
