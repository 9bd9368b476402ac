"""Room for weights on large pages."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from haarkv.models import large_pages
from haarkv.models.large_pages import PAGE, LargePages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def bytes_on_large_pages() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.split("AnonHugePages:")[1].split()[0]) * 1024


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(encoding="ascii"), reason="no large pages on this machine"
)
def test_tensors_lie_on_large_pages():
    before, room = bytes_on_large_pages(), LargePages()
    tensors = [room.empty((3 * PAGE // 2,), torch.bfloat16).fill_(1) for _ in range(6)]
    # Memory may be in pieces: most is enough to know that it was asked for.
    assert bytes_on_large_pages() - before >= sum(t.nbytes for t in tensors) // 2


def test_tensors_do_not_overlap_and_begin_at_cache_lines():
    room = LargePages()
    shapes, dtypes = ((3, 5), (7,), (0, 4), (1, 1)), (torch.bfloat16, torch.float32)
    tensors = [room.empty(shape, dtype) for shape in shapes for dtype in dtypes]
    tensors.append(room.empty((large_pages._CHUNK // 4 + 1,), torch.float32))  # more than is left, and than a chunk holds
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
        assert tensor.is_contiguous()
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0


def test_a_chunk_goes_with_its_last_tensor(monkeypatch):
    held = []

    class Memory(bytearray):
        """A stand-in that can be watched."""

    def memory(nbytes):
        made = Memory(nbytes)
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr(large_pages, "_memory", memory)
    monkeypatch.setattr(large_pages, "_CHUNK", PAGE)
    room = LargePages()
    first, second = (room.empty((PAGE,), torch.uint8) for _ in range(2))
    del first
    gc.collect()
    assert [of() is None for of in held] == [True, False]
    assert second.shape == (PAGE,)
