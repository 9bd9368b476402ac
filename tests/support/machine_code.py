"""Machine code of a kernel, read: its hottest loop, and what it spills."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)([^;]*);")
_LABEL = re.compile(r"^(\.L\w*):")
_TARGET = re.compile(r"`\((\.L\w*)\)")
_TENSOR_CORES = {"HMMA", "HGMMA", "UTCHMMA"}


@dataclass(frozen=True)
class Instruction:
    """One instruction: `LDG`, `.E.128` and what follows, labels before it not counted."""

    op: str
    modifiers: str
    operands: str


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


def count_spills(text: str) -> dict[str, int]:
    """Loads and stores of registers that a kernel had no room for: `in_loops`, which some loop repeats, and `once`.

    What stands behind the last `EXIT` does not count if nothing but `BRA.DIV` leads there: it is for a warp whose threads
    have parted, and Triton's kernels branch for whole warps.
    """
    code, labels = parse(text)
    end = max((index for index, one in enumerate(code) if one.op == "EXIT"), default=len(code) - 1) + 1
    if any(_leads(one, labels) >= end for one in code[:end] if one.op == "BRA" and ".DIV" not in one.modifiers):
        end = len(code)
    spans = _spans(code[:end], labels)
    at = [index for index, one in enumerate(code[:end]) if one.op in ("LDL", "STL")]
    loop_spills = sum(any(first <= index < stop for first, stop in spans) for index in at)
    return {"in_loops": loop_spills, "once": len(at) - loop_spills}


def hottest_loop(text: str) -> Code:
    """The innermost loop with most tensor-core instructions; of several with as many the smallest."""
    code, labels = parse(text)
    spans = [span for span in _spans(code, labels) if _products(code[slice(*span)])]
    innermost = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return max((code[slice(*span)] for span in innermost), key=lambda loop: (_products(loop), -len(loop)))


def _products(code: Sequence[Instruction]) -> int:
    return sum(one.op in _TENSOR_CORES for one in code)


def count(code: Sequence[Instruction]) -> Counter[str]:
    """How often each instruction occurs, by its name without modifiers."""
    return Counter(one.op for one in code)
