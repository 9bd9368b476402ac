"""Processes that are killed before each of the changes that they make to files."""

import os
import signal
import sys

import pytest

# Everything that Python announces before it changes a folder.
MOMENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def killed_at(moment, work):
    """Run `work` in a process that is killed before its so-and-so-many-th change; whether it was."""
    process = os.fork()
    if not process:
        left = moment

        def count(event, _):
            nonlocal left
            if event in MOMENTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


def every_moment(work):
    """Kill `work` at each of its moments, one after the other; yields after each."""
    for moment in range(100):
        if not killed_at(moment, work):
            assert moment > 3, "nothing was counted"
            return
        yield moment
    pytest.fail("there is no end")
