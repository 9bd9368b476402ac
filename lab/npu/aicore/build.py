"""Compiles the leaves of a program into one library, whose parts are kept by content."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from lab.npu.aicore.leaf import Leaf, distinct
from lab.npu.aicore.toolchain import CACHE, CSRC, KINDS, PRELUDE, CompileError, Toolchain, digest, run_compiler

# Leaves of one source share the code of their tile operations, which takes most of the time; more of them than this in one
# would leave a core idle.
_TOGETHER = 8


def compile_leaves(toolchain: Toolchain, leaves: Iterable[Leaf], on_done: Callable[[int, int], None] | None = None) -> Path:
    """The library of the leaves, each under its symbol; only what is new is compiled.

    Args:
        on_done: called with the number of sources that are compiled, and of all.
    Raises:
        CompileError: the compiler refused a leaf; the message names it.
    """
    parts = [*_parts(distinct(leaves).values()), ("aiv", [])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda kind: _prelude(toolchain, kind), KINDS))
        objects = []
        for done, object_file in enumerate(pool.map(lambda part: _object(toolchain, *part), parts), 1):
            objects.append(object_file)
            if on_done:
                on_done(done, len(parts))
    library = CACHE / "libraries" / f"{digest(*(o.name for o in objects))}.so"
    if not library.exists():
        _make(library, lambda half: [*toolchain.command("aiv"), "-shared", *map(str, objects), "-o", half])
    return library


def check_leaves(toolchain: Toolchain, leaves: Iterable[Leaf]) -> dict[str, str]:
    """Type-check leaves without making code. Returns symbol -> the compiler's complaint, of those that it refused."""
    unique_leaves = list(distinct(leaves).values())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda kind: _prelude(toolchain, kind), KINDS))
        complaints = list(pool.map(lambda leaf: _complaint(toolchain, leaf), unique_leaves))
    return {leaf.symbol: text for leaf, text in zip(unique_leaves, complaints, strict=True) if text}


def load(library: Path) -> ctypes.CDLL:
    """The library in this process."""
    return ctypes.CDLL(str(library))


def _parts(leaves: Iterable[Leaf]) -> list[tuple[str, list[Leaf]]]:
    """Leaves that are compiled together: of one scope and kind, at most `_TOGETHER`, the longest parts first."""

    def place(leaf: Leaf) -> tuple[str, str]:
        return leaf.kind, leaf.scope

    parts: list[tuple[str, list[Leaf]]] = []
    for (kind, _), group in groupby(sorted(leaves, key=lambda leaf: (place(leaf), leaf.symbol)), key=place):
        members = list(group)
        parts.extend((kind, members[i : i + _TOGETHER]) for i in range(0, len(members), _TOGETHER))
    return sorted(parts, key=lambda part: -sum(len(leaf.text) for leaf in part[1]))


def _source(leaves: Sequence[Leaf]) -> str:
    return "".join(f'#line 1 "{leaf.symbol}"\n{leaf.text.replace("LEAF", leaf.symbol, 1)}\n' for leaf in leaves)


def _object(toolchain: Toolchain, kind: str, leaves: list[Leaf]) -> Path:
    source = _source(leaves) if leaves else (CSRC / "machine.cpp").read_text(encoding="utf-8")
    target = CACHE / "objects" / f"{digest(toolchain.key(kind), source)}.o"
    if target.exists():
        return target
    prelude = ["-include-pch", str(_prelude(toolchain, kind))]
    source_file = target.with_suffix(f".{os.getpid()}.cpp")
    source_file.parent.mkdir(parents=True, exist_ok=True)
    source_file.write_text(source, encoding="utf-8")
    try:
        _make(target, lambda half: [*toolchain.command(kind), *prelude, "-c", str(source_file), "-o", half])
    except CompileError as error:
        message = str(error)
        for leaf in leaves:
            message = message.replace(leaf.symbol, f"{leaf.symbol} ({leaf.file})")
        raise CompileError(message) from None
    finally:
        source_file.unlink(missing_ok=True)
    return target


def _prelude(toolchain: Toolchain, kind: str) -> Path:
    target = CACHE / "preludes" / f"{toolchain.key(kind)}.pch"
    if not target.exists():
        _make(target, lambda half: [*toolchain.command(kind), "-x", "c++-header", str(CSRC / PRELUDE), "-o", half])
    return target


def _complaint(toolchain: Toolchain, leaf: Leaf) -> str:
    source_file = CACHE / "checks" / f"{digest(toolchain.key(leaf.kind), leaf.symbol)}.{os.getpid()}.cpp"
    ok_file = source_file.with_name(f"{digest(toolchain.key(leaf.kind), leaf.symbol)}.ok")
    if ok_file.exists():
        return ""
    source_file.parent.mkdir(parents=True, exist_ok=True)
    source_file.write_text(_source([leaf]), encoding="utf-8")
    prelude = ["-include-pch", str(_prelude(toolchain, leaf.kind))]
    try:
        run_compiler([*toolchain.command(leaf.kind), *prelude, "-fsyntax-only", str(source_file)])
    except CompileError as error:
        return str(error)
    finally:
        source_file.unlink(missing_ok=True)
    ok_file.touch()
    return ""


def _make(target: Path, command: Callable[[str], list[str]]) -> None:
    """Make a file whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{target.name}.{os.getpid()}.half")
    try:
        run_compiler(command(str(half)))
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)
