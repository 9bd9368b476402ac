"""Everything that needs an NVIDIA GPU, in one call of less than nine minutes.

    python -m haarkv.benchmarks.gpu OUT              measure; run it again with the same OUT to go on after a cut
    python -m haarkv.benchmarks.gpu OUT --page       only draw OUT/index.html anew
    TRITON_INTERPRET=1 python -m haarkv.benchmarks.gpu OUT --dry-run     rehearse at tiny sizes, on a CPU

First the kernels are checked against the reference; then attention, storing, prompts and whole steps are timed. Every figure
is a line of OUT/rows.jsonl as soon as it is known. OUT/index.html draws them, and OUT/log.txt holds what went wrong.

It needs no installation: run it in the folder of a checkout. Exit code: 0 if every check passed and every figure is there, 1
if not, 2 if it cannot run here, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from haarkv.benchmarks.gpu import page
from haarkv.benchmarks.gpu.log import ROWS, DeviceLostError, Log, Row, drop_half_row, outcomes, read_rows, unfinished
from haarkv.tq_ops.errors import InputError

SHARES = {"machine": 25.0, "checks": 165.0, "attention": 140.0, "append": 30.0, "prefill": 45.0, "steps": 105.0}
"""Seconds of each part, in their order; what one leaves over, the next may take."""
_GRACE_S = 8.0  # after its time a part may finish what it has begun for so long
ROOT = Path(__file__).resolve().parents[2]
"""Where a part's process runs: behind the links of `haarkv/`, so that a checkout which is not installed is found."""
_DEVICE_LOST, _INTERRUPTED = 3, 130
_MOST_STARTS = 6


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="haarkv.benchmarks.gpu", description=__doc__, formatter_class=form)
    parser.add_argument("folder", metavar="OUT", type=Path, help="where the results go; made if need be")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter; the figures mean nothing")
    parser.add_argument("--page", action="store_true", help="measure nothing, draw the page from the rows that are there")
    parser.add_argument("--parts", default=",".join(SHARES), help="which of them, by comma [default: %(default)s]")
    parser.add_argument("--one", choices=list(SHARES), help=argparse.SUPPRESS)  # this and the next two: of a part's process
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--since", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    parts = given.parts.split(",")
    if unknown := [part for part in parts if part not in SHARES]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(SHARES)}")
    folder = given.folder.absolute()
    try:
        if given.one:
            return run_part(given.one, Log(folder, given.one, given.seconds, given.since), given.seconds, dry=given.dry_run)
        folder.mkdir(parents=True, exist_ok=True)
        if not given.page:
            drop_half_row(folder)
            return Run(folder, parts, dry=given.dry_run).all()
        page.write(folder, read_rows(folder))
    except (InputError, OSError) as error:
        why = f"{folder} cannot be used: {error.strerror}; name another folder" if isinstance(error, OSError) else error
        print(f"haarkv.benchmarks.gpu: {why}", file=sys.stderr)
        return 2
    print(folder / page.PAGE)
    return 0


def run_part(part: str, log: Log, seconds: float, *, dry: bool) -> int:
    """One part, in the process that runs it; its exit code. Without a GPU it is refused."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its own processes end as well
    from haarkv.benchmarks.gpu import attention, checks, device

    sizes = device.DRY if dry else device.FULL
    at = device.device_of(sizes)
    try:
        if part == "machine":
            device.measure(log, at, sizes)
        elif part == "checks":
            checks.run(log, seconds, dry)
        elif part == "steps":
            from haarkv.benchmarks.gpu.steps import Steps

            Steps(sizes, at, log).run()
        else:
            timed = attention.Attention(sizes, at, attention.step_ops(at), log, attention.triton_beside(at))
            {"attention": timed.decode, "append": timed.append, "prefill": timed.prefill}[part]()
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return _DEVICE_LOST
    return 0


class Run:
    """All parts, each in a process of its own: what breaks one, or the device under it, takes no other with it.

    Args:
        program: what Python runs as the process of a part.
    """

    def __init__(
        self, folder: Path, parts: Sequence[str], *, dry: bool, program: Sequence[str] = ("-m", "haarkv.benchmarks.gpu")
    ) -> None:
        self.folder, self.dry, self._program = folder, dry, program
        self.parts = [part for part in SHARES if part in parts]
        self._since = len(read_rows(folder))

    def all(self) -> int:
        """Run them, draw the page, and return the exit code."""
        deadline, code = time.monotonic(), 0
        try:
            for part in self.parts:
                deadline += SHARES[part]
                if self._run(part, deadline) == 2:
                    return 2
        except KeyboardInterrupt:
            code = _INTERRUPTED
        rows = read_rows(self.folder)
        page.write(self.folder, rows)
        wrong = [row for row in outcomes(rows).values() if row["part"] in self.parts and is_wrong(row)]
        print(f"{len(outcomes(rows))} rows in {self.folder / ROWS}, {len(wrong)} of them wrong or missing")
        print(self.folder / page.PAGE)
        return code or int(bool(wrong))

    def _run(self, part: str, deadline: float) -> int:
        """Start a part's process, again if the device was lost under it, until it is done or its time is over."""
        for _ in range(_MOST_STARTS):
            code, said = self._once(part, max(deadline - time.monotonic(), 0.0))
            if code in (0, 2):
                return code
            if code != _DEVICE_LOST:
                keys = unfinished(read_rows(self.folder)[self._since :], part)
                why = "its time was over" if code is None else f"its process ended with code {code}: {said}"
                Log(self.folder, part, 0.0).add(keys[-1] if keys else "process", error=why)
                if not keys or code is None:
                    return 1
        Log(self.folder, part, 0.0).add("process", error=f"given up after {_MOST_STARTS} starts")
        return 1

    def _once(self, part: str, seconds: float) -> tuple[int | None, str]:
        """One process of a part: its exit code, None if it had to be ended, and the last line that it said."""
        command = [sys.executable, *self._program, str(self.folder), "--one", part]
        command += ["--seconds", f"{seconds:.1f}", "--since", str(self._since), *["--dry-run"] * self.dry]
        path = self.folder / "log.txt"
        with path.open("ab") as errors:
            errors.write(f"-- {part}\n".encode())
            errors.flush()
            process = subprocess.Popen(command, cwd=ROOT, stderr=errors)
            code: int | None = None
            try:
                code = process.wait(seconds + _GRACE_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        last = (path.read_text(encoding="utf-8", errors="replace").splitlines() or [""])[-1]
        if code == 2:
            print(last, file=sys.stderr)
        return code, last[:300]


def is_wrong(row: Row) -> bool:
    """Whether an outcome is an error, or a figure that is lacking; what a peer cannot do here is neither."""
    return ("error" in row or "missing" in row) and row.get("side") != "peer"


if __name__ == "__main__":
    sys.exit(main())
