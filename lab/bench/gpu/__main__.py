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
from lab.bench import peers, prefill
from lab.bench.gpu.groups import CHECKS_S, PRETRAINED_S, PretrainedModel, Timing, checks, timings

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
"""Where processes run: behind the links of `haarkv/`, so that a checkout which is not installed is found."""
ROWS, PAGE, LOG = "rows.jsonl", "index.md", "log.txt"
_INTERRUPT_CODE = 130
_END_LINES, _FAILED_CASES = 30, 20
_POLL_S = 0.2


# -- A group -----------------------------------------------------------------------------------------------------------------
def run_one(timing: Timing, *, dry: bool) -> None:
    """Measure a group in this process; its row is printed as the last line."""
    # What follows imports Triton, which the process that starts this one may lack.
    from lab.bench.gpu.steps import random_model, sdpa

    request, model = timing.request, None
    if request.model.startswith("random:") or dry:
        request = replace(request, peer_variants=sdpa) if timing.peers else request
        model = None if dry else random_model(read_config(request.model, request.layers), open_gpu(None))

    def on_turn(who: str) -> None:
        print(f"timing {who}", flush=True)

    if timing.prefix_tokens is None:
        machine, rows = decode.measure(request, on_turn=on_turn, model=model)
        result = peers.beside_peers(decode.report("decode", request, machine, rows), rows)
    else:
        measurement = prefill.measure(request, timing.prefix_tokens, timing.peers, on_turn=on_turn, model=model)
        result = prefill.report(request, timing.prefix_tokens, *measurement)
    tables = [[*table, list(result.notes.get(number, ()))] for number, table in enumerate(result.tables)]
    print(json.dumps({"result": json.loads(result.line()), "tables": tables}))


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
    args = parser.parse_args(argv)
    folder, dry = args.folder.absolute(), args.dry_run
    try:
        memory = 0 if dry else torch.cuda.get_device_properties(open_gpu(None)).total_memory
        pretrained = PretrainedModel(args.model, args.kv_plan) if args.model else None
        groups = {**timings(dry, memory), **(pretrained.timings() if pretrained else {})}
        if args.one:
            run_one(groups[args.one], dry=dry)
            return 0
        every = [*checks(dry), *(pretrained.check() if pretrained else ()), *groups]
        check_commands, groups = _select(checks(dry), args.only), _select(groups, args.only)
        own_check = _select(pretrained.check() if pretrained else {}, args.only)
        if not {**check_commands, **own_check, **groups}:
            raise InputError(f"nothing is named {' or '.join(args.only)}; name some of: {', '.join(every)}")
        folder.mkdir(parents=True, exist_ok=True)
        _drop_half_row(folder)
        done = {key for key, row in read_rows(folder).items() if "error" not in row}
        code = 0
        try:
            _run({name: command for name, command in check_commands.items() if name not in done}, CHECKS_S, folder)
            _run({name: command for name, command in own_check.items() if name not in done}, PRETRAINED_S, folder)
            again = [*["--dry-run"] * dry, *(pretrained.words() if pretrained else ())]
            for name, timing in groups.items():
                command = ["-m", "lab.bench.gpu", str(folder), "--one", name, *again]
                _run({name: command} if name not in done else {}, timing.seconds, folder)
        except KeyboardInterrupt:
            code = _INTERRUPT_CODE
        rows = read_rows(folder)
        (folder / PAGE).write_text(page(rows, dry=dry), encoding="utf-8")
    except (InputError, OSError) as error:
        why = f"{folder} cannot be used: {error.strerror}; name another folder" if isinstance(error, OSError) else error
        print(f"lab.bench.gpu: {why}", file=sys.stderr)
        return 2
    wrong = [key for key in (*check_commands, *own_check, *groups) if "error" in rows.get(key, {"error": ""})]
    print(f"{len(rows)} rows in {folder / ROWS}, {len(wrong)} of them wrong or missing", folder / PAGE, sep="\n")
    return code or int(bool(wrong))


def _select(by_name: Mapping[str, Any], only: Sequence[str] | None) -> dict[str, Any]:
    return {name: what for name, what in by_name.items() if not only or any(words in name for words in only)}


def _run(commands: Mapping[str, Sequence[str]], seconds: float, folder: Path) -> None:
    """Run Python with some arguments, all at once, and write a row of each."""
    for name, (code, text, duration) in outputs(commands, seconds):
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"-- {name}\n{text}\n")
        row = {"key": name, **parse_row(code, text), "seconds": round(duration, 3)}
        with (folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        summary = {key: row[key] for key in ("passed", "failed", "error") if key in row}
        print(name, *(f"{key}: {value}" for key, value in summary.items()), sep="  ", flush=True)


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


def parse_row(code: int | None, text: str) -> Row:
    """What a command's output says: cases of the op tables' contract, a result with its tables, or its last lines.

    Args:
        code: its exit code; None if its time was over.
    """
    lines = text.splitlines()
    row: Row = {"exit": code}
    if cases := [json.loads(line) for line in lines if line.startswith('{"table"')]:
        failures = [case for case in cases if not case["passed"]]
        row |= {"passed": len(cases) - len(failures), "failed": len(failures), "failures": failures[:_FAILED_CASES]}
    if lines and lines[-1].startswith('{"result"'):
        row |= json.loads(lines[-1])
    else:
        row["end"] = [line[:300] for line in lines if not line.startswith('{"table"')][-_END_LINES:]
    if code is None:
        row["error"] = "it was ended: its time was over"
    elif code:
        row["error"] = f"exit code {code}: {(lines or ['it said nothing'])[-1][:300]}"
    elif missing_times := [
        r["who"] for r in row.get("result", {}).get("rows", ()) if "ms" not in r and r["who"].startswith("cuda ")
    ]:
        row["error"] = f"no time of {', '.join(missing_times)}"
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
    check_rows = [
        (key, row.get("error", "passed"), f"{row['seconds']:.0f}") for key, row in rows.items() if "result" not in row
    ]
    parts.append(_markdown(Table("Checks, and groups that failed", ("what", "result", "seconds"), check_rows)))
    for key, row in rows.items():
        for title, columns, cells, notes in row.get("tables", ()):
            parts += [_markdown(Table(f"{key}: {title}", columns, cells)), *(f"{note}\n" for note in notes)]
    return "\n".join(parts)


def _markdown(table: Table) -> str:
    lines = (" | ".join(cells) for cells in (table.columns, ["---"] * len(table.columns), *table.rows))
    return "\n".join([f"## {table.title}\n", *(f"| {line} |" for line in lines), ""])


if __name__ == "__main__":
    sys.exit(main())
