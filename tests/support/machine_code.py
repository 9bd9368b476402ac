"""Machine code of a kernel, read: its hottest loop, what it spills, and cycles that the loop takes at least.

Of an H100 or H200: each of the four schedulers of a processor issues one instruction of a warp a cycle; shared memory and the
first cache serve 128 bytes a cycle.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

SCHEDULERS = 4
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)([^;]*);")
_LABEL = re.compile(r"^(\.L\w*):")
_TARGET = re.compile(r"`\((\.L\w*)\)")
_MEMORY = {"LDS", "STS", "LDSM", "STSM", "LDG", "STG", "LDGSTS", "LD", "ST", "SHFL", "ATOMS", "ATOMG", "RED", "LDL", "STL"}


@dataclass(frozen=True)
class Instruction:
    """One instruction: `LDG`, `.E.128` and what follows, labels before it not counted."""

    op: str
    modifiers: str
    operands: str

    @property
    def wavefronts(self) -> int:
        """Cycles of the memory pipe, if no bank conflicts: 128 bytes each; 0 for what is no memory access."""
        if self.op not in _MEMORY:
            return 0
        if self.op in ("LDSM", "STSM"):
            return int(match[1]) if (match := re.search(r"\.(\d)$", self.modifiers)) else 1
        match = re.search(r"\.(64|128)\b", self.modifiers)
        return int(match[1]) // 32 if match else 1

    @property
    def multiply_adds(self) -> int:
        """Of a tensor-core instruction: of a warp, or, as HGMMA, of a group of four."""
        if self.op == "HMMA":
            match = re.search(r"\.(16)(8)(16|8|4)\b", self.modifiers)
        else:
            match = re.search(r"\.(\d+)x(\d+)x(\d+)", self.modifiers) if self.op in ("HGMMA", "UTCHMMA") else None
        return int(match[1]) * int(match[2]) * int(match[3]) if match else 0


Code = list[Instruction]


def disassemble(cubin: Path) -> str:
    """The machine code of a cubin, by the `nvdisasm` that Triton brings."""
    spec = find_spec("triton")
    assert spec is not None, "nvdisasm comes with Triton, which is not installed"
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def parse(text: str) -> tuple[Code, dict[str, int]]:
    """All instructions, and at which of them each label stands."""
    code: Code = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := _LINE.match(line):
            code.append(Instruction(match[1], match[2], match[3]))
    return code, labels


def _spans(code: Code, labels: dict[str, int]) -> list[tuple[int, int]]:
    """Every loop, from a label to behind a jump back to it. A kernel ends with a jump to itself, which is none."""
    jumps = [(_leads(one, labels), index) for index, one in enumerate(code) if one.op == "BRA"]
    return [(target, index + 1) for target, index in jumps if 0 <= target < index]


def _leads(jump: Instruction, labels: dict[str, int]) -> int:
    """At which instruction the label stands that a jump names; -1 if it names none."""
    target = _TARGET.search(jump.operands)
    return labels.get(target[1], -1) if target else -1


@dataclass(frozen=True)
class RegisterSpills:
    """Loads and stores of registers that a kernel had no room for.

    Attributes:
        in_loops: that some loop repeats.
        once: outside of loops, where a warp runs each once.
        aside: behind the last `EXIT`, where nothing but `BRA.DIV` leads: for a warp whose threads have parted. Triton's
            kernels branch for whole warps.
    """

    in_loops: int
    once: int
    aside: int


def count_spills(text: str) -> RegisterSpills:
    """Where a kernel spills."""
    code, labels = parse(text)
    end = max((index for index, one in enumerate(code) if one.op == "EXIT"), default=len(code) - 1) + 1
    if any(_leads(one, labels) >= end for one in code[:end] if one.op == "BRA" and ".DIV" not in one.modifiers):
        end = len(code)
    spans = _spans(code[:end], labels)
    at = [index for index, one in enumerate(code) if one.op in ("LDL", "STL")]
    loop_spills = sum(any(first <= index < stop for first, stop in spans) for index in at)
    aside = sum(index >= end for index in at)
    return RegisterSpills(loop_spills, len(at) - loop_spills - aside, aside)


def loops(text: str) -> list[Code]:
    """The innermost of the loops that do tensor-core work; every loop where none does."""
    code, labels = parse(text)
    spans = _spans(code, labels)
    multiplying = [span for span in spans if any(one.multiply_adds for one in code[slice(*span)])]
    spans = multiplying or spans
    innermost = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [code[slice(*span)] for span in innermost]


def hottest_loop(text: str) -> Code:
    """The loop with most tensor-core work, else with most memory accesses; of several with as much the smallest."""
    return max(loops(text), key=lambda loop: (sum(i.multiply_adds for i in loop), sum(i.wavefronts for i in loop), -len(loop)))


def count(code: Sequence[Instruction]) -> Counter[str]:
    """How often each instruction occurs, by its name without modifiers."""
    return Counter(one.op for one in code)


@dataclass(frozen=True)
class Load:
    """Cycles that one pass through a loop keeps a processor's schedulers, and its shared memory, busy at least."""

    issue: float
    memory: float


def program_load(code: Sequence[Instruction], warps: int) -> Load:
    """What the warps of a program, each of which runs the code once, keep busy."""
    return Load(warps / SCHEDULERS * len(code), float(warps * sum(one.wavefronts for one in code)))
