"""Compile the kernels with the system's C++ compiler, as installing the package does: `python -m haarkv.tq_ops.cpu.build`.

Each instruction set (`isa`) has three translation units with flags of its own; the library picks a set when it runs. The
library has a plain C interface: no headers of torch or Python are needed. This file imports nothing of the project, so that it
runs before the project is installed.

`--native` compiles the set that this machine runs and no other. `--werror` makes a compiler warning an error.
`--compiler aarch64-linux-gnu-g++ --out FILE` compiles for another machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "_kernels.so"
INTERFACE = (SOURCES / "kernels.h", SOURCES / "calls.h")
"""The headers that declare the structures of the C interface; Python reads them as well."""

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
_VNNI = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_AMX = (*_BF16, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_SETS = {"portable": (), "avx2": _AVX2, "avx512vnni": _VNNI}
"""Instruction sets that share their sources, with their flags."""
_ADDITIONS = {"integers": _VNNI, "bf16": _BF16, "amx": _AMX}
"""Units that replace some kernels of avx512vnni."""
_OF_A_SET = ("attention", "blocks", "dense")
_SHARED = ("driver", "gated_delta", "layers", "linear", "paged_attention", "pool")


class Unit(NamedTuple):
    """A translation unit: its source in csrc and the flags that only it gets."""

    source: str
    flags: tuple[str, ...]


class BuildError(Exception):
    """The kernels could not be compiled; the message says why in one line."""


def compiler() -> str | None:
    """The system's C++ compiler, or None."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@cache
def units(cxx: str | None, native: bool = False) -> dict[str, Unit]:
    """Translation units by name, for the machine that a compiler compiles for; the longest come early.

    Instruction sets that the compiler is too old for are left out (AMX needs GCC 11 or Clang 12).

    Args:
        native: the best set of this machine alone.
    """
    x86 = _for_x86(cxx)
    flags = {isa: flags for isa, flags in (_SETS | _ADDITIONS).items() if not flags or (x86 and _accepts_flags(cxx, flags))}
    if native:
        machine = _machine_macros(cxx)
        runs = [isa for isa in flags if all(_macro(flag) in machine for flag in flags[isa])]
        best = next(isa for isa in reversed(_SETS) if isa in runs)
        flags = {isa: flags[isa] for isa in runs if isa == best or isa in _ADDITIONS}
    # Where every machine has fused operations, a compiler that may use them does so in one copy of a loop and not in another,
    # and a number's bits would follow how its prompt was cut. On x86 only units with flags of their own have them.
    shared: tuple[str, ...] = () if x86 else ("-ffp-contract=off",)
    of_sets = {
        f"{isa}_{source}": Unit(source, (*(flags[isa] or shared), f"-DHAARKV_SET={isa}"))
        for source in _OF_A_SET for isa in flags if isa in _SETS
    }  # fmt: skip
    additions = {isa: Unit(isa, flags[isa]) for isa in flags if isa in _ADDITIONS}
    macros = (*(f"-DHAARKV_{isa.upper()}" for isa in flags), f"-DHAARKV_INTERFACE={interface_digest()}")
    return additions | of_sets | {name: Unit(name, shared) for name in _SHARED} | {"isa": Unit("isa", (*shared, *macros))}


def interface_digest() -> int:
    """A number that tells headers of the C interface apart."""
    return zlib.crc32(b"".join(header.read_bytes() for header in INTERFACE)) >> 1  # a C int


def _macro(flag: str) -> str:
    """The macro that a compiler defines with a flag: `-mamx-int8` is __AMX_INT8__."""
    return f"__{flag.removeprefix('-m').replace('-', '_').upper()}__"


def _machine_macros(cxx: str | None) -> str:
    """What a compiler defines for this machine's own instructions."""
    command = [cxx or "", "-march=native", "-dM", "-E", "-x", "c++", "-"]
    return "" if cxx is None else subprocess.run(command, input="", capture_output=True, text=True, check=False).stdout


def _for_x86(cxx: str | None) -> bool:
    """Whether a compiler compiles for x86-64; without one, whether this machine is one."""
    machine = platform.machine()
    if cxx is not None:
        machine = subprocess.run([cxx, "-dumpmachine"], capture_output=True, text=True, check=False).stdout or machine
    return machine.lower().startswith(("x86_64", "amd64"))


def _accepts_flags(cxx: str | None, flags: Sequence[str]) -> bool:
    """Whether the compiler knows these flags; yes if there is none."""
    command = [cxx or "", *flags, "-fsyntax-only", "-x", "c++", "-"]
    return cxx is None or not subprocess.run(command, input=b"", capture_output=True, check=False).returncode


def is_fresh(target: Path = LIBRARY) -> bool:
    """Whether the library is newer than all of its sources."""
    sources = (Path(__file__), *SOURCES.iterdir())
    return target.exists() and target.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def build(
    target: Path = LIBRARY, *, werror: bool = False, by: str | None = None, alone: bool = False, native: bool = False
) -> Path:
    """Compile and link the library, whole or not at all.

    Args:
        werror: let a compiler warning fail the build.
        by: the compiler, the system's unless given.
        alone: link the compiler's libstdc++ into the library, for machines that have an older one.
        native: the best instruction set of this machine alone.
    Raises:
        BuildError: no compiler, or it fails.
    """
    cxx = compiler() if by is None else shutil.which(by)
    if cxx is None:
        raise BuildError("no C++ compiler was found; install g++ or clang++" if by is None else f"there is no compiler {by}")
    common = (*FLAGS, *(("-Werror",) if werror else ()))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:  # beside it: renaming is one step
        folder = Path(scratch)
        objects = {name: str(folder / f"{name}.o") for name in units(cxx, native)}
        _run_all(
            [cxx, *common, *unit.flags, "-c", str(SOURCES / f"{unit.source}.cpp"), "-o", objects[name]]
            for name, unit in units(cxx, native).items()
        )
        library = folder / target.name
        # Debian 12's libstdc++ asks for glibc 2.36 to draw random numbers: what is never called is left out. Linked in, libgcc
        # would ask for 2.35; torch needs the machine's own anyway.
        static_flags = ("-static-libstdc++", "-Wl,--exclude-libs,ALL,--gc-sections") if alone else ()
        _run_all([[cxx, "-shared", "-pthread", *static_flags, *objects.values(), "-ldl", "-o", str(library)]])
        library.replace(target)
    return target


def _run_all(commands: Iterable[Sequence[str]]) -> None:
    """Run commands, as many at a time as there are cores, and wait for all of them."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) as pool:
        done = list(pool.map(lambda c: subprocess.run(c, capture_output=True, text=True, check=False), commands))
    for process in done:
        if process.returncode:
            first = next((line for line in process.stderr.splitlines() if "error" in line), f"exit code {process.returncode}")
            raise BuildError(f"the C++ compiler failed: {first}")


def main() -> int:
    """The command; exit code 2 where the kernels cannot be compiled."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--native", action="store_true", help="the best instruction set of this machine alone")
    parser.add_argument("--werror", action="store_true", help="take compiler warnings for errors")
    parser.add_argument("--compiler", help="the C++ compiler, for this machine or another")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="the library")
    args = parser.parse_args()
    try:
        print(build(args.out, werror=args.werror, by=args.compiler, native=args.native))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
