"""Everything that needs an NVIDIA GPU, in one call of less than nine minutes.

    python -m lab.bench.gpu OUT              measure; run it again with the same OUT to go on after a cut
    python -m lab.bench.gpu OUT --only model --model FILE --kv-plan FILE     a pretrained model alone: validate, time
    TRITON_INTERPRET=1 python -m lab.bench.gpu OUT --dry-run     rehearse at tiny sizes, on a CPU

First the kernels are checked against the reference; then attention, storing, prompts and whole steps are timed, a process
for each group of cases: what breaks one takes no other with it. Each is a line of OUT/rows.jsonl as soon as it is done.
OUT/index.md has the same tables as the command, and OUT/log.txt what was said on the way.

It needs no installation: run it in the folder of a checkout. Exit code: 0 if every check passed and every figure is there, 1
if not, 2 if it cannot run here, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from haarkv.benchmarks import decode
from haarkv.benchmarks.report import Table
from haarkv.executors.cuda import open_gpu
from haarkv.models.catalog import read_config
from haarkv.tq_ops.errors import InputError
from lab.bench import prefill
from lab.bench.gpu.asked import CHECKS_S, PRETRAINED_S, Pretrained, Timing, checks, timings

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
"""Where processes run: behind the links of `haarkv/`, so that a checkout which is not installed is found."""
ROWS, PAGE, LOG = "rows.jsonl", "index.md", "log.txt"
_INTERRUPTED = 130
_END_LINES, _FAILED_CASES = 30, 20
_POLL_S = 0.2


# -- A group -----------------------------------------------------------------------------------------------------------------
def run_one(timing: Timing, *, dry: bool) -> None:
    """Measure a group in this process; its row is printed as the last line."""
    # What follows imports Triton, which the process that starts this one may lack.
    from lab.bench.gpu.steps import random_model, sdpa

    request, model = timing.request, None
    if request.model.startswith("random:") or dry:
        request = replace(request, beside=sdpa) if timing.peers else request
        model = None if dry else random_model(read_config(request.model, request.layers), open_gpu(None))

    def on_turn(who: str) -> None:
        print(f"timing {who}", flush=True)

    if timing.stored is None:
        found = decode.report("decode", request, *decode.measure(request, on_turn=on_turn, model=model))
    else:
        measured = prefill.measure(request, timing.stored, timing.peers, on_turn=on_turn, model=model)
        found = prefill.report(request, timing.stored, *measured)
    shown = [[*table, list(found.notes.get(number, ()))] for number, table in enumerate(found.tables)]
    print(json.dumps({"result": json.loads(found.line()), "tables": shown}))


# -- Running it --------------------------------------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="lab.bench.gpu", description=__doc__, formatter_class=form)
    parser.add_argument("folder", metavar="OUT", type=Path, help="where the results go; made if need be")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter; the figures mean nothing")
    parser.add_argument(
        "--only", action="append", metavar="WORDS", help="only checks and groups whose name holds them; repeatable"
    )
    parser.add_argument("--model", metavar="MODEL", help="a pretrained model to validate and time as well, after all else")
    parser.add_argument("--kv-plan", metavar="FILE", help="with --model: its cache, beside tq4")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # of a group's own process
    given = parser.parse_args(argv)
    folder, dry = given.folder.absolute(), given.dry_run
    try:
        memory = 0 if dry else torch.cuda.get_device_properties(open_gpu(None)).total_memory
        own = Pretrained(given.model, given.kv_plan) if given.model else None
        groups = {**timings(dry, memory), **(own.timings() if own else {})}
        if given.one:
            run_one(groups[given.one], dry=dry)
            return 0
        every = [*checks(dry), *(own.check() if own else ()), *groups]
        checked, groups = _chosen(checks(dry), given.only), _chosen(groups, given.only)
        own_check = _chosen(own.check() if own else {}, given.only)
        if not {**checked, **own_check, **groups}:
            raise InputError(f"nothing is named {' or '.join(given.only)}; name some of: {', '.join(every)}")
        folder.mkdir(parents=True, exist_ok=True)
        _drop_half_row(folder)
        done = {key for key, row in read_rows(folder).items() if "error" not in row}
        code = 0
        try:
            _run({name: command for name, command in checked.items() if name not in done}, CHECKS_S, folder)
            _run({name: command for name, command in own_check.items() if name not in done}, PRETRAINED_S, folder)
            again = [*["--dry-run"] * dry, *(own.words() if own else ())]
            for name, timing in groups.items():
                command = ["-m", "lab.bench.gpu", str(folder), "--one", name, *again]
                _run({name: command} if name not in done else {}, timing.seconds, folder)
        except KeyboardInterrupt:
            code = _INTERRUPTED
        rows = read_rows(folder)
        (folder / PAGE).write_text(page(rows, dry=dry), encoding="utf-8")
    except (InputError, OSError) as error:
        why = f"{folder} cannot be used: {error.strerror}; name another folder" if isinstance(error, OSError) else error
        print(f"lab.bench.gpu: {why}", file=sys.stderr)
        return 2
    wrong = [key for key in (*checked, *own_check, *groups) if "error" in rows.get(key, {"error": ""})]
    print(f"{len(rows)} rows in {folder / ROWS}, {len(wrong)} of them wrong or missing", folder / PAGE, sep="\n")
    return code or int(bool(wrong))


def _chosen(named: Mapping[str, Any], only: Sequence[str] | None) -> dict[str, Any]:
    return {name: what for name, what in named.items() if not only or any(words in name for words in only)}


def _run(commands: Mapping[str, Sequence[str]], seconds: float, folder: Path) -> None:
    """Run Python with some arguments, all at once, and write a row of each."""
    for name, (code, text, taken) in outputs(commands, seconds):
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"-- {name}\n{text}\n")
        row = {"key": name, **row_of(code, text), "seconds": round(taken, 3)}
        with (folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        shown = {key: row[key] for key in ("passed", "failed", "error") if key in row}
        print(name, *(f"{key}: {value}" for key, value in shown.items()), sep="  ", flush=True)


def outputs(
    commands: Mapping[str, Sequence[str]], seconds: float, poll_s: float = _POLL_S
) -> Iterator[tuple[str, tuple[int | None, str, float]]]:
    """Exit code, None if its time was over, all that it said, and seconds of each command, as they are done.

    Args:
        commands: arguments of Python, by name; they run at once. Those that are not done in time are ended.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        for name, command in commands.items():
            output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running[name] = process, output
        while running:
            for name, (process, output) in list(running.items()):
                late = time.monotonic() - began > seconds
                if process.poll() is None and not late:
                    continue
                process.kill()
                process.wait()
                output.seek(0)
                text = output.read().decode(errors="replace")
                yield name, (None if late and process.returncode < 0 else process.returncode, text, time.monotonic() - began)
                del running[name]
            time.sleep(poll_s if running else 0)


def row_of(code: int | None, text: str) -> Row:
    """What a command's output says: cases of the op tables' contract, a result with its tables, or its last lines.

    Args:
        code: its exit code; None if its time was over.
    """
    lines = text.splitlines()
    row: Row = {"exit": code}
    if cases := [json.loads(line) for line in lines if line.startswith('{"table"')]:
        failed = [case for case in cases if not case["passed"]]
        row |= {"passed": len(cases) - len(failed), "failed": len(failed), "failures": failed[:_FAILED_CASES]}
    if lines and lines[-1].startswith('{"result"'):
        row |= json.loads(lines[-1])
    else:
        row["end"] = [line[:300] for line in lines if not line.startswith('{"table"')][-_END_LINES:]
    if code is None:
        row["error"] = "it was ended: its time was over"
    elif code:
        row["error"] = f"exit code {code}: {(lines or ['it said nothing'])[-1][:300]}"
    elif untimed := [
        r["who"] for r in row.get("result", {}).get("rows", ()) if "ms" not in r and r["who"].startswith("cuda ")
    ]:
        row["error"] = f"no time of {', '.join(untimed)}"
    return row


def read_rows(folder: Path) -> dict[str, Row]:
    """The newest row of each check and group; a line that is none is refused, but for the half that a cut left at the end."""
    path, rows = folder / ROWS, dict[str, Row]()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), 1):
        try:
            row = json.loads(line)
            rows[row["key"]] = row
        except (ValueError, TypeError, KeyError):
            raise InputError(f"line {number} of {path} is no row of this benchmark; name another folder") from None
    return rows


def _drop_half_row(folder: Path) -> None:
    """Remove what a cut left of a row, so that the next one begins a line."""
    path = folder / ROWS
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


# -- The page ----------------------------------------------------------------------------------------------------------------
def page(rows: Mapping[str, Row], *, dry: bool = False) -> str:
    """All tables, as Markdown."""
    parts = ["# haarkv on a GPU\n"]
    if dry:
        parts.append("This is a rehearsal on a CPU: its times mean nothing.\n")
    checked = [(key, row.get("error", "passed"), f"{row['seconds']:.0f}") for key, row in rows.items() if "result" not in row]
    parts.append(_markdown(Table("Checks, and groups that failed", ("what", "result", "seconds"), checked)))
    for key, row in rows.items():
        for title, columns, cells, notes in row.get("tables", ()):
            parts += [_markdown(Table(f"{key}: {title}", columns, cells)), *(f"{note}\n" for note in notes)]
    return "\n".join(parts)


def _markdown(table: Table) -> str:
    lines = (" | ".join(cells) for cells in (table.columns, ["---"] * len(table.columns), *table.rows))
    return "\n".join([f"## {table.title}\n", *(f"| {line} |" for line in lines), ""])


if __name__ == "__main__":
    sys.exit(main())
