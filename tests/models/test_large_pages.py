"""Room for weights on large pages."""

from __future__ import annotations

import torch
from on_large_pages import asks_for_large_pages, needs_large_pages

from haarkv.models import checkpoint as large_pages
from haarkv.models.checkpoint import PAGE, LargePages


@needs_large_pages
def test_tensors_ask_for_large_pages():
    room = LargePages()
    assert all(asks_for_large_pages(room.empty((3 * PAGE // 2,), torch.bfloat16)) for _ in range(6))


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


def test_a_process_that_may_have_no_chunk_gets_what_it_needs(monkeypatch):
    def memory(nbytes):
        if nbytes > PAGE:
            raise OSError(12, "Cannot allocate memory")
        return bytearray(nbytes)

    monkeypatch.setattr(large_pages, "_memory", memory)
    tensor = LargePages().empty((PAGE // 8,), torch.float32)
    assert tensor.nbytes == PAGE // 2
