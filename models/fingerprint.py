"""A short word for a model's weights, so that what was learned from one model is not taken for another's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from haarkv.tq_ops.weight import Blocks, Weight, backing_tensor

_NUMBERS = 64


def fingerprint(named_tensors: Iterable[tuple[str, Weight]]) -> str:
    """Digest of a model: every tensor's name and shape, and its first and last 64 numbers in BF16.

    Few pages of a checkpoint are read, and a model that was loaded in another dtype has the same one. A tensor that has been
    met under another name, such as a tied head, does not count twice. Of blocks it is the restored numbers that count.

    Returns:
        16 hexadecimal digits.
    """
    seen_memory: set[tuple[int, torch.Size]] = set()
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda item: _in_order(item[0])):
        if (key := (backing_tensor(tensor).data_ptr(), tensor.shape)) in seen_memory:
            continue
        seen_memory.add(key)
        digest.update(_tensor_bytes(name, tensor))
    return digest.hexdigest()[:16]


def streamed_fingerprint(tensors: Iterable[tuple[str, Weight]]) -> str:
    """The same of tensors that come one by one, none under two names; none is kept."""
    bytes_by_name = {name: _tensor_bytes(name, tensor) for name, tensor in tensors}
    return hashlib.sha256(b"".join(bytes_by_name[name] for name in sorted(bytes_by_name, key=_in_order))).hexdigest()[:16]


def _tensor_bytes(name: str, tensor: Weight) -> bytes:
    if isinstance(tensor, Blocks):
        rows = -(-_NUMBERS // tensor.shape[1])
        first, last = (tensor.rows(part).reshape(-1) for part in (slice(rows), slice(-min(rows, len(tensor)), None)))
    else:
        first = last = tensor.detach().reshape(-1)
    ends = torch.cat([first[:_NUMBERS], last[-_NUMBERS:]]).to("cpu", torch.bfloat16)
    return f"{name} {list(tensor.shape)}\n".encode() + ends.view(torch.uint8).numpy().tobytes()


def _in_order(name: str) -> tuple[bool, str]:
    """The head last: where it is tied, it is the embedding's second name."""
    return name.startswith("lm_head"), name
