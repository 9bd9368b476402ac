"""Memory as a kernel sees it: windows at made-up 64-bit addresses onto real arrays, with nothing between them.

A window has a name and bounds. A tensor that is a view of wider memory has a window of its own, in which only its own bytes
may be touched, so that a kernel that strays into its neighbour's is found although the memory is there.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

GUARD = 1 << 32
"""The least number of bytes between two windows: an offset that wrapped at 32 bits lands in none."""
_FIRST = 0x7F0_0000_0000
SHARED_AT = 1024
"""Shared addresses begin here, so that 0 is none of them; swizzles go by the address within 1024 bytes."""
_ACCESS_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Fault(Exception):
    """What a launch must not do; `lane` is the thread among those that run together."""

    def __init__(self, what: str, lane: int | None = None) -> None:
        super().__init__(what)
        self.what, self.lane = what, lane


@dataclass
class Window:
    """Bytes of an array at addresses.

    Attributes:
        base: address of the array's first byte.
        data: [n] uint8, the whole array.
        begin, end: the bytes of it that may be touched lie in this range.
        access_mask: [end - begin] bool, which of them, or None for all.
        key: which array it is, whatever window it is seen through.
    """

    name: str
    base: int
    data: np.ndarray
    begin: int
    end: int
    access_mask: np.ndarray | None
    key: int

    @property
    def address(self) -> int:
        """Of the first byte that may be touched."""
        return self.base + self.begin


def far(nbytes: int) -> np.ndarray:
    """[nbytes] uint8, zeros; only pages that are touched take memory."""
    reservation = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    return np.frombuffer(reservation, np.uint8)


class Memory:
    """All windows of a launch."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self._bases = np.zeros(0, np.uint64)
        self._next = _FIRST

    def place(
        self, name: str, data: np.ndarray, begin: int = 0, end: int | None = None, access_mask: np.ndarray | None = None
    ) -> int:
        """Give an array an address, in a window of its own.

        Args:
            data: a contiguous array, which the kernel reads and writes in place.
            begin, end: the bytes that may be touched; all unless given.
            access_mask: [end - begin] bool, which of these.
        Returns:
            the address of byte `begin`.
        """
        octets = data.reshape(-1).view(np.uint8)
        real = octets.__array_interface__["data"][0]
        base = self._next + (real - self._next) % 256
        end = octets.nbytes if end is None else end
        self.windows.append(Window(name, base, octets, begin, end, access_mask, real))
        self._bases = np.array([window.base for window in self.windows], np.uint64)
        self._next = base + octets.nbytes + GUARD
        return base + begin

    def find(self, address: np.ndarray, width: int) -> list[tuple[Window, np.ndarray | None, np.ndarray]]:
        """The windows that accesses of `width` bytes fall in: window, which accesses (None: all) and their offsets [n].

        Raises:
            Fault: one is outside every window, or not aligned; its `lane` is its place in `address`.
        """
        misaligned = address & np.uint64(width - 1)
        if misaligned.any():
            place = int(np.flatnonzero(misaligned)[0])
            raise Fault(f"{width} bytes at {int(address[place]):#x}, which is not aligned to {width}", place)
        which = np.searchsorted(self._bases, address, "right") - 1
        first = int(which[0])
        if (which == first).all():
            return [(self._window(first, address, 0), None, self._window_offsets(first, address, width, None))]
        parts = []
        for number in np.unique(which).tolist():
            indices = np.flatnonzero(which == number)
            window = self._window(number, address, int(indices[0]))
            parts.append((window, indices, self._window_offsets(number, address[indices], width, indices)))
        return parts

    def _window(self, number: int, address: np.ndarray, place: int) -> Window:
        if number < 0:
            if not self.windows:
                raise Fault("an address where there is no memory at all", place)
            first = self.windows[0]
            raise Fault(
                f"address {int(address[place]):#x} is byte {int(address[place]) - first.address} of {first.name}", place
            )
        return self.windows[number]

    def _window_offsets(self, number: int, address: np.ndarray, width: int, indices: np.ndarray | None) -> np.ndarray:
        """Offsets in a window's array; `address` [n] are those of the accesses `indices`, or all."""
        window = self.windows[number]
        offset = (address - np.uint64(window.base)).view(np.int64)
        inside = (offset >= window.begin) & (offset <= window.end - width)
        if inside.all() and window.access_mask is not None:
            for byte in (0, width - 1):  # gaps are wider than an access
                inside &= window.access_mask[offset - window.begin + byte]
        if not inside.all():
            bad = int(np.flatnonzero(~inside)[0])
            at, size = int(offset[bad]) - window.begin, window.end - window.begin
            where = f"byte {at} of {window.name}, which has {size}"
            if 0 <= at <= size - width:
                where = f"byte {at} of {window.name}, between the bytes that are its own"
            elif (
                number + 1 < len(self.windows) and (before := self.windows[number + 1].address - int(address[bad])) < at - size
            ):
                where = f"byte {-before} of {self.windows[number + 1].name}"
            raise Fault(f"{width} bytes at {where}", bad if indices is None else int(indices[bad]))
        return offset


def gather(data: np.ndarray, offset: np.ndarray, width: int) -> np.ndarray:
    """[n, width] uint8 at offsets [n] that `width` divides, or that it does not where the array lies crookedly."""
    if (data.__array_interface__["data"][0] % min(width, 8)) or (offset % width).any():
        return data[offset[:, None] + np.arange(width)]
    whole = data[: len(data) // width * width].view(_ACCESS_DTYPES[width])
    return whole[offset // width].view(np.uint8).reshape(-1, width)


def scatter(data: np.ndarray, offset: np.ndarray, values: np.ndarray) -> None:
    """Write values [n, width] uint8 at offsets [n]."""
    width = values.shape[1]
    if (data.__array_interface__["data"][0] % min(width, 8)) or (offset % width).any():
        data[offset[:, None] + np.arange(width)] = values
        return
    whole = data[: len(data) // width * width].view(_ACCESS_DTYPES[width])
    whole[offset // width] = np.ascontiguousarray(values).view(_ACCESS_DTYPES[width])[:, 0]
