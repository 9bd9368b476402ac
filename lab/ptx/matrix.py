"""Products of a warp: fragments spread over its 32 threads, `mma`, and the moves between fragments and shared memory."""

from __future__ import annotations

import re

import numpy as np

from lab.ptx.access import active, address_reader, read_shared, write_shared
from lab.ptx.floats import from_bf16
from lab.ptx.state import Lanes, Run, destination, reader
from lab.ptx.syntax import Instruction, Operand, Unknown, Vector


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """The elements of registers [..., n] uint32, side by side: [..., n * elements] float32."""
    if kind == "f16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    if kind == "bf16":
        return from_bf16(np.ascontiguousarray(bits).view(np.uint16))
    if kind == "tf32":  # the tensor cores ignore the low bits
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    raise Unknown(f"products of {kind}")


def left(fragments: np.ndarray, kind: str) -> np.ndarray:
    """The operand A [warps, 16, K] of registers [n, warps, 32].

    Register r holds row `lane // 4` (+ 8 for odd r), and of each 4 registers' worth of columns those of `lane % 4`.
    """
    n, warps, _ = fragments.shape
    # column half, row half, warp, row, place in it, elements
    elements = numbers(fragments.reshape(n // 2, 2, warps, 8, 4, 1), kind)
    return elements.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, -1)


def right(fragments: np.ndarray, kind: str) -> np.ndarray:
    """The operand B [warps, K, 8] of registers [n, warps, 32]."""
    n, warps, _ = fragments.shape
    elements = numbers(fragments.reshape(n, warps, 8, 4, 1), kind)
    return elements.transpose(1, 0, 3, 4, 2).reshape(warps, -1, 8)


def sums(fragments: np.ndarray) -> np.ndarray:
    """The operand C [warps, 16, 8 * n / 4] of registers [n, warps, 32] of 32-bit numbers."""
    n, warps, _ = fragments.shape
    # tile, row half, column in it, warp, row, column pair
    return fragments.reshape(n // 4, 2, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(warps, 16, -1)


def spread(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `sums`: [n, warps, 32]."""
    warps, _, columns = matrix.shape
    parts = matrix.reshape(warps, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(parts.reshape(columns // 2, warps, 32))


def registers(operand: Operand, count: int) -> list[int]:
    """The places of a vector of registers of 32 bits."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    places = [destination(item, 32) for item in items]
    if len(places) != count or None in places:
        raise Unknown(f"{len(places)} registers where there should be {count}")
    return [place for place in places if place is not None]


def read_registers(s: Lanes, places: list[int], warps: np.ndarray | None) -> np.ndarray:
    """Registers of the active warps: [n, warps, 32] uint32."""
    values = np.stack([s.regs[place] for place in places]).reshape(len(places), -1, 32)
    return values if warps is None else values[:, warps]


def put(s: Lanes, places: list[int], values: np.ndarray) -> None:
    """Set registers of the active warps to values [n, warps, 32]."""
    for place, value in zip(places, values, strict=True):
        s.write_some(place, np.ascontiguousarray(value.reshape(-1)))


_SHAPE = re.compile(r"m16n8k(\d+)$")
_BITS = {"f16": 16, "bf16": 16, "tf32": 32}


def multiply(ins: Instruction) -> Run:
    """`mma.sync.aligned.m16n8kK.row.col`."""
    sync, aligned, shape, row, col, *kinds = ins.modifiers
    shape_match = _SHAPE.match(shape)
    if (sync, aligned, row, col) != ("sync", "aligned", "row", "col") or not shape_match or len(kinds) != 4:
        raise Unknown(ins.name)
    to, a_kind, b_kind, c_kind = kinds
    if a_kind not in _BITS or b_kind not in _BITS or (to, c_kind) != ("f32", "f32"):
        raise Unknown(ins.name)
    k, bits = int(shape_match[1]), _BITS[a_kind]
    d, a, b, c = ins.operands
    d_places = registers(d, 4)
    a_places, b_places = registers(a, 16 * k * bits // 1024), registers(b, 8 * k * bits // 1024)
    assert isinstance(c, Vector)
    c_reads = [reader(item, c_kind) for item in c.items]

    def run(s: Lanes) -> None:
        warps = s.whole_warps(ins.name)
        start = np.stack([np.broadcast_to(read(s), s.count) for read in c_reads]).reshape(4, -1, 32)
        start = start if warps is None else start[:, warps]
        product = left(read_registers(s, a_places, warps), a_kind) @ right(read_registers(s, b_places, warps), b_kind)
        put(s, d_places, spread((sums(start) + product).astype(np.float32)))

    return run


def _count(ins: Instruction) -> tuple[int, bool]:
    """How many matrices of 8 x 8 numbers of 16 bits, and whether they are transposed."""
    names = set(ins.modifiers) - {"shared", "shared__cta"}
    rest = names - {"sync", "aligned", "m8n8", "b16", "trans", "x1", "x2", "x4"}
    if rest or not {"sync", "aligned", "m8n8", "b16"} <= names:
        raise Unknown(ins.name)
    return next(int(name[1]) for name in names if name in ("x1", "x2", "x4")), "trans" in names


def load_matrix(ins: Instruction) -> Run:
    """`ldmatrix`: thread 8 * m + r gives the address of row r of matrix m."""
    count, transposed = _count(ins)
    places, address = registers(ins.operands[0], count), address_reader(ins.operands[1])

    def run(s: Lanes) -> None:
        s.whole_warps(ins.name)
        warps = len(s.lanes) // 32
        row_lanes = s.lanes.reshape(warps, 32)[:, : 8 * count].reshape(-1)
        where = active(s, address(s)).reshape(warps, 32)[:, : 8 * count].reshape(-1)
        rows = read_shared(s, row_lanes, where, 16).view(np.uint16).reshape(warps, count, 8, 8)
        rows = rows.swapaxes(2, 3) if transposed else rows
        put(s, places, np.ascontiguousarray(rows).view(np.uint32).reshape(warps, count, 32).swapaxes(0, 1))

    return run


def store_matrix(ins: Instruction) -> Run:
    """`stmatrix`."""
    count, transposed = _count(ins)
    address, places = address_reader(ins.operands[0]), registers(ins.operands[1], count)

    def run(s: Lanes) -> None:
        warps_active = s.whole_warps(ins.name)
        values = read_registers(s, places, warps_active)
        warps = values.shape[1]
        rows = np.ascontiguousarray(values.swapaxes(0, 1)).view(np.uint16).reshape(warps, count, 8, 8)
        rows = np.ascontiguousarray(rows.swapaxes(2, 3) if transposed else rows).view(np.uint8).reshape(-1, 16)
        row_lanes = s.lanes.reshape(warps, 32)[:, : 8 * count].reshape(-1)
        where = active(s, address(s)).reshape(warps, 32)[:, : 8 * count].reshape(-1)
        write_shared(s, row_lanes, where, rows)

    return run


def move_matrix(ins: Instruction) -> Run:
    """`movmatrix`: an 8 x 8 matrix transposed across a warp."""
    if ins.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise Unknown(ins.name)
    (to,), (source,) = registers(ins.operands[0], 1), registers(ins.operands[1], 1)

    def run(s: Lanes) -> None:
        values = read_registers(s, [source], s.whole_warps(ins.name))
        rows = np.ascontiguousarray(values).view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        put(s, [to], np.ascontiguousarray(rows).view(np.uint32).reshape(1, -1, 32))

    return run
