"""What comes with a model and is a program: a process of its own runs it, which may not take long or much for any request.

jinja2's sandbox keeps a chat template from files and from Python's internals. It does not keep it from a loop without end,
from strings of terabytes, or from nesting until the interpreter's stack is gone; what the process may take does. The process
stays for the next request: to start one takes longer than most templates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from haarkv.models import limited_worker
from haarkv.tq_ops.errors import InputError

_WAITS = 3
"""Times the seconds that the process may compute until it is given up: a machine does other things as well."""
# -P: no module where the file or the user stands can take the place of Python's own.
_COMMAND = (sys.executable, "-P", limited_worker.__file__)
_LOCK = threading.Lock()
_RUNNING: dict[int, subprocess.Popen[bytes]] = {}
"""The process, by who started it: one that was forked must not speak on its parent's pipes."""


class TooMuchError(Exception):
    """It took more time or memory than it may; the message says how much that is."""


def answer(request: Mapping[str, object]) -> dict[str, Any]:
    """What `limited_worker` says to a request.

    Raises:
        TooMuchError: it had to be ended; the next request starts another.
    """
    asked = json.dumps(request).encode()
    most, memory = limited_worker.allowance(request, len(asked))
    with _LOCK:
        if (process := _RUNNING.get(os.getpid())) is None:
            pipe = subprocess.PIPE
            # In a group of its own: Ctrl-C is not meant for it.
            process = subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
            _RUNNING[os.getpid()] = process
        assert process.stdin
        assert process.stdout
        clock, said = threading.Timer(_WAITS * most, process.kill), b""
        clock.start()
        try:
            with suppress(BrokenPipeError):  # it was ended between two requests
                process.stdin.write(asked + b"\n")
                process.stdin.flush()
                said = process.stdout.readline()
        finally:
            clock.cancel()
            if not said:
                process.kill()
                process.wait()
                del _RUNNING[os.getpid()]
    if not said:
        raise TooMuchError(f"it takes more than {most} s or {memory >> 20} MiB")
    return json.loads(said)  # type: ignore[no-any-return]


OWN = ("messages", "add_generation_prompt")
"""Names that a chat template sees, and that are no arguments: what is said sets them."""


def render(
    source: str, conversations: Sequence[Sequence[Mapping[str, str]]], special: Mapping[str, str],
    arguments: Mapping[str, object],
) -> list[str]:  # fmt: skip
    """Texts of conversations by a chat template, each up to where the answer begins.

    Args:
        source: of the template.
        conversations: messages, each with `role` and `content`.
        special: further names that the template sees, such as `eos_token`.
        arguments: more of them, such as `enable_thinking`, in place of those where the names are the same.
    Raises:
        InputError: the template cannot be read, reads no such argument, refuses a conversation, or does not end; in one line.
    """
    try:
        said = answer({"source": source, "conversations": conversations, "special": special, "arguments": arguments})
    except TooMuchError as error:
        said = {"error": error}
    if "unread" in said:
        name, read = said["unread"][0], [name for name in said["read"] if name not in OWN]
        near, known = get_close_matches(name, read, n=1), ", ".join(read) or "none"
        meant = f"did you mean {near[0]}?" if near else f"it reads {known}"
        raise InputError(f"the chat template reads no argument {name}; {meant}")
    if "error" in said:
        raise InputError(f"the chat template cannot be used: {said['error']}; --no-chat goes without it")
    return [str(text) for text in said["texts"]]
