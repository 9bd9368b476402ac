"""What a device stores and attends with, and how a K or V that is not finite is told of there.

One request's numbers must not end the others, so zeros stand in for what is not finite, and a line in the log names the first
such vector. On a CPU that line comes at once. On a GPU nothing in a layer may wait for the device, since a graph may hold it:
the kernel itself puts the zeros and notes the vector on the device, and the line comes when a later batch is described.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from haarkv.tq_ops.cuda.layout import NO_FAULT
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache

logger = init_logger(f"vllm.{__name__}")
STAND_IN = "zeros stand in for what is not finite"


def to_store(slots: Tensor, positions: Tensor | None = None, window_slots: Tensor | None = None) -> Batch:
    """As much of a batch as storing T new tokens needs.

    Args:
        slots: [T] int64; a negative one pads the batch.
        positions: [T] int64, where K's format stores keys by their positions, else None.
        window_slots: [T] int64, where tokens are kept in BF16, else None.
    """
    nothing = slots.new_zeros(0)
    return Batch(
        positions=nothing if positions is None else positions, slot_mapping=slots, block_table=nothing, seq_lens=nothing,
        query_start_loc=nothing, rows=nothing, window_slots=window_slots,
    )  # fmt: skip


class CpuKernels:
    """The C++ kernels; a KernelsMissingError where they are not built."""

    def __init__(self) -> None:
        from haarkv.tq_ops.cpu.ops import CpuOps

        self._ops = CpuOps()

    def store(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        """Quantize and store k, v [T, Hkv, D] where a batch of `to_store` says."""
        real = batch.slot_mapping >= 0
        if not real.all():
            positions, exact_slots = (x if x is None or not len(x) else x[real] for x in (batch.positions, batch.window_slots))
            k, v, batch = k[real], v[real], to_store(batch.slot_mapping[real], positions, exact_slots)
        try:
            self._ops.store_kv(k, v, cache.view(layer, batch))
        except NonFiniteError as error:
            logger.error("%s; %s", error, STAND_IN)
            k, v = (torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in (k, v))
            self._ops.store_kv(k, v, cache.view(layer, batch))

    def attend(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
        """Attention of q [T, Hq, D], of q's shape and dtype."""
        return self._ops.paged_attention(q, cache.view(layer, batch), scale)

    def next_batch(self) -> None:
        """Called once before each forward; nothing is left to tell of those before."""


class GpuKernels:
    """The Triton kernels: one launch stores K and V, and no call waits for the device.

    Args:
        device: a GPU, or, in Triton's interpreter, the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        # Triton is imported where its kernels are to run, and nowhere else.
        from haarkv.tq_ops.cuda import ops

        self._ops: Any = ops
        self._fault = ops.new_fault(device)
        on_cuda = device.type == "cuda"
        self._seen = torch.full((1,), NO_FAULT, dtype=torch.int64, pin_memory=on_cuda)
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def store(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        """As of `CpuKernels`."""
        self._ops.append(k, v, cache.view(layer, batch), self._fault, stand_in=True)

    def attend(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Tensor:
        """As of `CpuKernels`."""
        out: Tensor = self._ops.paged_attention(q, cache.view(layer, batch), scale)
        return out

    def next_batch(self) -> None:
        """Log what the copy asked for by an earlier call brought, if it is there, and ask for another.

        The copy and the clearing queue up behind the forward before, so every fault is seen once.
        """
        if self._copied is not None and not self._copied.query():
            return  # the device has not come so far; the fault waits there
        if (key := int(self._seen)) != NO_FAULT:
            layer, side, token, head = self._ops.fault_place(key)
            logger.error(
                "layer %d: %s of token %d of an earlier batch, KV head %d is not finite; %s", layer, side, token, head,
                STAND_IN,
            )  # fmt: skip
        self._seen.copy_(self._fault, non_blocking=True)
        self._fault.fill_(NO_FAULT)
        if self._copied is not None:
            self._copied.record()


@cache
def kernels_on(device: torch.device) -> CpuKernels | GpuKernels:
    """The kernels of a device."""
    return CpuKernels() if device.type == "cpu" else GpuKernels(device)
