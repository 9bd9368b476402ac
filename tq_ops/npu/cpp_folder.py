"""What lies beside emitted sources in a folder: a Makefile with PyPTO's own compile lines, and a page that explains both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from haarkv.tq_ops.errors import InputError

KERNELS = "kernel_aicore/"
"""Where the sources of a program keep its kernel functions; they include a header from `kernel_aicpu/`."""

_COMMAND = re.compile(r"^// (bisheng .*)$", re.MULTILINE)
_OWN_INCLUDE = re.compile(r"-I\S*/lib/include(\S*)")
_KINDS = {"aiv": "vector", "aic": "cube"}


def compile_flags(source: str) -> str:
    """The flags of the compile line that PyPTO leaves as the last comment of a kernel function.

    The folders of headers are replaced by `$(PYPTO_INCLUDE)` and `$(CANN_INCLUDE)`; the names of the source and of its
    object are left out.

    Raises:
        InputError: there is no such comment, or a path remains in it.
    """
    commands = _COMMAND.findall(source)
    if not commands:
        raise InputError("PyPTO left no compile line in a kernel function; this pypto is not supported")
    words = _OWN_INCLUDE.sub(r"-I$(PYPTO_INCLUDE)\1", commands[-1]).split()[1:]
    words = words[: words.index("-o")]
    words = ["-I$(CANN_INCLUDE)" if word.startswith("-I/") else word for word in words]
    if unknown := [word for word in words if "/" in word and not word.startswith("-I$(")]:
        raise InputError(f"PyPTO's compile line names a folder of this machine: {' '.join(unknown)}")
    return " ".join(words)


def build_files(programs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The Makefile and the page for a folder of emitted sources.

    Args:
        programs: name of a program -> path of a source in the program's folder -> its text.
    Returns:
        file name -> text.
    Raises:
        InputError: kernel functions of one kind are compiled in different ways.
    """
    flags: dict[str, set[str]] = {kind: set() for kind in _KINDS}
    for sources in programs.values():
        for path, text in sources.items():
            if path.startswith(KERNELS):
                flags[path.removesuffix(".cpp").rpartition("_")[2]].add(compile_flags(text))
    if mixed := [kind for kind, found in flags.items() if len(found) > 1]:
        raise InputError(f"PyPTO compiles kernel functions of one kind in different ways: {', '.join(mixed)}")
    lines = "".join(f"{kind.upper()} := {found.pop()}\n" for kind, found in flags.items() if found)
    return {"Makefile": _MAKEFILE.format(flags=lines), "README.md": _PAGE.format(programs=_listing(programs))}


def written(folder: Path, programs: Mapping[str, Mapping[str, str]]) -> None:
    """Write the sources of some programs into an empty folder, with the Makefile and the page; arguments and errors as
    `build_files`."""
    files = build_files(programs)
    for name, sources in programs.items():
        files.update({f"{name}/{path}": text for path, text in sources.items()})
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def _listing(programs: Mapping[str, Mapping[str, str]]) -> str:
    counts = {name: sum(path.startswith(KERNELS) for path in sources) for name, sources in programs.items()}
    return "\n".join(f"- `{name}/`: {count} kernel functions" for name, count in counts.items())


_MAKEFILE = """\
# Compiles the kernel functions beside this file as PyPTO would on a machine with an NPU.
BISHENG := bisheng
# PyPTO's headers, and those of CANN, with pto/ among them.
PYTHON := python3
ifndef PYPTO_INCLUDE
FIND := from importlib.util import find_spec; print(find_spec("pypto").submodule_search_locations[0])
PYPTO_INCLUDE := $(shell $(PYTHON) -c '$(FIND)')/lib/include
endif
CANN := $(or $(ASCEND_HOME_PATH),/usr/local/Ascend/cann)
CANN_INCLUDE := $(CANN)/include

# From the last comment of each source: vector functions (aiv), cube functions (aic).
{flags}
SOURCES := $(wildcard */kernel_aicore/*.cpp)
CONTROL := $(wildcard */kernel_aicpu/*.cpp)

.PHONY: all control clean

all: $(SOURCES:.cpp=.o)

%_aiv.o: %_aiv.cpp
	$(BISHENG) $(AIV) -o $@ $<

%_aic.o: %_aic.cpp
	$(BISHENG) $(AIC) -o $@ $<

# The control flow is plain C++: its check needs neither CANN nor an NPU.
control: $(CONTROL:.cpp=.checked)

%.checked: %.cpp
	$(CXX) -std=gnu++17 -fsyntax-only -I$(PYPTO_INCLUDE) $<

clean:
	$(RM) $(SOURCES:.cpp=.o)
"""

_PAGE = """\
# C++ for Ascend NPU, as PyPTO emits it

{programs}

Each program has two folders. `kernel_aicore/` holds its kernel functions, one a file: `_aiv` runs on vector cores, `_aic` on
cube cores. `kernel_aicpu/` holds the control flow, which starts them as tasks, and `expression_0.h`, which every kernel
function includes.

| command | needs | does |
|---|---|---|
| `make CANN=DIR` | CANN, with `bisheng` on the path; PyPTO | compiles every kernel function |
| `make control` | a C++ compiler; PyPTO | checks the control flow; it is no kernel and needs no CANN |

The flags in `Makefile` are PyPTO's own: each source ends with its compile line as a comment. Only the folders of headers
became variables. Name another interpreter with `PYTHON=`, or the folder of PyPTO's headers with `PYPTO_INCLUDE=`.

PyPTO compiles and links these files itself on the first call of a program. You need the folder to read, check or measure them.
"""
