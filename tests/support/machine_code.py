"""Machine code of a kernel, read: its hottest loop, what that loop keeps busy, and what a card can therefore do at best.

Rates are those of an H100 or H200, of one of its 132 processors with four schedulers each. A warp keeps a scheduler busy for 1
cycle to be issued, and a unit for 1 cycle with FP32 or packed FP16, 2 with integers, logic, permutations and conversions (64
lanes a processor), 8 with `ex2` and other special functions (16 lanes). Integer multiplication and the moves made of it run on
half of the FP32 lanes. Shared memory and the first cache serve 128 bytes a cycle and processor. Tensor cores do 2,048 FP16
multiply-adds a cycle and processor. Sources: the throughput table of the CUDA C++ programming guide for compute capability
9.0; 989 TFLOP/s at 1.83 GHz of the H100 data sheet. An instruction of no unit named here is issued and costs nothing else.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from haarkv.benchmarks.cases import Case

PROCESSORS, SCHEDULERS, CLOCK_MHZ = 132, 4, 1755.0
COPY_TB_S = 4.3
"""Bytes read and written by a plain copy on such a card, measured."""
BUSY = 0.8
"""Part of the time that the busiest unit of a good kernel works: an assumption, which a measurement will replace."""
LAUNCH_US = 2.0
"""Of one launch in a graph, from its start to its first useful byte: an assumption too."""

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)([^;]*);")
_LABEL = re.compile(r"^(\.L\w*):")
_TARGET = re.compile(r"`\((\.L\w*)\)")
_OPS = {
    "fma": "FFMA FMUL FADD HFMA2 HMUL2 HADD2 FFMA2 FMUL2 FADD2",
    "imad": "IMAD IDP",
    "special": "MUFU I2F F2I F2F FRND POPC FLO",
    "alu": "LOP3 LOP PRMT SHF SHL SHR IADD3 IADD ISETP IMNMX LEA SEL FSEL FMNMX FMNMX3 FSETP FSET PLOP3 VIADD VIADDMNMX "
    "VIMNMX VIMNMX3 IABS BMSK SGXT F2FP I2FP HMNMX2 HSETP2 P2R R2P MOV CS2R VABSDIFF VABSDIFF4 BREV",
    "memory": "LDS STS LDSM STSM LDG STG LDGSTS LD ST SHFL ATOMS ATOMG RED LDL STL",
    "tensor": "HMMA HGMMA UTCHMMA",
}
_UNIT = {op: unit for unit, ops in _OPS.items() for op in ops.split()}


@dataclass(frozen=True)
class Instruction:
    """One instruction: `LDG`, `.E.128` and what follows, labels before it not counted."""

    op: str
    modifiers: str
    operands: str

    @property
    def wavefronts(self) -> int:
        """Cycles of the memory pipe, if no bank conflicts: 128 bytes each; 0 for what is no memory access."""
        if _UNIT.get(self.op) != "memory":
            return 0
        if self.op in ("LDSM", "STSM"):
            return int(found[1]) if (found := re.search(r"\.(\d)$", self.modifiers)) else 1
        found = re.search(r"\.(64|128)\b", self.modifiers)
        return int(found[1]) // 32 if found else 1

    @property
    def multiply_adds(self) -> int:
        """Of a tensor-core instruction: of a warp, or, as HGMMA, of a group of four."""
        if self.op == "HMMA":
            found = re.search(r"\.(16)(8)(16|8|4)\b", self.modifiers)
        else:
            found = re.search(r"\.(\d+)x(\d+)x(\d+)", self.modifiers) if _UNIT.get(self.op) == "tensor" else None
        return int(found[1]) * int(found[2]) * int(found[3]) if found else 0


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
        if found := _LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := _LINE.match(line):
            code.append(Instruction(found[1], found[2], found[3]))
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
class Spilled:
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


def spilled(text: str) -> Spilled:
    """Where a kernel spills."""
    code, labels = parse(text)
    end = max((index for index, one in enumerate(code) if one.op == "EXIT"), default=len(code) - 1) + 1
    if any(_leads(one, labels) >= end for one in code[:end] if one.op == "BRA" and ".DIV" not in one.modifiers):
        end = len(code)
    spans = _spans(code[:end], labels)
    at = [index for index, one in enumerate(code) if one.op in ("LDL", "STL")]
    repeated = sum(any(first <= index < stop for first, stop in spans) for index in at)
    aside = sum(index >= end for index in at)
    return Spilled(repeated, len(at) - repeated - aside, aside)


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
    """Cycles that one pass through a loop keeps each unit of one processor busy.

    Attributes:
        units: `issue`, `alu` (integers, logic, permutations, conversions), `fma`,
            `special`, `memory`, `tensor`.
    """

    units: dict[str, float]

    @property
    def bound_by(self) -> str:
        """The busiest unit."""
        return max(self.units, key=lambda unit: self.units[unit])

    @property
    def cycles(self) -> float:
        """Of that unit."""
        return max(self.units.values())


def load_of(code: Sequence[Instruction], warps: int) -> Load:
    """What the warps of a program, each of which runs the code once, keep busy.

    An HGMMA is one of four warps; each of them is issued it.
    """
    ops = Counter(_UNIT.get(one.op, "") for one in code)
    share = warps / SCHEDULERS
    grouped = sum(one.multiply_adds for one in code if one.op != "HMMA") * warps / 4
    single = sum(one.multiply_adds for one in code if one.op == "HMMA") * warps
    return Load(
        {
            "issue": share * len(code),
            "alu": 2 * share * ops["alu"],
            "fma": share * max(2 * ops["imad"], ops["imad"] + ops["fma"]),
            "special": 8 * share * ops["special"],
            "memory": float(warps * sum(one.wavefronts for one in code)),
            "tensor": (grouped + single) / 2048,
        }
    )


@dataclass(frozen=True)
class Shape:
    """What a layer's attention reads: KV heads, numbers of a vector, and bytes of one token's K and V, all heads."""

    kv_heads: int = 8
    head_dim: int = 128
    token_bytes: float = 1056.0


def predict(load: Load, tokens: int, case: Case, shape: Shape, launches: int = 3) -> dict[str, Any]:
    """Microseconds of decode attention of one layer.

    Args:
        load: of one pass of the loop, on one processor.
        tokens: stored tokens of one KV head in a pass.
        launches: that follow one another.
    Returns:
        `bytes_us` of moving the bytes alone; `least_us`, which nothing can beat, and what it is bound by; `likely_us`, with
        the busiest unit at work for `BUSY` of the time, and the launches.
    """
    passes = case.batch * shape.kv_heads * case.context / tokens
    compute = passes * load.cycles / PROCESSORS / CLOCK_MHZ
    moved = case.batch * case.context * shape.token_bytes / COPY_TB_S / 1e6
    least = max(compute, moved)
    return {
        "batch": case.batch, "context": case.context, "bytes_us": round(moved, 1), "least_us": round(least, 1),
        "bound_by": load.bound_by if compute > moved else "bytes", "likely_us": round(least / BUSY + launches * LAUNCH_US, 1),
    }  # fmt: skip


CASES = (Case(1, 4096), Case(8, 32768), Case(32, 32768))
DECODE = (8, 5, 128, 4, 4, 128, 0, 2, 0, 0, 0)
"""Qwen3-14B's attention with `tq4` on an H200, as `tq_ops.cuda.decode.DEFINED` names it."""


def decode_kernel() -> str:
    """The machine code of CUDA C++'s decode attention of that shape."""
    from haarkv.tq_ops.cuda import decode

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decode.cubin"
        path.write_bytes(decode.compiled("sm_90", *DECODE))
        return disassemble(path)


def predictions(text: str, tokens: int, warps: int, launches: int, kernel: str, who: str) -> list[dict[str, Any]]:
    """The lines of benchmarks/gpu_predictions.jsonl that follow from a kernel's hottest loop, but for their date."""
    load = load_of(hottest_loop(text), warps)
    rows = [predict(load, tokens, case, Shape(), launches) for case in CASES]
    return [{"kernel": kernel, "who": who, **row, "drawn": who == "tq4"} for row in rows]
