"""Keeps PyPTO from writing a program's graph as JSON where nobody reads it.

PyPTO 0.2.0 writes `program.json`, megabytes, whenever it has traced a program, and no option turns that off: 0.9 of the 1.7
seconds of CPU time that a decode layer of the model that ships takes in the interpreter. A library of one function stands in
front of PyPTO's own: the loader takes the first function of a name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.folders import cache_folder

_WRITES = "_ZN3npu8tile_fwk7Program12DumpJsonFileERKSsPNS0_8FunctionE"
"""`npu::tile_fwk::Program::DumpJsonFile(std::string const &, Function *)`, with the strings of GCC's old ABI."""
_SOURCE = f"""
static void (*own)(void *, const void *, void *);
void write_with(void *function) {{ own = (void (*)(void *, const void *, void *))function; }}
void {_WRITES}(void *program, const void *path, void *function) {{
    if (own) own(program, path, function);
}}
"""
_loaded: list[ctypes.CDLL] = []


def load() -> None:
    """Stand in front of PyPTO's function; only before PyPTO is imported, and once in a process. Where the library cannot be
    made, graphs are written as before: slower, and otherwise the same."""
    with suppress(OSError, subprocess.CalledProcessError, InputError):
        _loaded.append(ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL))


@contextmanager
def graphs_written(pypto: Path, written: bool) -> Iterator[None]:
    """Within it, graphs are written or not; outside they are not.

    Args:
        pypto: its folder, whose library writes them.
    """
    if not _loaded or not written:
        yield
        return
    own = getattr(ctypes.CDLL(str(pypto / "lib/libtile_fwk_interface.so")), _WRITES, None)
    if own is None:  # another version's function: nothing stands in front of it
        yield
        return
    write_with = _loaded[0].write_with
    write_with.argtypes = [ctypes.c_void_p]
    write_with(ctypes.cast(own, ctypes.c_void_p))
    try:
        yield
    finally:
        write_with(None)


def _library() -> Path:
    """The library, compiled once, in the user's cache folder."""
    library = cache_folder("pypto_quiet") / f"{hashlib.sha256(_SOURCE.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        half = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-x", "c", "-shared", "-fPIC", "-O1", "-", "-o", str(half)]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
        half.replace(library)
    return library
