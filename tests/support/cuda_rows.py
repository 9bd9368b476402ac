"""Runs a script of this folder that compiles for GPUs, in a process where Triton was not imported to interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path

from places import ROOT


def script_rows(script: str, *arguments: str, triton: Path | None = None) -> list[dict]:
    """The JSON lines that a script prints.

    Args:
        triton: a folder with another Triton than the installed one, as its wheel unpacks.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    first = [str(triton)] if triton else []
    environment["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), *sys.path])
    command = [sys.executable, str(ROOT / "tests/support" / script), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
