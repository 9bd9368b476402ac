"""A benchmark's report: tables, and one JSON line under a common header."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from haarkv.models.catalog import model_files
from haarkv.tq_ops.memory import mapped_memory, peak_memory

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine, versions and commit."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": cpu, **gpu, "threads": torch.get_num_threads(), **versions, **_commit()}


def _commit() -> dict[str, str]:
    """The commit, with a plus sign if files differ; nothing outside a checkout."""
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return {"commit": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}
    except (OSError, subprocess.CalledProcessError):
        return {}


class Table(NamedTuple):
    """Cells under the names of their columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    """Result of one benchmark run: `values` of the JSON line beside the header, and tables with notes by number."""

    name: str
    model: str
    context: Sequence[int]
    kv: Sequence[str]
    values: Mapping[str, Any]
    tables: Sequence[Table]
    notes: Mapping[int, Sequence[str]] = field(default_factory=dict)
    packages: Sequence[str] = ()

    def line(self) -> str:
        """As one JSON line; the header's values win."""
        system = machine()
        versions = {name: system.pop(name) for name in ("python", "torch")}
        for package in self.packages:
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        date = datetime.now(UTC).date().isoformat()
        head = {"benchmark": self.name, "date": date, **system, "versions": versions, "model": self.model,
                "context": list(self.context), "kv": list(self.kv), **self.memory}  # fmt: skip
        return json.dumps(head | {name: value for name, value in self.values.items() if name not in head})

    @property
    def memory(self) -> dict[str, int]:
        """Peak bytes of this process, and mapped pages of the model's file."""
        return {"peak_bytes": peak_memory(), "mapped_bytes": mapped_memory(model_files(self.model))}

    def save(self) -> None:
        """Append the line to `benchmarks/results/NAME.jsonl`."""
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(self.line() + "\n")
