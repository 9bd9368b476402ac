"""Result files and folders, checked before the work begins and written whole or not at all.

An unfinished result lies in the same folder under a temporary name, locked by the process that writes it. So the next writer
recognizes and removes the remains of a killed process. Temporary folders work in the same way.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json

_SHOWN_NAME = 100
"""Characters of a name that are in those of its half-written files, which may not be too long either."""


def check_writable(path: Path) -> None:
    """Raise an InputError if a file cannot be written, and leave no trace."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise InputError(f"{path} cannot be written: it is not a regular file")
    if not target.parent.is_dir():
        raise InputError(f"{path} cannot be written: the folder {target.parent} does not exist")
    try:
        if target.exists():
            target.open("r+b").close()
        with _temporary_folder(target):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder. Its content is moved to `path` at the end, or deleted after an error.

    Raises:
        InputError: the system refuses; an old file stays.
    """
    target = path.resolve()
    try:
        with _temporary_folder(target) as half:
            yield half / "content"
            (half / "content").replace(target)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step, text as UTF-8; errors as of `whole_file`."""
    with whole_file(path) as half:
        half.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_folder(path: Path, *, replaces: str | None = None) -> Iterator[Path]:
    """Yield a folder that is moved to `path` at the end, or dropped after an error.

    Args:
        path: must not exist.
        replaces: except a folder that holds a JSON file of this name, whose `files` names all others there.
    Raises:
        InputError: `path` exists, its parent is not writable, or a write fails. An old folder stays.
    """
    target = path.absolute()
    check_folder(path, replaces=replaces)
    try:
        with _temporary_folder(target) as half:
            yield half
            if target.exists():
                check_folder(path, replaces=replaces)  # it may have changed meanwhile
                _replace_folder(half, target)
            else:
                half.rename(target)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None


def check_folder(path: Path, *, replaces: str | None = None) -> None:
    """Check that `whole_folder` can begin; raises as it does."""
    target = path.absolute()
    if target.exists() or target.is_symlink():
        if replaces is None:
            raise InputError(f"{path} exists; name a folder that does not")
        if not (target / replaces).is_file() or target.is_symlink():
            raise InputError(f"{path} exists and holds no {replaces}; only a folder that this command wrote can be replaced")
        about = read_json(target / replaces)
        files = about.get("files") if isinstance(about, dict) else None
        if not isinstance(files, list):
            raise InputError(f"{path} cannot be replaced: its {replaces} does not list its files; remove it yourself")
        for entry in sorted(target.iterdir()):
            if entry.name not in (replaces, *files) or (entry.is_dir() and not entry.is_symlink()):
                raise InputError(f"{path} cannot be replaced: its {replaces} does not list {entry.name}; move that elsewhere")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise InputError(f"{path}: its parent is not a folder that can be written to")


# -- What is half-written --------------------------------------------------------------------------------------------------


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A new locked folder beside the target, removed at the end if it is still there."""
    half = target.with_name(f".{target.name[:_SHOWN_NAME]}.{os.getpid()}.tmp")  # in the same folder: renaming is one step
    with _alone_in(target.parent):
        _clear(target)
        half.mkdir()
        lock = lock_alone(half)
    try:
        yield half
    finally:
        _remove(half)
        if lock is not None:
            os.close(lock)


def _clear(target: Path) -> None:
    """Remove what killed processes left beside a target; put back an old folder that one had moved away."""
    name = re.compile(rf"\.{re.escape(target.name[:_SHOWN_NAME])}\.\d+\.(tmp|old)")
    for left in [path for path in target.parent.iterdir() if name.fullmatch(path.name)]:
        if (lock := lock_alone(left)) is None:  # a living process has locked it
            continue
        if left.suffix == ".old" and not target.exists() and len(target.name) <= _SHOWN_NAME:
            left.rename(target)
        else:
            _remove(left)
        os.close(lock)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder while a new entry in it is not locked yet."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace_folder(new: Path, target: Path) -> None:
    """Move a folder to the place of another, which has the name `.old` meanwhile: `_clear` puts that back."""
    old = new.with_suffix(".old")
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    _remove(old)


def lock_alone(path: Path) -> int | None:
    """A descriptor that locks a file or folder until it is closed; None if another process has locked it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
