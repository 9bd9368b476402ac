"""What every benchmark ends with: the machine it ran on, and one JSON line."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    cpu = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": cpu, **gpu, "threads": torch.get_num_threads(), **versions, **_commit()}


def _commit() -> dict[str, str]:
    """The commit that is checked out, with a plus sign if files differ from it; nothing outside a checkout."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(RESULTS.parent), *args], capture_output=True, text=True, check=True
            ).stdout.strip()
            for args in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": commit + "+" * bool(changes)}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and a table whose columns are as wide as they need to be."""
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    print(title)
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def emit(name: str, row: dict[str, Any], *, save: bool, echo: bool = True) -> None:
    """Print the row as one JSON line and, if asked, append it to `benchmarks/results/NAME.jsonl`."""
    line = json.dumps({"benchmark": name, "date": datetime.now(UTC).date().isoformat(), **machine(), **row})
    if echo:
        print(line)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
