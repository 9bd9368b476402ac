"""Scripts of tests/support in processes of their own, where Triton compiles: in a test's own process it interprets."""

import json
import os
import subprocess
import sys

from places import ROOT


def rows_of(script: str, *arguments: str) -> list[dict]:
    """The JSON lines of a script of tests/support that compiles, in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, str(ROOT / "tests/support" / script), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
