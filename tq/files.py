"""Result files and folders: checked before the work begins, then written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

import click

from haarkv.tq_ops.errors import InputError


def check_outputs(out_file: Path, resume_file: Path | None) -> None:
    """Refuse, before any work, to write a result and its resume file where that cannot be.

    Raises:
        click.UsageError: both are one file.
        InputError: as `check_writable`.
    """
    if resume_file is not None and resume_file.resolve() == out_file.resolve():
        raise click.UsageError("--out and --resume name the same file")
    for file in (out_file, resume_file):
        if file is not None:
            check_writable(file)


def check_writable(path: Path) -> None:
    """Check that a file can be written, and leave no trace.

    Raises:
        InputError: its folder does not exist or takes no files, or the path is not a regular file.
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step, text as UTF-8: a reader finds the old file or the new one, never a part.

    Raises:
        InputError: the system refuses; the old file, if any, is as it was.
    """
    target = path.resolve()
    try:
        _beside(target).write_bytes(content.encode() if isinstance(content, str) else content)
        _beside(target).replace(target)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            _beside(target).unlink()


def _beside(target: Path) -> Path:
    """A temporary name in the same folder, so that renaming it is one step."""
    return target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")


@contextmanager
def whole_folder(path: Path, *, replaces: str | None = None) -> Iterator[Path]:
    """Fill a folder in one step: everything written to the folder that this yields appears at `path` at the end, or nothing.

    Args:
        path: must not exist.
        replaces: a folder that holds a file of this name may be replaced.
    Raises:
        InputError: `path` exists, its parent takes no folders, or a write fails (a full disk, say). Nothing of the new folder
            is left, and an old folder is as it was.
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
    """Check that `whole_folder` can begin.

    Raises:
        InputError: as there.
    """
    target = path.absolute()
    if target.exists() or target.is_symlink():
        if replaces is None:
            raise InputError(f"{path} exists; name a folder that does not")
        if not (target / replaces).is_file():
            raise InputError(f"{path} exists and holds no {replaces}; only a folder that this command wrote can be replaced")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise InputError(f"{path}: its parent is not a folder that can be written to")
