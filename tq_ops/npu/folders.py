"""The user's cache folder: what PyPTO writes, kept out of the folder in which a command runs, and refusals at full length.

What PyPTO, CANN or the driver refuses becomes one line; all that they said goes to a file.
"""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.versions import find_installation, unpublished_reason

_RECENT_FOLDERS = 5
_LONGEST = 160


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
    return [path for path in sorted(parent.iterdir())[:-_RECENT_FOLDERS] if not _runs(path.name)]


def _runs(name: str) -> bool:
    parts = name.split("-")
    return len(parts) > 3 and Path("/proc", parts[3].removesuffix(".log")).exists()


class DeviceError(InputError):
    """A compiler, runtime or driver refused; the message names the file with all that it said."""


@contextmanager
def in_one_line(what: str, name: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turn an exception of others' code into an error of one line that names a log file.

    Args:
        what: failed, as the line begins: `compiling layer_decode for npu:0`.
        name: of the log file.
        kinds: of exceptions; InputError always passes.
    Raises:
        DeviceError: one of those was raised.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise DeviceError(refusal(what, name, str(error) or type(error).__name__, traceback.format_exc())) from None


def refusal(what: str, name: str, message: str, everything: str) -> str:
    """A refusal in one line: what failed, the first line of the message, versions that nobody published, the log file.

    Args:
        what, name: as `in_one_line`.
        message: of the compiler or driver, of any length.
        everything: what the log file gets beside the versions.
    """
    installation = find_installation()
    advice = unpublished_reason(installation) if installation.torch_npu else None
    reason = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    line = f"{what}: {reason if len(reason) <= _LONGEST else reason[: _LONGEST - 1] + '…'}"
    if advice:
        line += f" ({advice})"
    try:
        file = write_log(name, f"{line}\n\n{installation}\n\n{everything}\n")
    except (OSError, InputError):  # A home folder that takes no file hides nothing of the line.
        return line
    return f"{line}; all of it is in {file}"
