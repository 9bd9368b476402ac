"""Times of a long measurement, in a file as they come: a run that was cut off goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.output_files import check_writable, write_whole

_VERSION = 1


class KeptTimes:
    """Seconds by (kind, context, who).

    Args:
        path: the file; without one nothing outlives this object.
        run: what the times depend on; those of another run are not mixed with them.
    Raises:
        InputError: the file is none of these, was begun by another run, or cannot be written.
    """

    def __init__(self, path: Path | None, run: Mapping[str, Any]) -> None:
        self._path, self._run = path, json.loads(json.dumps(run))
        self._times: dict[tuple[str, int, str], list[float]] = {}
        if path is None:
            return
        check_writable(path)
        if path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = parse_json(path.read_text(encoding="utf-8"))
            version, run = found["haarkv_times"], found["run"]
            times = {(kind, int(context), who): [float(s) for s in taken] for kind, context, who, taken in found["times"]}
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"--resume: {path} holds no times of such a run; name a new file") from None
        if version != _VERSION:
            raise InputError(f"--resume: {path} is of version {version}, not {_VERSION}; name a new file")
        for what in self._run:
            if run.get(what) != self._run[what]:
                raise InputError(f"--resume: {path} was begun with another {what}; name a new file")
        self._times = times

    def of(self, kind: str, context: int, who: str) -> list[float]:
        """The seconds there are, in the order in which they came."""
        return list(self._times.get((kind, context, who), ()))

    def add(self, kind: str, context: int, who: str, seconds: Sequence[float]) -> None:
        """Keep more seconds, and write the file.

        Raises:
            InputError: it cannot be written.
        """
        self._times.setdefault((kind, context, who), []).extend(seconds)
        if self._path is not None:
            times = [[*key, taken] for key, taken in self._times.items()]
            write_whole(self._path, json.dumps({"haarkv_times": _VERSION, "run": self._run, "times": times}) + "\n")
