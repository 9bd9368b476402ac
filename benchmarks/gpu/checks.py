"""Correctness before speed, on the card: the op table's contract, the tests of kernels and executor, the validator."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from haarkv.benchmarks.gpu.log import Log
from haarkv.tq_ops.table import OP_NAMES

ROOT = Path(__file__).resolve().parents[2]
_END_LINES, _FAILED_CASES = 30, 20
_POLL_S = 0.2
_CONTRACT = ("-m", "haarkv.validation.ops", "--table", "cuda", "--json")
_TESTS = {
    "kernels": ("tests/tq_ops/cuda/test_cuda_ops.py", "tests/tq_ops/cuda/test_schedule.py"),
    "executor": ("tests/executors/test_cuda_executor.py", "tests/executors/test_cuda_step.py"),
}
_SHARES = {"paged_attention": 6, "store_kv": 3}
"""Processes that share an op's cases, each of which compiles kernels of its own."""


def commands(dry: bool) -> Mapping[str, Sequence[str]]:
    """Arguments of Python by the name of the check. In a rehearsal they take seconds, and nothing is proved."""
    if dry:
        return {
            "contract rms_norm": [*_CONTRACT, "--op", "rms_norm", "--share", "1/2"],
            "a check that fails": ["-c", "import sys; sys.exit('it fails on purpose')"],
        }
    # Compiling takes most of the time, so what can run at once does.
    workers = ["-n", "2"] if find_spec("xdist") else []
    contract = {
        f"contract {op}, {part} of {shares}": [*_CONTRACT, "--op", op, "--share", f"{part}/{shares}"]
        for op, shares in {**dict.fromkeys(OP_NAMES, 1), **_SHARES}.items()
        for part in range(1, shares + 1)
    }
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-m", "not slow and not cuda_compile"]
    held_out = "models/tiny_qwen3/held_out.txt"
    return {
        **contract,
        "tests of the kernels": [*pytest, *workers, *_TESTS["kernels"]],
        "tests of the executor": [*pytest, *workers, *_TESTS["executor"]],
        "validate tiny": ["-m", "tq", "validate", "--executor", "cuda", "--prompt-file", held_out, "--prompt-tokens", "300",
                          "--steps", "8"],
    }  # fmt: skip


def run(log: Log, seconds: float, dry: bool, poll_s: float = _POLL_S) -> None:
    """Run all checks at once; a row each. Those that are not done in time are ended, with what they had said as their row."""
    wanted = {name: command for name, command in commands(dry).items() if log.wants(name)}
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], float]] = {}
        for name, command in wanted.items():
            output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running[name] = process, output, time.monotonic()
        while running:
            for name, (process, output, began) in list(running.items()):
                late = time.monotonic() > deadline
                if process.poll() is None and not late:
                    continue
                process.kill()
                process.wait()
                output.seek(0)
                text = output.read().decode(errors="replace")
                _note(log, name, text, None if late and process.returncode < 0 else process.returncode, began)
                del running[name]
            time.sleep(poll_s)


def _note(log: Log, name: str, text: str, code: int | None, began: float) -> None:
    """Write the row of one check.

    Args:
        code: its exit code; None if its time was over.
    """
    lines = text.splitlines()
    cases = [json.loads(line) for line in lines if line.startswith('{"table"')]
    row: dict[str, object] = {"exit": code, "seconds": round(time.monotonic() - began, 3)}
    if cases:
        failed = [case for case in cases if not case["passed"]]
        row |= {"passed": len(cases) - len(failed), "failed": len(failed), "failures": failed[:_FAILED_CASES]}
    row["end"] = [line[:300] for line in lines if not line.startswith('{"table"')][-_END_LINES:]
    if code is None:
        row["error"] = "it was ended: the time of this part was over"
    elif code:
        row["error"] = f"exit code {code}: {(lines or ['it said nothing'])[-1][:300]}"
    log.add(name, **row)
