"""The user's cache folder: PyPTO's output, and log files of the errors of PyPTO, CANN and the driver, each one line here."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.versions import find_installation, newer_note, unpublished_reason

_RECENT_FOLDERS = 5
_LONGEST = 160


def cache_folder(name: str) -> Path:
    """`~/.cache/haarkv/NAME`, made if missing; an InputError where that fails."""
    folder = Path.home() / ".cache" / "haarkv" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}; check the home folder") from None
    return folder


def send_pypto_output_away() -> Path:
    """Make PyPTO's output folder, by the variable that it reads at every compilation.

    PyPTO reads its binaries again, so the folder lasts as long as this process. A few older ones are kept to look into.
    """
    parent = cache_folder("pypto_output")
    folder = parent / _unique()
    folder.mkdir()
    for old in _oldest(parent):
        shutil.rmtree(old, ignore_errors=True)
    os.environ["TILE_FWK_OUTPUT_DIR"] = str(folder)
    return folder


def write_log(name: str, text: str) -> Path:
    """A new log file; a few older ones are kept."""
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
    """All but the newest entries and those whose process still runs."""
    return [path for path in sorted(parent.iterdir())[:-_RECENT_FOLDERS] if not _runs(path.name)]


def _runs(name: str) -> bool:
    parts = name.split("-")
    return len(parts) > 3 and Path("/proc", parts[3].removesuffix(".log")).exists()


class DeviceError(InputError):
    """A compiler, runtime or driver failed; the message names the log file."""


@contextmanager
def in_one_line(what: str, name: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turn exceptions of these kinds, but InputError, into a DeviceError of one line.

    Args:
        what: the line's beginning: `compiling layer_decode for npu:0`.
        name: of the log file.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise DeviceError(refusal(what, name, str(error) or type(error).__name__, traceback.format_exc())) from None


def refusal(what: str, name: str, message: str, everything: str) -> str:
    """One line: what failed, the message's first line, unpublished versions, and the log file, which gets `everything`."""
    installation = find_installation()
    advice = (unpublished_reason(installation) or newer_note(installation)) if installation.torch_npu else None
    reason = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    line = f"{what}: {reason if len(reason) <= _LONGEST else reason[: _LONGEST - 1] + '…'}"
    if advice:
        line += f" ({advice})"
    try:
        file = write_log(name, f"{line}\n\n{installation}\n\n{everything}\n")
    except (OSError, InputError):  # A home folder that takes no file hides nothing of the line.
        return line
    return f"{line}; all of it is in {file}"
