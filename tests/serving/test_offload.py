"""Offloading under vLLM: pages leave and come back byte for byte. What a server does with it is in `test_server_load.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from haarkv.serving.vllm_plugin.cpu import HostWorker


@dataclass
class Pages:
    """Pages of an engine: three layers in two groups, one with a gap between its pages."""

    tensors: list[torch.Tensor]
    worker: HostWorker


def make_pages(per_chunk: int) -> Pages:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randint(-128, 128, (3, 20, 96), dtype=torch.int8, generator=draw)
    tensors = [whole[0], whole[1][:, :64], whole[2]]
    canonical = [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors]
    groups = [[CanonicalKVCacheRef(0, 96), CanonicalKVCacheRef(1, 64)], [CanonicalKVCacheRef(2, 96)]]
    return Pages(tensors, HostWorker(CanonicalKVCaches(canonical, groups), per_chunk, 8))


@pytest.mark.vllm_short
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_blocks_come_back_as_they_left_wherever_they_are_put(per_chunk):
    """The blocks 4 to 8 of a sequence leave, in chunks that begin at multiples of three; its last three return elsewhere."""
    pages = make_pages(per_chunk)
    before = [tensor.clone() for tensor in pages.tensors]
    out, target_blocks = [4, 9, 2, 17, 11, 5, 6], [19, 8, 1, 12, 13]
    chunk_ids, returning = ([7, 2, 0, 5, 1, 3, 6], [0, 5, 1, 3, 6]) if per_chunk == 1 else ([7, 2, 4], [2, 4])
    assert pages.worker.submit_store(1, GPULoadStoreSpec(out, [5, 2], [4, 6]), CPULoadStoreSpec(chunk_ids))
    for tensor in pages.tensors:
        tensor.zero_()
    assert pages.worker.submit_load(2, CPULoadStoreSpec(returning), GPULoadStoreSpec(target_blocks, [3, 2], [6, 6]))
    first_group, second_group = (out[2:5], target_blocks[:3]), (out[5:], target_blocks[3:])
    for tensor, was, (left, came) in zip(pages.tensors, before, (first_group, first_group, second_group), strict=True):
        assert torch.equal(tensor[came], was[left])
        assert not tensor[np.setdiff1d(np.arange(20), came)].any()
    done = pages.worker.get_finished()
    assert [(result.job_id, result.success) for result in done] == [(1, True), (2, True)]
    assert [result.transfer_size for result in done] == [5 * 160 + 2 * 96, 3 * 160 + 2 * 96]
    assert pages.worker.get_finished() == []
    pages.worker.wait({1, 2})
