"""Loads, stores and asynchronous copies, in every space."""

from __future__ import annotations

import numpy as np

from lab.ptx.memory import SHARED_AT, Fault, Window, gather, scatter
from lab.ptx.state import DTYPES, UNSIGNED, Lanes, Read, Run, bit_width, destination, reader
from lab.ptx.syntax import Address, Instruction, Number, Operand, Register, Symbol, Unknown, Vector

SPACES = ("global", "shared", "local", "param")
_HINTS = {"nc", "ca", "cg", "L1__no_allocate"}


def address_reader(operand: Operand) -> Read:
    """[count] uint64 addresses of `[register + offset]` or `[array + offset]`."""
    assert isinstance(operand, Address)
    offset = np.array([operand.offset % (1 << 64)], np.uint64)
    if isinstance(operand.base, Symbol):
        name = operand.base.name
        return lambda s: np.full(s.count, np.uint64(s.symbols[name][1]) + offset[0])
    if not isinstance(operand.base, Register):
        raise Unknown(f"the address {operand}")
    index = operand.base.index
    if operand.offset == 0:
        return lambda s: s.regs[index].astype(np.uint64)
    return lambda s: s.regs[index].astype(np.uint64) + offset


def memory_space(ins: Instruction) -> str:
    """The space that an instruction names."""
    for modifier in ins.modifiers:
        if modifier in SPACES:
            return modifier
    raise Unknown(f"{ins.name} of a generic address")


def require_hints(ins: Instruction, accepted: set[str]) -> None:
    if unknown := set(ins.modifiers) - accepted - _HINTS - set(SPACES):
        raise Unknown(f"{ins.name}: {', '.join(sorted(unknown))}")


def shared_offset(s: Lanes, lanes: np.ndarray, address: np.ndarray, width: int) -> np.ndarray:
    """[n] offsets in `s.shared` of shared addresses [n] of threads [n]."""
    address = address & np.uint64(0xFFFFFFFF)
    if (misaligned := address % np.uint64(width) != 0).any():
        place = int(np.argmax(misaligned))
        raise Fault(f"{width} bytes at shared address {int(address[place]):#x}, not aligned", int(lanes[place]))
    end = s.shared_end
    outside = (address < SHARED_AT) | (address > end - width)
    if outside.any():
        place = int(np.argmax(outside))
        at = int(address[place]) - SHARED_AT
        raise Fault(f"{width} bytes at byte {at} of shared memory, which has {end - SHARED_AT}", int(lanes[place]))
    return address.astype(np.int64) + lanes // s.block * s.shared_stride


def read_shared(s: Lanes, lanes: np.ndarray, address: np.ndarray, width: int) -> np.ndarray:
    """[n, width] uint8."""
    offset = shared_offset(s, lanes, address, width)
    s.races.shared_read(s, lanes, offset, width)
    return gather(s.shared, offset, width)


def write_shared(s: Lanes, lanes: np.ndarray, address: np.ndarray, values: np.ndarray) -> None:
    offset = shared_offset(s, lanes, address, values.shape[1])
    s.races.shared_write(s, lanes, offset, values, values.shape[1])
    scatter(s.shared, offset, values)


def local_offset(s: Lanes, lanes: np.ndarray, address: np.ndarray, width: int) -> np.ndarray:
    """[n] offsets in all of `s.local` of addresses [n] in the memory of threads [n] alone."""
    size = s.local.shape[1]
    if (wrong := (address % np.uint64(width) != 0) | (address > np.uint64(max(size - width, 0)))).any():
        place = int(np.argmax(wrong))
        raise Fault(f"{width} bytes at byte {int(address[place])} of local memory, which has {size}", int(lanes[place]))
    return address.astype(np.int64) + lanes * size


def split_by_window(
    s: Lanes, lanes: np.ndarray, address: np.ndarray, width: int
) -> list[tuple[Window, np.ndarray, np.ndarray]]:
    """The windows of global accesses: window, which of the accesses, offsets."""
    try:
        parts = s.memory.find(address, width)
    except Fault as fault:
        raise Fault(fault.what, int(lanes[fault.lane])) from None
    everything = np.arange(len(lanes))
    return [(window, everything if indices is None else indices, offset) for window, indices, offset in parts]


def read_global(s: Lanes, lanes: np.ndarray, address: np.ndarray, width: int) -> np.ndarray:
    """[n, width] uint8."""
    parts = split_by_window(s, lanes, address, width)
    for window, indices, offset in parts:
        s.races.global_read(s, lanes[indices], window, offset, width)
    if len(parts) == 1:
        return gather(parts[0][0].data, parts[0][2], width)
    values = np.empty((len(lanes), width), np.uint8)
    for window, indices, offset in parts:
        values[indices] = gather(window.data, offset, width)
    return values


def write_global(s: Lanes, lanes: np.ndarray, address: np.ndarray, values: np.ndarray) -> None:
    for window, indices, offset in split_by_window(s, lanes, address, values.shape[1]):
        s.races.global_write(s, lanes[indices], window, offset, values[indices])
        scatter(window.data, offset, values[indices])


def read(s: Lanes, space: str, lanes: np.ndarray, address: np.ndarray, width: int) -> np.ndarray:
    """[n, width] uint8 of a space."""
    if space == "shared":
        return read_shared(s, lanes, address, width)
    if space == "local":
        return gather(s.local.reshape(-1), local_offset(s, lanes, address, width), width)
    if space == "param":
        if (address > len(s.params) - width).any():
            raise Fault("a load behind the parameters", int(lanes[0]))
        return gather(s.params, address.astype(np.int64), width)
    return read_global(s, lanes, address, width)


def write(s: Lanes, space: str, lanes: np.ndarray, address: np.ndarray, values: np.ndarray) -> None:
    """As `read`."""
    if space == "shared":
        write_shared(s, lanes, address, values)
    elif space == "global":
        write_global(s, lanes, address, values)
    elif space == "local":
        scatter(s.local.reshape(-1), local_offset(s, lanes, address, values.shape[1]), values)
    else:
        raise Fault(f"a store to {space} memory", int(lanes[0]))


def active(s: Lanes, values: np.ndarray) -> np.ndarray:
    """Of [count] or [1] what the active threads have."""
    if len(values) == 1:
        return np.repeat(values, len(s.lanes))
    return values if len(s.lanes) == s.count else values[s.lanes]


def _shape(ins: Instruction) -> tuple[str, int]:
    """The type and how many of it."""
    kind = ins.modifiers[-1]
    count = next((int(name[1:]) for name in ins.modifiers if name in ("v2", "v4")), 1)
    require_hints(ins, {kind, "v2", "v4"})
    if kind not in DTYPES or bit_width(kind) < 8:
        raise Unknown(ins.name)
    return kind, count


def _items(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise Unknown(f"{len(items)} operands where there should be {count}")
    return items


def load(ins: Instruction) -> Run:
    """`ld`: a register wider than the type is filled as the type's sign says."""
    kind, count = _shape(ins)
    width, space, address = bit_width(kind) // 8, memory_space(ins), address_reader(ins.operands[1])
    items = _items(ins.operands[0], count)
    targets = [(destination(item), item.bits if isinstance(item, Register) else 0) for item in items]

    def run(s: Lanes) -> None:
        if not len(s.lanes):
            return
        octets = read(s, space, s.lanes, active(s, address(s)), width * count)
        values = octets.view(DTYPES[kind]).reshape(len(s.lanes), count)
        for place, (target, bits) in enumerate(targets):
            if target is not None:
                value = np.ascontiguousarray(values[:, place])
                if bits > width * 8:
                    value = value.astype(np.int64 if kind[0] == "s" else np.uint64).astype(UNSIGNED[bits])
                s.write_some(target, value)

    return run


def store(ins: Instruction) -> Run:
    """`st`."""
    kind, count = _shape(ins)
    space, address = memory_space(ins), address_reader(ins.operands[0])
    unsigned = f"b{bit_width(kind)}"
    reads = [reader(item, kind if isinstance(item, Number) else unsigned) for item in _items(ins.operands[1], count)]

    def run(s: Lanes) -> None:
        if len(s.lanes):
            values = np.stack([active(s, read(s)) for read in reads], -1)
            octets = np.ascontiguousarray(values).view(np.uint8).reshape(len(s.lanes), -1)
            write(s, space, s.lanes, active(s, address(s)), octets)

    return run
