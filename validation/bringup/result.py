"""What a rung found, and how it is kept: as one JSON file a rung. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.output_files import write_whole

Verdict = Literal["passed", "failed", "not on this executor", "not tried"]

RUNGS = (
    "environment", "compiler", "store", "layer", "long-decode", "head", "teacher-forced", "free-running", "text", "latency",
)  # fmt: skip
"""Every rung, from the lowest up."""


@dataclass(frozen=True)
class Found:
    """What a rung found.

    Attributes:
        passed: None if this executor has no counterpart of the rung.
        said: one line.
        compared: how many of `unit` were compared or run; a rung that passes without any has proved nothing.
        where: format, layer and stage, or the like, of a fault.
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


class Folder:
    """Where results are kept; each file is written whole or not at all.

    Args:
        path: an existing folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, name: str) -> Result | None:
        """The kept result of a rung; None if there is none.

        Raises:
            InputError: a file of that name that is no result.
        """
        file = self.path / f"{name}.json"
        if not file.exists():
            return None
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            return Result(**{**plain, "found": Found(**plain["found"])})
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{file} is no result of tq dev bringup; delete it") from None

    def save(self, result: Result) -> None:
        """Keep a result, in place of an older one."""
        write_whole(self.path / f"{result.name}.json", json.dumps(result.as_json(), indent=1) + "\n")

    def log(self, name: str, text: str) -> str:
        """Keep a message; the name of its file."""
        write_whole(self.path / f"{name}.log", text)
        return f"{name}.log"
