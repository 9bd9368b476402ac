"""Ranks over `torch.distributed`: gloo between CPUs, NCCL between NVIDIA GPUs. NCCL was never tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from haarkv.models.parallel import Ranks, even_share
from haarkv.tq_ops.errors import InputError, RankLostError
from haarkv.tq_ops.memory import mapped_memory, peak_memory

T = TypeVar("T")

TIMEOUT_S = 600
"""Seconds a rank waits for another by default; also, at least, for all to start."""
_HOST = torch.device("cpu")


@contextmanager
def join(size: int | None = None, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Join the ranks that torchrun started.

    Args:
        size: required number of ranks; torchrun's unless given.
        timeout_s: seconds to wait for another rank once all have met.
    Raises:
        InputError: torchrun started another number, or none, or torch has no torch.distributed.
        RankLostError: another rank does not come.
    """
    if not distributed.is_available():
        raise InputError("this torch was built without torch.distributed; leave out --tensor-parallel")
    with _lost_rank_errors(timeout_s):
        try:
            distributed.init_process_group("gloo", timeout=timedelta(seconds=max(timeout_s, TIMEOUT_S)))
        except ValueError:  # none of torchrun's variables
            raise InputError("start this script with torchrun, as torchrun --nproc-per-node 2 SCRIPT") from None
    world_size = distributed.get_world_size()
    if size is not None and size != world_size:
        raise InputError(f"--tensor-parallel is {size}, and torchrun started {world_size} ranks; make them equal")
    local = distributed.get_node_local_rank(fallback_rank=distributed.get_rank())
    ranks = _TorchRanks(distributed.get_rank(), world_size, local, timeout_s)
    yield ranks
    # Only where all went well: after an error the others may be gone. They wait for rank 0 to have said everything.
    ranks.share(None)
    distributed.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is one of torchrun's ranks."""
    return distributed.is_available() and distributed.is_torchelastic_launched()


class _TorchRanks:
    def __init__(self, rank: int, size: int, local: int, timeout_s: float) -> None:
        self.rank, self.size, self.local = rank, size, local
        self._timeout_s = timeout_s
        self._groups: dict[str, Any] = {}

    def sum(self, partial: Tensor) -> Tensor:
        if partial.dtype != torch.float32:
            raise TypeError(f"ranks add fp32, not {partial.dtype}")
        partial = partial.contiguous()
        with _lost_rank_errors(self._timeout_s):
            distributed.all_reduce(partial, group=self._group(partial.device))
        return partial

    def gather(self, part: Tensor, width: int) -> Tensor:
        shares = [even_share(width, rank, self.size) for rank in range(self.size)]
        longest = max(share.stop - share.start for share in shares)
        padded = pad(part, (0, longest - part.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in shares]
        with _lost_rank_errors(self._timeout_s):
            distributed.all_gather(parts, padded, group=self._group(part.device))
        return torch.cat([one[..., : share.stop - share.start] for one, share in zip(parts, shares, strict=True)], dim=-1)

    def share(self, value: T) -> T:
        box: list[Any] = [value if self.rank == 0 else None]
        with _lost_rank_errors(self._timeout_s):
            distributed.broadcast_object_list(box, src=0, group=self._group(_HOST))
        shared: T = box[0]
        return shared

    def collect(self, value: T) -> list[T]:
        boxes: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _lost_rank_errors(self._timeout_s):
            distributed.gather_object(value, boxes, dst=0, group=self._group(_HOST))
        return boxes or []

    def _group(self, device: torch.device) -> Any:
        """The ranks' group for a device; created on first use, by all ranks at the same call."""
        if device.type not in self._groups:
            if device.type != "cpu":
                getattr(torch, device.type).set_device(device)
            self._groups[device.type] = distributed.new_group(
                backend=distributed.get_default_backend_for_device(device), timeout=timedelta(seconds=self._timeout_s)
            )
        return self._groups[device.type]


@contextmanager
def _lost_rank_errors(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            f"another rank was lost: it ended, or did not answer for {timeout_s:g} s ({str(error).splitlines()[0]})"
        ) from None


# -- Memory ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        peak: of its process, with torch and pages of the checkpoint; on a GPU, of device memory.
        mapped: pages of the checkpoint in `peak`, which the system may drop.
    """

    rank: int
    weights: int
    kv: int
    peak: int
    mapped: int = 0

    def describe(self) -> str:
        """Peak memory of a process on the host, in words."""
        mapped_note = f", {self.mapped / 2**30:,.2f} of it pages of the model's file" if self.mapped else ""
        return f"{self.peak / 2**30:,.2f} GiB at most{mapped_note}"


def memory_here(ranks: Ranks, device: torch.device, weights: int, kv: int, files: Sequence[Path] = ()) -> RankMemory:
    """This rank's bytes; `peak` and `mapped` are measured now."""
    if device.type != "cpu":
        return RankMemory(ranks.rank, weights, kv, int(getattr(torch, device.type).max_memory_allocated(device)))
    return RankMemory(ranks.rank, weights, kv, peak_memory(), mapped_memory(files))
