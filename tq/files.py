"""Result files and folders: refused before the work begins if they cannot be written, then written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

from haarkv.tq_ops.errors import InputError


def check_writable(path: Path) -> None:
    """See that a file can be written, without leaving a trace.

    Raises:
        InputError: its folder does not exist or does not take files, or something that is no file stands there.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise InputError(f"{path} cannot be written: it is not a regular file")
    if not target.parent.is_dir():
        raise InputError(f"{path} cannot be written: the folder {target.parent} does not exist")
    try:
        if target.exists():
            target.open("r+b").close()
        _beside(target).open("xb").close()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            _beside(target).unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file in one step: whoever looks finds the old one or the new one, whole.

    Raises:
        InputError: the system refuses; the old file, if any, is as it was.
    """
    target = path.resolve()
    try:
        _beside(target).write_text(text, encoding="utf-8", newline="")
        _beside(target).replace(target)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            _beside(target).unlink()


def _beside(target: Path) -> Path:
    """A name of this process's own in the same folder, from where a rename is one step."""
    return target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")


@contextmanager
def whole_folder(path: Path, *, replaces: str | None = None) -> Iterator[Path]:
    """Fill a folder in one step: what is written to the folder given stands at `path` at the end, or nothing does.

    Args:
        path: must not exist.
        replaces: unless it is a folder that holds a file of this name, and so one of those that may be replaced.
    Raises:
        InputError: something stands there, its parent does not take folders, or the system refuses to write, for want of
            room say; what was written is gone, and an old folder as it was.
    """
    target = path.absolute()
    check_folder(path, replaces=replaces)
    half, old = _beside(target), _beside(target).with_suffix(".old")
    try:
        half.mkdir()
        yield half
        if target.exists():
            target.rename(old)
        half.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        for left in (half, old):
            rmtree(left, ignore_errors=True)


def check_folder(path: Path, *, replaces: str | None = None) -> None:
    """See that `whole_folder` can begin.

    Raises:
        InputError: as there.
    """
    target = path.absolute()
    if target.exists() or target.is_symlink():
        if replaces is None:
            raise InputError(f"{path} exists; name a folder that does not")
        if not (target / replaces).is_file():
            raise InputError(f"{path} exists and holds no {replaces}; only what was written by this command is replaced")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise InputError(f"{path}: its parent is not a folder that can be written to")
