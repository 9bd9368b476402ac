"""What an evaluation has done so far, so that another run can go on: text in, text out, no files here."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from reprlib import repr as shown
from typing import Any

import numpy as np
import torch

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import parse_json
from haarkv.validation.fidelity.scores import Scores

_VERSION = 2
# Rewriting a file of some megabytes after each window of each cache would cost more than the windows.
_SAVE_EVERY_S = 10.0
_DTYPES = {"kl": "<f8", "same_top": "?", "log_p_a": "<f8", "log_p_b": "<f8"}


class Partial:
    """Scores of windows and greedy matches, by cache, bit for bit.

    Args:
        text: what an earlier run has saved; None begins anew.
        run: what both runs must have in common, by a word for the user.
        caches: fingerprint of each cache that this run will ask for.
        save: takes the whole text, every ten seconds at most, and in the end.
    Raises:
        InputError: a text that is no partial result, or one of another run; it is left alone.
    """

    def __init__(
        self,
        text: str | None = None,
        run: Mapping[str, str] | None = None,
        caches: Mapping[str, str] | None = None,
        save: Callable[[str], None] | None = None,
    ) -> None:
        self._run, self._save, self._unsaved, self._saved_at = dict(run or {}), save, False, time.monotonic()
        self._kept: dict[str, dict[str, Any]] = {} if text is None else _read(text, self._run)
        for name, fingerprint in (caches or {}).items():
            of_cache = self._kept.setdefault(name, {"fingerprint": fingerprint, "windows": {}})
            if of_cache["fingerprint"] != fingerprint:
                raise InputError(f"--resume: its {name} had other code or tables; begin a new file")

    def scores(self, name: str, window: int, length: int) -> Scores | None:
        """What is known of one window of a cache, which has so many positions.

        Raises:
            InputError: what was saved is damaged.
        """
        found = self._kept.get(name, {}).get("windows", {}).get(str(window))
        return None if found is None else _unpack(found, length)

    def keep_scores(self, name: str, window: int, scores: Scores) -> None:
        """Remember one window of a cache."""
        self._kept.setdefault(name, {"windows": {}})["windows"][str(window)] = _pack(scores)
        self._changed()

    def matches(self, name: str) -> list[int] | None:
        """What is known of a cache's greedy tokens."""
        found = self._kept.get(name, {}).get("matches")
        return None if found is None else [int(count) for count in found]

    def keep_matches(self, name: str, matches: list[int]) -> None:
        """Remember a cache's greedy matches."""
        self._kept.setdefault(name, {"windows": {}})["matches"] = matches
        self._changed()

    def flush(self) -> None:
        """Save what is not saved yet."""
        if self._save and self._unsaved:
            self._save(_written(self._run, self._kept))
            self._unsaved, self._saved_at = False, time.monotonic()

    def _changed(self) -> None:
        self._unsaved = True
        if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self.flush()


def _read(text: str, run: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    head, _, body = text.partition("\n")
    try:
        about = parse_json(head)
        version = about["haarkv_eval"]
    except (ValueError, KeyError, TypeError):
        raise InputError("--resume: the file is no partial result of such a run; begin a new one") from None
    if version != _VERSION:
        raise InputError(f"--resume: the file is of version {shown(version)}, not {_VERSION}; begin a new one")
    if about.get("sha256") != _digest(body):
        raise InputError("--resume: the file is damaged; begin a new one")
    content = json.loads(body)
    for what, value in run.items():
        if content["run"].get(what) != value:
            raise InputError(f"--resume: the file was begun with another {what}; begin a new one")
    kept: dict[str, dict[str, Any]] = content["caches"]
    return kept


def _written(run: Mapping[str, str], kept: Mapping[str, Any]) -> str:
    """A line that says what the file is and carries the SHA-256 of the next, which holds everything."""
    body = json.dumps({"run": run, "caches": kept}) + "\n"
    return json.dumps({"haarkv_eval": _VERSION, "sha256": _digest(body)}) + "\n" + body


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _pack(scores: Scores) -> dict[str, str]:
    return {name: base64.b64encode(getattr(scores, name).numpy().tobytes()).decode() for name in _DTYPES}


def _unpack(packed: Mapping[str, str], length: int) -> Scores:
    try:
        data = {name: base64.b64decode(packed[name], validate=True) for name in _DTYPES}
        arrays = {name: np.frombuffer(raw, dtype=_DTYPES[name]) for name, raw in data.items()}
        if any(len(array) != length for array in arrays.values()):
            raise ValueError("a window of another length")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"--resume: the file is damaged ({error}); begin a new one") from None
    return Scores(**{name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
