"""What PyPTO, CANN or the driver refuses, in one line; all that they said goes to a file."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.folders import write_log
from haarkv.tq_ops.npu.versions import installed, unpublished

_LONGEST = 160


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
    found = installed()
    advice = unpublished(found) if found.torch_npu else None
    said = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    line = f"{what}: {said if len(said) <= _LONGEST else said[: _LONGEST - 1] + '…'}"
    if advice:
        line += f" ({advice})"
    try:
        file = write_log(name, f"{line}\n\n{found}\n\n{everything}\n")
    except (OSError, InputError):  # A home folder that takes no file hides nothing of the line.
        return line
    return f"{line}; all of it is in {file}"
