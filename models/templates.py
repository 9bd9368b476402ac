"""Chat templates, rendered in a process with limited time and memory.

jinja2's sandbox keeps a template from files and Python's internals, not from endless loops or huge strings. The process stays
for the next request.
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

from haarkv.models import template_worker
from haarkv.tq_ops.errors import InputError

_WAITS = 3
"""Seconds of waiting for each second that the process may compute."""
# -P: no module in the current folder can take the place of Python's own.
_COMMAND = (sys.executable, "-P", template_worker.__file__)
_LOCK = threading.Lock()
_RUNNING: dict[int, subprocess.Popen[bytes]] = {}
"""The process by its parent's id: a fork must not use its parent's pipes."""
RESERVED_NAMES = ("messages", "add_generation_prompt")
"""Names in chat templates that are no arguments."""

Messages = Sequence[Mapping[str, Any]]


def render(
    source: str, conversations: Sequence[Messages], special: Mapping[str, str], arguments: Mapping[str, object]
) -> list[str]:
    """Texts of conversations by a chat template, each up to where the answer begins.

    Args:
        special: texts of special tokens by name, such as `eos_token`.
        arguments: such as `enable_thinking`; they replace special tokens of the same name.
    Raises:
        InputError: the template cannot be read, reads no such argument, refuses a conversation, or does not end.
    """
    reply = _answer({"source": source, "conversations": conversations, "special": special, "arguments": arguments})
    if "unread" in reply:
        name, read = reply["unread"][0], [name for name in reply["read"] if name not in RESERVED_NAMES]
        near, read_names = get_close_matches(name, read, n=1), ", ".join(read) or "none"
        meant = f"did you mean {near[0]}?" if near else f"it reads {read_names}"
        raise InputError(f"the chat template reads no argument {name}; {meant}")
    if "error" in reply:
        raise InputError(f"the chat template cannot be used: {reply['error']}; --no-chat goes without it")
    return [str(text) for text in reply["texts"]]


def _answer(request: Mapping[str, object]) -> dict[str, Any]:
    """The reply of `template_worker`; without one it was killed, and the next request starts another process."""
    line = json.dumps(request).encode()
    seconds, memory = template_worker.allowance(len(line))
    with _LOCK:
        if (process := _RUNNING.get(os.getpid())) is None:
            pipe = subprocess.PIPE
            # In a group of its own: Ctrl-C is not meant for it.
            process = subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
            _RUNNING[os.getpid()] = process
        assert process.stdin
        assert process.stdout
        clock, reply = threading.Timer(_WAITS * seconds, process.kill), b""
        clock.start()
        try:
            with suppress(BrokenPipeError):  # it was ended between two requests
                process.stdin.write(line + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline()
        finally:
            clock.cancel()
            if not reply:
                process.kill()
                process.wait()
                del _RUNNING[os.getpid()]
    return json.loads(reply) if reply else {"error": f"it takes more than {seconds} s or {memory >> 20} MiB"}
