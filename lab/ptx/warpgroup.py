"""Products of a warp group on sm_90: `wgmma`, whose operands lie in shared memory in swizzled tiles.

A product runs as late as the waits allow: its operands are read, and its sums written, when a wait asks for its group.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lab.ptx.matrix import left, numbers, put, read_registers, registers, spread, sums
from lab.ptx.memory import SHARED_AT, Fault
from lab.ptx.state import Lanes, Read, Run, reader
from lab.ptx.syntax import Instruction, Number, Unknown, Vector

_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")
_SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}
"""Bytes of a row of a tile, by the descriptor's mode."""


def tile_bytes(descriptor: int, rows: int, columns: int, size: int, across: bool) -> np.ndarray:
    """Shared addresses of the elements [rows, columns] of a matrix that a descriptor describes.

    Args:
        columns: along K, `rows` along M or N.
        size: bytes of an element.
        across: whether M or N runs along the rows of the tile in memory, and not K.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = _SWIZZLE_BYTES[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise Fault("a matrix descriptor with a base offset")
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    line, position = (column, row) if across else (row, column)  # the row of the tile in memory, and the element in it
    per = width // size
    if width == 16:  # core matrices of 8 rows of 16 bytes
        steps = (stride, leading) if across else (leading, stride)
        address = start + position // per * steps[0] + line // 8 * steps[1] + line % 8 * 16 + position % per * size
    else:
        address = start + position // per * leading + line // 8 * stride + line % 8 * width + position % per * size
    # Bits 4 and up of an address are XORed with bits 7 and up: as many as 16-byte pieces ask for.
    return address ^ ((address >> 7 & (width // 16 - 1)) << 4)


@dataclass
class _Product:
    """A product of warp groups [n] under way.

    Attributes:
        number: of each, which of its commit groups it belongs to.
        scalars: of each, what stood in the scalar operands when it was issued.
    """

    groups: np.ndarray
    number: np.ndarray
    scalars: list[np.ndarray]
    issue_time: int
    finish: Callable[[Lanes, np.ndarray, list[np.ndarray], int], None]


class Products:
    """Products under way, oldest first."""

    def __init__(self, count: int) -> None:
        self.committed = np.zeros(-(-count // 128), np.int64)
        self.pending: list[_Product] = []

    def land(self, s: Lanes, groups: np.ndarray, last: int) -> None:
        """Finish the products of warp groups [n] but for their last `last` commit groups."""
        limit = np.full(len(self.committed), -1)
        limit[groups] = self.committed[groups] - last
        left_over = []
        for product in self.pending:
            now = product.number < limit[product.groups]
            if now.any():
                product.finish(s, product.groups[now], [scalar[now] for scalar in product.scalars], product.issue_time)
            if not now.all():
                rest = [scalar[~now] for scalar in product.scalars]
                left_over.append(replace(product, groups=product.groups[~now], number=product.number[~now], scalars=rest))
        self.pending = left_over


def _groups(s: Lanes, what: str) -> np.ndarray:
    """The active warp groups [n]."""
    if s.block % 128:
        raise Fault(f"{what} in a program of {s.block} threads")
    lanes = s.lanes
    if len(lanes) % 128 or (lanes.reshape(-1, 128)[:, 0] % 128).any() or (np.diff(lanes.reshape(-1, 128)) != 1).any():
        raise Fault(f"{what} by part of a warp group", int(lanes[0]))
    return lanes[::128] // 128


def warpgroup(ins: Instruction) -> Run:
    """`wgmma` and what orders it."""
    what = ins.modifiers[0]
    if what == "fence":
        return lambda s: None
    if what == "commit_group":

        def commit(s: Lanes) -> None:
            s.products.committed[_groups(s, ins.name)] += 1

        return commit
    if what == "wait_group":
        count = ins.operands[0]
        assert isinstance(count, Number)
        return lambda s: s.products.land(s, _groups(s, ins.name), count.value)
    if what != "mma_async":
        raise Unknown(ins.name)
    reads, finish = _multiply(ins)

    def issue(s: Lanes) -> None:
        groups = _groups(s, ins.name)
        scalars = [np.broadcast_to(read(s), s.count)[groups * 128] for read in reads]
        s.products.pending.append(_Product(groups, s.products.committed[groups], scalars, s.clock, finish))

    return issue


_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}


def _multiply(ins: Instruction) -> tuple[list[Read], Callable[[Lanes, np.ndarray, list[np.ndarray], int], None]]:
    """A product's scalar operands, and what it does when it lands."""
    if len(ins.modifiers) != 7 or not (shape := _SHAPE.match(ins.modifiers[3])):
        raise Unknown(ins.name)
    columns, k = int(shape[1]), int(shape[2])
    to, a_kind, b_kind = ins.modifiers[4:]
    if to != "f32" or a_kind not in _BYTES or b_kind != a_kind:
        raise Unknown(ins.name)
    d, a, b, scale_d, scale_a, scale_b, *across = ins.operands
    places, size = registers(d, columns // 2), _BYTES[a_kind]
    signs = [operand.value for operand in (scale_a, scale_b) if isinstance(operand, Number)]
    transpose_flags = [bool(operand.value) for operand in across if isinstance(operand, Number)]
    if signs != [1, 1] or len(transpose_flags) != (0 if size == 4 else 1 if isinstance(a, Vector) else 2):
        raise Unknown(f"{ins.name} with {ins.operands[3:]}")
    b_across = bool(transpose_flags) and transpose_flags[-1]
    a_across = len(transpose_flags) == 2 and transpose_flags[0]
    a_places = registers(a, 4) if isinstance(a, Vector) else None
    reads = [reader(scale_d, "pred"), reader(b, "u64")] + ([] if isinstance(a, Vector) else [reader(a, "u64")])

    def finish(s: Lanes, groups: np.ndarray, scalars: list[np.ndarray], issue_time: int) -> None:
        warps = (groups[:, None] * 4 + np.arange(4)).reshape(-1)
        saved_lanes = s.mask, s._lanes
        mask = np.zeros(s.count, np.bool_)
        mask.reshape(-1, 128)[groups] = True
        s.activate(mask)
        if a_places is not None:
            first = left(read_registers(s, a_places, warps), a_kind).reshape(len(groups), 64, k)
        else:
            first = _from_shared(s, groups, scalars[2], (64, k), a_kind, a_across, issue_time)
        second = _from_shared(s, groups, scalars[1], (columns, k), b_kind, b_across, issue_time)
        product = (first @ second.swapaxes(1, 2)).reshape(len(warps), 16, columns)
        before = sums(read_registers(s, places, warps).view(np.float32))
        product = np.where(np.repeat(scalars[0], 4)[:, None, None], before, np.float32(0)) + product
        put(s, places, spread(product.astype(np.float32)).view(np.uint32))
        s.mask, s._lanes = saved_lanes

    return reads, finish


def _from_shared(
    s: Lanes, groups: np.ndarray, descriptors: np.ndarray, shape: tuple[int, int], kind: str, across: bool, issue_time: int
) -> np.ndarray:
    """[groups, rows, columns] float32 of matrices in shared memory."""
    size, (rows, columns) = _BYTES[kind], shape
    matrices = np.empty((len(groups), rows, columns), np.float32)
    for place, (group, descriptor) in enumerate(zip(groups.tolist(), descriptors.tolist(), strict=True)):
        address = tile_bytes(descriptor, rows, columns, size, across)
        if address.min() < SHARED_AT or address.max() + size > s.shared_end:
            raise Fault(f"a matrix in shared memory from {address.min():#x} to {address.max():#x}", group * 128)
        at = address.reshape(-1, 1) + np.arange(size) + group * 128 // s.block * s.shared_stride
        s.races.matrix_read(s, group * 128, at.reshape(-1), issue_time)
        octets = s.shared[at].reshape(-1)
        bits = octets.view(np.uint16 if size == 2 else np.uint32)
        matrices[place] = numbers(bits, kind).reshape(rows, columns)
    return matrices
