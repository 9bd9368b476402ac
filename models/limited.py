"""What comes with a model and is a program: it runs in a process of its own, which may not run long or take much."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from haarkv.models import limited_worker

_WAITS = 3
"""Times the seconds that the process may compute until it is given up: a machine does other things as well."""
_WORKER = Path(limited_worker.__file__)


class TooMuchError(Exception):
    """It took more time or memory than it may; the message says how much that is."""


def answer(request: Mapping[str, object]) -> dict[str, Any]:
    """What `limited_worker` says to a request.

    Raises:
        TooMuchError: it had to be ended.
    """
    asked = json.dumps(request).encode()
    most = limited_worker.seconds(len(asked))
    # -P: no module where the file or the user stands can take the place of Python's own.
    command = [sys.executable, "-P", str(_WORKER)]
    memory = limited_worker.TOKENIZER_MEMORY if "tokenizer" in request else limited_worker.MOST_MEMORY
    too_much = f"it takes more than {most} s or {memory >> 20} MiB"
    try:
        done = subprocess.run(
            command, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_WAITS * most, check=False
        )
    except subprocess.TimeoutExpired:
        raise TooMuchError(too_much) from None
    if done.returncode:
        raise TooMuchError(too_much)
    said: dict[str, Any] = json.loads(done.stdout)
    return said
