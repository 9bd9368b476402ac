"""The SHA-256 that a file of tensors carries of everything else in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 in hex of metadata, in the order of its keys, then of each tensor by name: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for key, value in sorted(metadata.items()):
        digest.update(f"{key}={value}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
