"""Keeps what PyPTO's scheduler logs of its tasks: the only place where their attributes and addresses can be seen."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pypto

_SOURCE = Path(__file__).with_name("record.c")
# A function of PyPTO 0.2.0 that returns the pointers through which it logs.
_LOGGER = "_ZN3npu8tile_fwk11LogFuncInfo8InstanceEv"


def recorded(call: Callable[[], None]) -> str:
    """Call a kernel in the simulator and return the lines of its scheduler, whole.

    Raises:
        RuntimeError: this PyPTO logs in another way, or no C compiler is there.
    """
    own = ctypes.CDLL(str(Path(pypto.__file__).parent / "lib/libtile_fwk_utils.so"))
    if not hasattr(own, _LOGGER):
        raise RuntimeError("this pypto logs in another way than 0.2.0: its schedule cannot be read")
    find = own[_LOGGER]
    find.restype = ctypes.c_void_p
    logger = ctypes.c_void_p(find())
    library = ctypes.CDLL(str(_library()))
    record = Path("schedule.log").absolute()
    if library.record_begin(logger, str(record).encode()):
        raise RuntimeError(f"{record} cannot be written")
    try:
        call()
    finally:
        library.record_end(logger)
    text = record.read_text(encoding="utf-8", errors="replace")
    record.unlink()
    return text


def _library() -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = Path.home() / ".cache/haarkv/pypto_record" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        half = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-O1", str(_SOURCE), "-o", str(half)], check=True)
        half.replace(library)
    return library
