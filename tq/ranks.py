"""`--tensor-parallel N`: a command on several ranks, started by itself or by torchrun.

The command that a user types starts N processes with its command line and waits. Rank 0 reads input and prints; the others are
silent. If one is lost, all end with one line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import TemporaryFolder
from tq.options import IntRange, written_options

if TYPE_CHECKING:
    from haarkv.engine.ranks import Place
    from haarkv.models.parallel import Ranks

RANK_LOST = 3
"""Exit code of a rank that lost another; the parent process reports which."""
_TIMEOUT_S = 600
_LOOK_S = 0.02
_GRACE_S = 3.0
"""Seconds for the other ranks to end after one has."""


@dataclass(frozen=True)
class Launch:
    """How this process was started: its command line without `tq`, and its rank if `tq` started it."""

    argv: Sequence[str] = field(default_factory=list)
    place: Place | None = None


def tensor_parallel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--tensor-parallel` and `--rank-timeout`, and an argument `ranks`."""

    @click.option(
        "--tensor-parallel",
        "size",
        type=IntRange(min=1),
        metavar="N",
        default=1,
        show_default=True,
        help="Split the model over N processes: N GPUs, N NPUs, or N processes on the CPU.",
    )
    @click.option(
        "--rank-timeout", "timeout_s", type=click.FloatRange(min=1), metavar="S", default=_TIMEOUT_S, show_default=True,
        help="End if one of them does not answer for S seconds.",
    )  # fmt: skip
    @wraps(function)
    def run(*args: Any, size: int, timeout_s: float, **kwargs: Any) -> Any:
        from haarkv.models.parallel import ALONE

        launch = click.get_current_context().find_root().obj or Launch()
        if size == 1:
            if "timeout_s" in written_options():
                raise click.UsageError("--rank-timeout is of ranks that wait for each other; give --tensor-parallel as well")
            return function(*args, ranks=ALONE, **kwargs)
        from haarkv.engine.ranks import join, started_by_torchrun
        from haarkv.models.catalog import read_config
        from haarkv.models.parallel import Split

        if launch.place is None and not started_by_torchrun():
            if "model" in kwargs:
                # A number of ranks that the model cannot be split over is refused before a process is started.
                Split(read_config(kwargs["model"], kwargs.get("layers")), 0, size)
            return supervise(launch.argv, size, timeout_s)
        with join(size, launch.place, timeout_s) as ranks, _speaking(ranks):
            return function(*args, ranks=ranks, **kwargs)

    return run


@contextmanager
def _speaking(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 alone print."""
    if ranks.rank == 0:
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


# -- Starting and watching them ------------------------------------------------------------------------------------------


class RankError(click.ClickException):
    """A rank was lost."""


def supervise(argv: Sequence[str], size: int, timeout_s: float) -> int:
    """Run a command line on `size` ranks to their ends; rank 0's exit code, or a RankError."""
    with TemporaryFolder("ranks") as folder:
        # As long as this process lives, it keeps one end of a pipe open; ranks end when that end closes.
        read_end, write_end = os.pipe()
        ranks: dict[int, subprocess.Popen[bytes]] = {}
        errors = {rank: Path(folder, f"rank{rank}.txt") for rank in range(1, size)}
        try:
            for rank in range(size):
                ranks[rank] = _start(argv, rank, size, Path(folder, "meeting"), read_end, errors.get(rank))
            return _verdict(_watch(ranks), ranks, errors, timeout_s)
        except KeyboardInterrupt:
            _interrupt(ranks)
            raise
        finally:
            for process in ranks.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
            os.close(read_end)
            os.close(write_end)


def _start(
    argv: Sequence[str], rank: int, size: int, meeting: Path, read_end: int, errors: Path | None
) -> subprocess.Popen[bytes]:
    """Start one rank. Rank 0 has this process's input and output; stderr of the others goes to a file."""
    # -P: a folder `tq` where the user stands is none of ours.
    line = [sys.executable, "-P", "-m", "tq.ranks", str(rank), str(size), str(meeting), str(read_end), *argv]
    if errors is None:
        return subprocess.Popen(line, pass_fds=(read_end,))
    with errors.open("wb") as file:
        return subprocess.Popen(line, pass_fds=(read_end,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)


def _watch(ranks: Mapping[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    """Exit codes once all ranks have ended, or one has failed and the others had time to."""
    while True:
        codes = _codes(ranks)
        if len(codes) == len(ranks) or any(code < 0 for code in codes.values()):
            return codes
        if any(codes.values()):
            break
        time.sleep(_LOOK_S)
    _wait(ranks, _GRACE_S)
    return _codes(ranks)


def _codes(ranks: Mapping[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    return {rank: code for rank, process in ranks.items() if (code := process.poll()) is not None}


def _wait(ranks: Mapping[int, subprocess.Popen[bytes]], seconds: float) -> None:
    until = time.monotonic() + seconds
    while len(_codes(ranks)) < len(ranks) and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _interrupt(ranks: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """After Ctrl-C, which a terminal sends to all ranks: wait, then signal those that remain."""
    _wait(ranks, 0.3)
    for process in ranks.values():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    _wait(ranks, _GRACE_S)


def _verdict(codes: Mapping[int, int], ranks: Mapping[int, object], errors: Mapping[int, Path], timeout_s: float) -> int:
    """Rank 0's exit code, or a RankError that says which rank was lost, and how."""
    first = codes.get(0)
    if first is not None and first >= 0 and first != RANK_LOST and (first or not any(codes.values())):
        return first
    for rank, code in codes.items():
        if code < 0:
            raise RankError(f"rank {rank} was killed by {signal.Signals(-code).name}; the other ranks were ended")
        if code and code != RANK_LOST:
            lines = errors[rank].read_text(encoding="utf-8", errors="replace").strip().splitlines() if rank in errors else []
            why = lines[-1].removeprefix("tq: ") if lines else f"exit code {code}"
            raise RankError(f"rank {rank} failed: {why}")
    silent = [str(rank) for rank in ranks if rank not in codes]
    if silent:
        raise RankError(f"rank {', '.join(silent)} did not answer for {timeout_s:g} s; all ranks were ended")
    raise RankError(f"the ranks lost each other; if one was busy for more than {timeout_s:g} s, raise --rank-timeout")


# -- One of them: python -m tq.ranks RANK SIZE MEETING PIPE ARGUMENTS -----------------------------------------------------


def _end_with(pipe: int) -> None:
    """End this process when its parent has ended."""

    def watch() -> None:
        os.read(pipe, 1)  # returns when the other end is closed: nothing is ever written
        os._exit(2)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run the command line as one rank."""
    rank, size, meeting, pipe, *argv = sys.argv[1:]
    _end_with(int(pipe))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds; the process that started this one says what happened
    from haarkv.engine.ranks import Place
    from tq.cli import run
    from tq.ranks import Launch  # not this module, which is another one as it is run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run(Launch(argv, Place(int(rank), int(size), meeting)))
    if code:
        # The threads that talk to a lost rank still run, and tearing them down may end in a line of the C++ runtime.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
