"""One rank of a command, as `tq.ranks` starts it: python -m tq.rank RANK SIZE MEETING PIPE ARGUMENTS."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress


def _end_with(pipe: int) -> None:
    """End this process when the one that started it has ended, however it did."""

    def watch() -> None:
        os.read(pipe, 1)  # returns when the other end is closed: nothing is ever written
        os._exit(2)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run the command line as that rank."""
    rank, size, meeting, pipe, *argv = sys.argv[1:]
    _end_with(int(pipe))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds; the process that started this one says what happened
    from haarkv.engine.ranks import Place
    from tq.cli import run
    from tq.ranks import Started

    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run(Started(argv, Place(int(rank), int(size), meeting)))
    if code:
        # The threads that talk to a lost rank still run, and tearing them down may end in a line of the C++ runtime.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
