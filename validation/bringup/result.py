"""What a rung found, and how it is kept: as one JSON file a rung. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from haarkv.tq_ops.errors import InputError

Verdict = Literal["passed", "failed", "not on this executor", "not tried"]

RUNGS = {
    "environment": "versions that are published to work together",
    "compiler": "the C++ of decode through the device's own compiler",
    "add": "the smallest kernel of a vector core",
    "cube": "one product of a cube core",
    "look-up": "every byte restored to its centroids",
    "store": "K and V stored as the host stores them",
    "layer": "one decoder layer",
    "long-decode": "decode over more than one step of keys",
    "head": "final norm and LM head",
    "teacher-forced": "every layer, fed the reference's input",
    "free-running": "every layer, fed the layer before",
    "text": "greedy text",
    "latency": "latency by context and format",
}
"""Every rung, from the lowest up: its name and what it tries."""


@dataclass(frozen=True)
class Table:
    """Words and figures of a rung, as they are shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Drift:
    """One figure by layer, a line for each name.

    Attributes:
        bound: what it may be; None if nothing bounds it.
    """

    title: str
    lines: dict[str, dict[int, float]]
    bound: float | None = None


@dataclass(frozen=True)
class Found:
    """What a rung found.

    Attributes:
        passed: None if this executor has no counterpart of the rung.
        said: one line.
        compared: how many of `unit` were compared or run; a rung that passes without any has proved nothing.
        where: layer and stage, or the like, of a fault.
        facts: by name.
        lacking: in words, what is lacking to try the rung; then `passed` is None.
        allowed: in words, what would have failed the rung and was allowed by the request.
    """

    passed: bool | None
    said: str
    compared: int = 0
    unit: str = "numbers"
    where: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    drifts: tuple[Drift, ...] = ()
    lacking: str = ""
    allowed: str = ""


@dataclass(frozen=True)
class Result:
    """A rung that was run.

    Attributes:
        seconds: wall time of the whole rung; no latency.
        date: of its end.
        inputs: what the verdict depends on, by name; if one of them changes, the rung is run again.
        log: a file beside this one with the whole message of what went wrong; "" if there is none.
    """

    name: str
    verdict: Verdict
    found: Found
    seconds: float
    date: str
    inputs: Mapping[str, str]
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def from_json(plain: Any) -> Result:
    """The inverse of `Result.as_json`.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no such object.
    """
    found = plain["found"]
    tables = tuple(Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"]))) for t in found["tables"])
    drifts = tuple(
        Drift(d["title"], {name: {int(k): v for k, v in line.items()} for name, line in d["lines"].items()}, d["bound"])
        for d in found["drifts"]
    )
    return Result(**{**plain, "found": Found(**{**found, "tables": tables, "drifts": drifts})})


class Folder:
    """Where results are kept.

    Args:
        path: an existing folder.
        write: writes a file whole or not at all.
    """

    def __init__(self, path: Path, write: Callable[[Path, str], None]) -> None:
        self.path, self.write = path, write

    def load(self, name: str) -> Result | None:
        """The kept result of a rung; None if there is none.

        Raises:
            InputError: a file of that name that is no result.
        """
        file = self.path / f"{name}.json"
        if not file.exists():
            return None
        try:
            return from_json(json.loads(file.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{file} is no result of tq dev bringup; delete it") from None

    def save(self, result: Result) -> None:
        """Keep a result, in place of an older one."""
        self.write(self.path / f"{result.name}.json", json.dumps(result.as_json(), indent=1) + "\n")

    def log(self, name: str, text: str) -> str:
        """Keep a message; the name of its file."""
        self.write(self.path / f"{name}.log", text)
        return f"{name}.log"
