"""vLLM on a CPU: its worker with page sizes per layer, and offloading, which copies pages to host memory as bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from haarkv.serving.vllm_plugin.pages import OwnPages


class RotatedCpuWorker(OwnPages, CPUWorker):
    """vLLM's CPU worker with page sizes per layer."""


class HostMemory(CPUOffloadingSpec):
    """vLLM's `CPUOffloadingSpec` with a worker for CPU engines."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


class HostWorker(OffloadingWorker):
    """Copies blocks to chunks of `blocks_per_chunk` and back, synchronously."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._pages = [pages.tensor for pages in kv_caches.tensors]
        self._groups = [sorted({ref.tensor_idx for ref in group}) for group in kv_caches.group_data_refs]
        self._blocks_per_chunk = blocks_per_chunk
        rows = chunks * blocks_per_chunk
        self._stored = [torch.zeros(rows, pages.shape[1], dtype=pages.dtype) for pages in self._pages]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, stores=False)

    def get_finished(self) -> list[TransferResult]:
        results, self._finished = self._finished, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Copies are done when submitted."""

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, chunks: Any, stores: bool) -> bool:
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        began, count = time.perf_counter(), 0
        for tensors, blocks, rows in self._places(engine, chunks.block_ids.tolist()):
            for index in tensors:
                pages, host_pages = self._pages[index], self._stored[index]
                if stores:
                    host_pages[rows] = pages[blocks]
                else:
                    pages[blocks] = host_pages[rows]
                count += len(blocks) * pages.shape[1]
        self._finished.append(TransferResult(job_id, True, count, time.perf_counter() - began))
        return True

    def _places(self, engine: GPULoadStoreSpec, chunks: Sequence[int]) -> list[tuple[list[int], Tensor, Tensor]]:
        """For each group of layers: its tensors, the engine's blocks, and their rows here. The first and last chunk may be
        partial.
        """
        per, places, chunk_start = self._blocks_per_chunk, [], 0
        ends = list(accumulate(engine.group_sizes, initial=0))
        for tensors, (begin, end), first in zip(self._groups, pairwise(ends), engine.block_indices, strict=True):
            if begin == end:
                continue
            offset = first % per
            num_chunks = -(-(offset + end - begin) // per)
            rows = [chunk * per + place for chunk in chunks[chunk_start : chunk_start + num_chunks] for place in range(per)]
            chunk_start += num_chunks
            blocks = torch.from_numpy(engine.block_ids[begin:end]).long()
            places.append((tensors, blocks, torch.tensor(rows[offset : offset + end - begin])))
        return places
