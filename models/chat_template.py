"""Chat templates: programs that come with a model. They run in a process of their own, which may not run long or take much.

jinja2's sandbox keeps a template from files and from Python's internals. It does not keep it from a loop without end, from
strings of terabytes, or from nesting until the interpreter's stack is gone; what the process may take does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from haarkv.models import chat_worker
from haarkv.tq_ops.errors import InputError

_WAIT_S = 30.0
"""For the process to answer: it may compute for `chat_worker.MOST_S`, on a machine that does other things as well."""
_WORKER = Path(chat_worker.__file__)
_TOO_MUCH = f"it takes more than {chat_worker.MOST_S} s or {chat_worker.MOST_MEMORY >> 20} MiB"


def render(source: str, conversations: Sequence[Sequence[Mapping[str, str]]], special: Mapping[str, str]) -> list[str]:
    """Texts of conversations, each up to where the answer begins.

    Args:
        source: of the template.
        conversations: messages, each with `role` and `content`.
        special: further names that the template sees, such as `eos_token`.
    Raises:
        InputError: the template cannot be read, refuses a conversation, or does not end; in one line.
    """
    asked = json.dumps({"source": source, "conversations": conversations, "special": special}).encode()
    # -P: no module where the file or the user stands can take the place of Python's own.
    command = [sys.executable, "-P", str(_WORKER)]
    try:
        done = subprocess.run(
            command, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _refused(_TOO_MUCH) from None
    if done.returncode:
        raise _refused(_TOO_MUCH)
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise _refused(answer["error"])
    return [str(text) for text in answer["texts"]]


def _refused(reason: str) -> InputError:
    return InputError(f"the chat template cannot be used: {reason}; --no-chat goes without it")
