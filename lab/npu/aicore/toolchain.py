"""What compiles emitted kernel functions for a host: a clang, pto-isa's headers, and PyPTO's own, made fit for it."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from haarkv.tq_ops.errors import InputError

CSRC = Path(__file__).parent / "csrc"
CACHE = Path.home() / ".cache/haarkv/aicore"
PRELUDE = "prelude.h"
"""What every source is compiled with."""

_COMPILERS = ("clang++-19", "clang++")
_OLDEST = 19
KINDS = {
    "aiv": ("-D__AIV__", "-D__DAV_C220_VEC__", "-D__DAV_VEC__", "-O0"),
    "aic": ("-D__AIC__", "-D__DAV_C220_CUBE__", "-D__DAV_CUBE__", "-O1"),
}
"""Kind of core -> flags: vector, cube.

Vector functions are long and run a moment: optimized, they would take four times as long to compile. Products take the time
of a run.
"""

_PRELUDE_INCLUDES = {"aiv": ("stdfloat",), "aic": ("stdfloat", "cube.h")}  # by the preludes, of our own

_FLAGS = (
    # Each result is rounded where the type says, and no product is merged with a sum: the same bits on every host.
    "-std=c++23", "-ffp-contract=off", "-fPIC", "-w",
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-D__CPU_SIM", "-DSUPPORT_TILE_TENSOR", "-D__DAV_V220", "-DMEMORY_BASE", "-D__STDCPP_BFLOAT16_T__=1",
)  # fmt: skip
# Conversions of FP16 as instructions instead of calls.
_MACHINE_FLAGS = {"x86_64": ("-march=x86-64-v3",)}

_ATTRIBUTE = re.compile(r"\[(?:host, ?)?aicore\]")
# Headers of other front ends and of distribution: they want intrinsics that a host has not, and no kernel of ours uses them.
_UNUSED = re.compile(r'^#include "(?:mte|vector|cube|fixpipe|(?:dynamic|distributed|conv)/\w+)\.h"\n', re.MULTILINE)
_FIRST = '#include "aicore_runtime.h"\n'


def host_header(name: str, text: str) -> str:
    """A header of PyPTO as a host's compiler takes it: without the attributes of the device and what needs its intrinsics.

    Args:
        name: of the file.
    """
    text = _ATTRIBUTE.sub("", text)
    if name == "TileOpImpl.h":
        text = _UNUSED.sub("", text).replace(_FIRST, '#include "tileop_common.h"\n' + _FIRST)
    return text


@dataclass(frozen=True)
class Toolchain:
    """A compiler with everything it includes.

    Attributes:
        compiler: the command, `clang++` or another name of it.
        pto_isa: the folder in which `pto/` lies.
    """

    compiler: tuple[str, ...]
    pto_isa: Path

    @cached_property
    def version(self) -> str:
        """The first line of what the compiler says of itself."""
        return run_compiler([*self.compiler, "--version"]).partition("\n")[0]

    @cached_property
    def headers(self) -> Path:
        """PyPTO's headers, made fit; written once."""
        source = pypto_headers()
        texts = {p.relative_to(source): host_header(p.name, p.read_text("utf-8")) for p in sorted(source.rglob("*.h"))}
        key = digest(*(f"{path}\0{text}" for path, text in texts.items()))
        folder = CACHE / "headers" / key
        if not folder.exists():
            with half_folder(folder) as half:
                for path, text in texts.items():
                    (half / path).parent.mkdir(parents=True, exist_ok=True)
                    (half / path).write_text(text, encoding="utf-8")
        return folder

    def key(self, kind: str) -> str:
        """Of everything but the kernel functions that an object file of a kind of core depends on."""
        ours = [(CSRC / name).read_text("utf-8") for name in (PRELUDE, *_PRELUDE_INCLUDES[kind])]
        return digest(self.version, str(self.headers), self._theirs, shlex.join(self.command(kind)), *ours)

    @cached_property
    def _theirs(self) -> str:
        return digest(*(str((p.stat().st_mtime_ns, p.stat().st_size, p)) for p in sorted(self.pto_isa.rglob("*.h*"))))

    def command(self, kind: str) -> list[str]:
        """The compile line for a kind of core, without the prelude, the source and what is to be made."""
        folders = (CSRC, self.pto_isa, *(self.headers / name for name in ("", "tilefwk", "tileop", "tileop/arch32")))
        return [*self.compiler, *_flags(), *KINDS[kind], *(f"-I{folder}" for folder in folders)]


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *_MACHINE_FLAGS.get(platform.machine(), ()), "-stdlib=libc++")


def find_toolchain(pto_isa: Path, clang: str | None = None) -> Toolchain:
    """The compiler and the headers, checked.

    Args:
        pto_isa: pto-isa's folder, or the folder `include` in it.
        clang: the compiler's command; None looks for one on the path.
    Raises:
        InputError: PyPTO, the compiler or pto-isa's headers are missing or too old.
    """
    include = next((f for f in (pto_isa / "include", pto_isa) if (f / "pto/pto-inst.hpp").is_file()), None)
    if include is None:
        raise InputError(f"{pto_isa} holds no include/pto/pto-inst.hpp; name the folder of a checkout of pto-isa")
    pypto_headers()
    compiler = tuple(shlex.split(clang)) if clang else _any_compiler()
    if shutil.which(compiler[0]) is None:
        raise InputError(f"{compiler[0]} is not found; name a clang of version {_OLDEST} or newer")
    toolchain = Toolchain(compiler, include.resolve())
    match = re.search(r"clang version (\d+)", toolchain.version)
    if not match or int(match[1]) < _OLDEST:
        raise InputError(f"{shlex.join(compiler)} is {toolchain.version!r}; clang {_OLDEST} or newer is needed")
    return toolchain


def _any_compiler() -> tuple[str, ...]:
    for name in _COMPILERS:
        if shutil.which(name):
            return (name,)
    raise InputError(f"no {' or '.join(_COMPILERS)} on the path; install clang 19 with libc++")


def pypto_headers() -> Path:
    """Where the installed PyPTO keeps the headers of its kernel functions.

    Raises:
        InputError: PyPTO is not installed.
    """
    spec = find_spec("pypto")
    if spec is None or spec.origin is None:
        raise InputError("pypto is not installed; run pip install 'haarkv[npu]'")
    return Path(spec.origin).parent / "lib/include"


class CompileError(InputError):
    """The compiler refused a source; the message is its own."""


def run_compiler(command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        CompileError: it failed; the message is what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[:4000]}")
    return done.stdout


def digest(*parts: str) -> str:
    """Sixteen hexadecimal digits that stand for the parts."""
    return hashlib.sha256("\1".join(parts).encode()).hexdigest()[:16]


@contextmanager
def half_folder(place: Path) -> Iterator[Path]:
    """A folder to fill beside its place, moved there when it is whole; what another process put there first stays."""
    place.parent.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(dir=place.parent, prefix=".half-"))
    try:
        yield half
        with suppress(OSError):
            half.replace(place)
    finally:
        shutil.rmtree(half, ignore_errors=True)
