"""`tq` as a terminal starts it, where Ctrl-C ends it."""

import fcntl
import math
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

# Python installs no handler of its own where its parent ignores SIGINT, as a shell's background jobs do.
AS_IN_A_TERMINAL = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from tq.cli import main; sys.exit(main(sys.argv[1:]))"
)
"""For `python -c`; arguments follow."""


class Terminal:
    """A command in a terminal of its own: what is typed reaches it as from a keyboard, and all that it shows is kept.

    Args:
        args: of `tq`.
        columns: of the terminal.
        cwd: the folder that it runs in.
    Attributes:
        shown: what came so far, as text.
    """

    def __init__(self, *args, columns=80, cwd=None):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.shown, self._ours, self._seen = "", ours, 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import os; os.login_tty(0); " + AS_IN_A_TERMINAL, *map(str, args)],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env={**env, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, keys):
        """Press keys."""
        os.write(self._ours, keys.encode() if isinstance(keys, str) else keys)

    def until(self, word, seconds=120, again=None):
        """Wait until a word is shown that was not shown before; all that came since the last one.

        Args:
            again: keys that are pressed now, and every five seconds until the word comes. While readline waits for keys,
                CPython notices a Ctrl-C only if it comes during its select(); people press again, too.
        """
        began = self._seen
        stop = time.monotonic() + seconds
        pressed_at = -math.inf
        while (at := self.shown.find(word, self._seen)) < 0:
            assert time.monotonic() < stop, f"{word!r} does not come: {self.shown[began:]!r}"
            if again is not None and time.monotonic() - pressed_at > 5:
                self.type(again)
                pressed_at = time.monotonic()
            assert self._read(0.1), f"it ended before {word!r}: {self.shown[began:]!r}"
        self._seen = at + len(word)
        return self.shown[began : self._seen]

    def end(self, seconds=120):
        """Wait until it ends; its exit code."""
        stop = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < stop, f"it does not end: {self.shown[-500:]!r}"
        return self.process.wait(timeout=seconds)

    def _read(self, seconds):
        """Take what it shows; False once it has ended."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)
