"""The rows of a run: a JSON line each, on disk at once, so that a run that was cut goes on where it stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from haarkv.tq_ops.errors import InputError

Row = dict[str, Any]
ROWS = "rows.jsonl"
"""Name of the file in the folder of a run."""
_LOST = ("CUDA error", "CUDA_ERROR", "Triton Error [CUDA]")
"""What torch, NVIDIA's bindings and Triton say of a device that refuses."""


class DeviceLostError(Exception):
    """The device refuses every later call of this process."""


def read_rows(folder: Path) -> list[Row]:
    """All rows of a folder, oldest first; the last one is dropped if a cut left half of it.

    Raises:
        InputError: a line is no row, so the file is not one that a run wrote.
    """
    path = folder / ROWS
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), 1):
        try:
            row = json.loads(line)
            rows.append({"part": row["part"], "key": row["key"], **row})
        except (ValueError, TypeError, KeyError):
            raise InputError(f"line {number} of {path} is no row of this benchmark; name another folder") from None
    return rows


def drop_half_row(folder: Path) -> None:
    """Remove what a cut left of a row, so that the next one begins a line."""
    path = folder / ROWS
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


def is_result(row: Row) -> bool:
    """Whether a row holds what was asked for: it is no mark of a beginning, no error, and nothing that was left out."""
    return not {"begun", "error", "missing"} & row.keys()


def outcomes(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """What became of each part and key: its newest row that is no mark of a beginning."""
    return {(row["part"], row["key"]): row for row in rows if "begun" not in row}


def unfinished(rows: Sequence[Row], part: str) -> list[str]:
    """Keys of a part that were begun and have no outcome since."""
    newest = {row["key"]: row for row in rows if row["part"] == part}
    return [key for key, row in newest.items() if "begun" in row]


class Log:
    """Where one part of a run writes its rows.

    Args:
        seconds: how long it may begin new measurements.
        since: rows of earlier runs. What failed or was left out there is tried again; what failed in this run is not.
    Attributes:
        results: what is known of this part, by key.
    """

    def __init__(self, folder: Path, part: str, seconds: float, since: int = 0) -> None:
        self.part, self._path, self._seconds = part, folder / ROWS, seconds
        self._ends = time.monotonic() + seconds
        rows = read_rows(folder)
        self.results = {key: row for (of, key), row in outcomes(rows).items() if of == part and is_result(row)}
        self._settled = {*self.results, *(key for of, key in outcomes(rows[since:]) if of == part)}

    def wants(self, key: str) -> bool:
        """Whether there is no row of this key yet and time for it; if time is lacking, a row says so."""
        if key in self._settled:
            return False
        if time.monotonic() < self._ends:
            return True
        self.add(key, missing=f"not measured: the {self._seconds:.0f} s of part {self.part} were over")
        return False

    def add(self, key: str, **values: Any) -> None:
        """Write a row and see it on disk."""
        row = {"part": self.part, "key": key, **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if "begun" not in values:
            self._settled.add(key)
            if is_result(row):
                self.results[key] = row
            shown = {name: row[name] for name in ("us", "tb_s", "passed", "failed", "error", "missing") if name in row}
            print(self.part, key, *(f"{name}: {value}" for name, value in shown.items()), sep="  ", flush=True)

    @contextmanager
    def attempt(self, key: str) -> Iterator[Row]:
        """Fill the row of a key; an error becomes the row, and the next attempt goes on.

        Raises:
            DeviceLostError: the error is one after which the device refuses every later call; the row is written.
        """
        self.add(key, begun=True)
        row: Row = {}
        began = time.monotonic()
        try:
            yield row
        except DeviceLostError:
            raise  # of an attempt within this one
        except Exception as error:  # one measurement must not take the others with it
            line = (str(error).splitlines() or [""])[0]
            self.add(key, **row, error=f"{type(error).__name__}: {line[:300]}")
            if any(words in str(error) for words in _LOST) and "capturing" not in str(error):
                raise DeviceLostError(line) from error
        else:
            self.add(key, **row, seconds=round(time.monotonic() - began, 3))
