"""The user's cache folder: what PyPTO writes and what it said, kept out of the folder in which a command runs."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from haarkv.tq_ops.errors import InputError

_KEPT = 5


def cache_folder(name: str) -> Path:
    """`~/.cache/haarkv/NAME`, made if it is not there.

    Raises:
        InputError: it cannot be made.
    """
    folder = Path.home() / ".cache" / "haarkv" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}; check the home folder") from None
    return folder


def send_pypto_output_away() -> Path:
    """Make a folder for PyPTO's `output`, and tell PyPTO of it. Returns it.

    On a device PyPTO writes graphs, C++ and binaries of each compiled program, and reads its binaries again, so a folder lasts
    as long as its process. Those of the last processes are kept, to look into; older ones are deleted.
    The variable is the only way in which PyPTO can be told; it reads it at every compilation.
    """
    parent = cache_folder("pypto_output")
    folder = parent / _unique()
    folder.mkdir()
    for old in _oldest(parent):
        shutil.rmtree(old, ignore_errors=True)
    os.environ["TILE_FWK_OUTPUT_DIR"] = str(folder)
    return folder


def write_log(name: str, text: str) -> Path:
    """A new file with a refusal at full length; of older ones the last few are kept. Returns it."""
    parent = cache_folder("logs")
    file = parent / f"{_unique()}-{name}.log"
    file.write_text(text, encoding="utf-8")
    for old in _oldest(parent):
        with suppress(OSError):
            old.unlink()
    return file


def _unique() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S-%f}-{os.getpid()}"


def _oldest(parent: Path) -> list[Path]:
    """All entries but the newest that are kept, and those whose process still runs."""
    return [path for path in sorted(parent.iterdir())[:-_KEPT] if not _runs(path.name)]


def _runs(name: str) -> bool:
    parts = name.split("-")
    return len(parts) > 3 and Path("/proc", parts[3].removesuffix(".log")).exists()
