"""Files from elsewhere: checked to be regular and not too large before they are read."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from haarkv.tq_ops.errors import InputError

MARK = "\ufeff".encode()
"""What some editors put before a text in UTF-8. It is no part of it, and most readers refuse it."""
MOST_JSON = 2**24
"""Bytes of a JSON text. Parsed, it may take 25 times as much memory; the longest that models come with have some millions."""


def file_size(path: Path, what: str = "") -> int:
    """Bytes of a regular file; an InputError of others, for pipes and devices may never end.

    Args:
        what: stands before the path in messages, such as "the plan ".
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise InputError(f"{what}{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{what}{path} cannot be read: it is not a regular file")
    return status.st_size


def read_file(path: Path, most: int = MOST_JSON) -> bytes:
    """The bytes of a regular file of at most `most` bytes, else an InputError."""
    if (size := file_size(path)) > most:
        raise InputError(f"{path} cannot be read: it has {size:,} bytes, and this kind of file at most {most:,}")
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def parse_json(content: bytes | str) -> Any:
    """Parse JSON whose strings can be written as UTF-8; a ValueError if it is not, is too long or nested too deeply."""
    if len(content) > MOST_JSON:
        raise ValueError(f"it is longer than {MOST_JSON:,} bytes")
    text = (content.decode() if isinstance(content, bytes) else content).removeprefix(MARK.decode())
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a string in it has half a character (a lone surrogate)") from None
    return value


def read_json(path: Path) -> Any:
    """Parse a JSON file; an InputError as of `read_file`, or if it is no JSON."""
    try:
        return parse_json(read_file(path))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
