"""Keeps PyPTO from writing a program's graph as JSON, which nobody reads here.

PyPTO 0.2.0 writes `program.json`, megabytes, whenever it has traced a program, and no option turns that off: 0.9 of the 1.7
seconds of CPU time that a decode layer of the model that ships takes in the interpreter. A library of one function stands in
front of PyPTO's own: the loader takes the first function of a name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.folders import cache_folder

_SOURCE = "void _ZN3npu8tile_fwk7Program12DumpJsonFileERKSsPNS0_8FunctionE(void) {}"
"""`npu::tile_fwk::Program::DumpJsonFile(std::string const &, Function *)`, with the strings of GCC's old ABI."""


def load() -> None:
    """Stand in front of PyPTO's function; only before PyPTO is imported. Where the library cannot be made, graphs are written
    as before: slower, and otherwise the same."""
    with suppress(OSError, subprocess.CalledProcessError, InputError):
        ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL)


def _library() -> Path:
    """The library, compiled once, in the user's cache folder."""
    library = cache_folder("pypto_quiet") / f"{hashlib.sha256(_SOURCE.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        half = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-x", "c", "-shared", "-fPIC", "-O1", "-", "-o", str(half)]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
        half.replace(library)
    return library
