"""Compile the kernels with the system's C++ compiler, as installing the package does: `python -m haarkv.tq_ops.cpu.build`.

Each instruction set (`isa`) is one translation unit with flags of its own; the library picks one when it runs. Only a
compiler is needed, no headers of torch or Python: the library has a plain C interface. This file imports nothing of the
project, so that it can run before the project is installed.

With `--werror` a compiler warning is an error, for whoever changes the sources. `--compiler aarch64-linux-gnu-g++ --out FILE`
compiles for another machine.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "_kernels.so"
_BUILD_PREFIX = ".build-"
"""How folders begin that hold a library as it is made; git, wheels and sdists leave them out by this name."""

# No -ffast-math: it would treat NaN as a number and flush denormals to zero in the whole process.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_X86_ISAS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": _VNNI,
    "avx512bf16": _BF16,
    "amx": (*_BF16, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}


class BuildError(Exception):
    """The kernels could not be compiled; the message says why in one line."""


def compiler() -> str | None:
    """The system's C++ compiler, or None."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@cache
def units(cxx: str | None) -> dict[str, tuple[str, ...]]:
    """Translation units by name, each with the flags that only it gets, for the machine that a compiler compiles for.

    An instruction set that the compiler is too old for is left out (AMX needs GCC 11 or Clang 12).
    """
    x86 = _for_x86(cxx)
    isas = {isa: flags for isa, flags in _X86_ISAS.items() if x86 and _accepts_flags(cxx, flags)}
    # Where every machine has fused operations, a compiler that may use them does so in one copy of a loop and not in another,
    # and a number's bits would follow how its prompt was cut. On x86 only units with flags of their own have them.
    shared: tuple[str, ...] = () if x86 else ("-ffp-contract=off",)
    plain = ("block_rows", "driver", "elementwise", "gated_delta", "layers", "linear", "paged_attention", "pool", "portable")
    macros = tuple(f"-DHAARKV_{isa.upper()}" for isa in isas)
    return {**dict.fromkeys(plain, shared), "isa": (*shared, *macros), **isas}


def _for_x86(cxx: str | None) -> bool:
    """Whether a compiler compiles for x86-64; without one, whether this machine is one."""
    machine = platform.machine()
    if cxx is not None:
        machine = subprocess.run([cxx, "-dumpmachine"], capture_output=True, text=True, check=False).stdout or machine
    return machine.lower().startswith(("x86_64", "amd64"))


def _accepts_flags(cxx: str | None, flags: Sequence[str]) -> bool:
    """Whether the compiler knows these flags; yes if there is none, so that its absence is said elsewhere."""
    command = [cxx or "", *flags, "-fsyntax-only", "-x", "c++", "-"]
    return cxx is None or not subprocess.run(command, input=b"", capture_output=True, check=False).returncode


def is_fresh(target: Path = LIBRARY) -> bool:
    """Whether the library is newer than all of its sources."""
    sources = (Path(__file__), *SOURCES.iterdir())
    return target.exists() and target.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def build(target: Path = LIBRARY, *, werror: bool = False, by: str | None = None, alone: bool = False) -> Path:
    """Compile and link the library, whole or not at all. Of several builds in one folder, each waits for the one before.

    Args:
        werror: let a compiler warning fail the build.
        by: the compiler, the system's unless given.
        alone: link the compiler's libstdc++ into the library, for machines that have an older one.
    Raises:
        BuildError: no compiler, or it fails.
    """
    cxx = compiler() if by is None else shutil.which(by)
    if cxx is None:
        raise BuildError("no C++ compiler was found; install g++ or clang++" if by is None else f"there is no compiler {by}")
    common = (*FLAGS, *(("-Werror",) if werror else ()))
    with _build_folder(target.parent) as folder:
        objects = [folder / f"{name}.o" for name in units(cxx)]
        _run_all(
            [cxx, *common, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(object_file)]
            for (name, flags), object_file in zip(units(cxx).items(), objects, strict=True)
        )
        library = folder / target.name
        # Debian 12's libstdc++ asks for glibc 2.36 to draw random numbers: what nobody calls is left out. Linked in, libgcc
        # would ask for 2.35; torch needs the machine's own anyway.
        static_flags = ("-static-libstdc++", "-Wl,--exclude-libs,ALL,--gc-sections") if alone else ()
        _run_all([[cxx, "-shared", "-pthread", *static_flags, *map(str, objects), "-ldl", "-o", str(library)]])
        library.replace(target)
    return target


@contextmanager
def _build_folder(parent: Path) -> Iterator[Path]:
    """A folder beside the library, so that renaming the library is one step; and no other: killed builds left those there."""
    lock = os.open(parent, os.O_RDONLY | os.O_CLOEXEC)  # closed, and with it free again, whenever this process ends
    try:
        with suppress(OSError):  # a file system without locks: nobody knows there who is still at work
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in parent.glob(f"{_BUILD_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=_BUILD_PREFIX) as folder:
            yield Path(folder)
    finally:
        os.close(lock)


def _run_all(commands: Iterable[Sequence[str]]) -> None:
    """Run commands side by side and wait for all of them."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            first = next((line for line in output.splitlines() if "error" in line), f"exit code {process.returncode}")
            raise BuildError(f"the C++ compiler failed: {first}")


def main() -> int:
    """The command; exit code 2 where the kernels cannot be compiled."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--werror", action="store_true", help="take compiler warnings for errors")
    parser.add_argument("--compiler", help="the C++ compiler, for this machine or another")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="the library")
    args = parser.parse_args()
    try:
        print(build(args.out, werror=args.werror, by=args.compiler))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
