"""The attention implementation `tq` of transformers: decode steps read a `TQCache` as it is packed.

    model.set_attn_implementation("tq")

Importing this module registers it. A step of one token a row uses the attention kernels of the device; everything else,
padded rows included, uses transformers' SDPA with dequantized K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "tq"
"""Its name."""

Attend = Callable[[Tensor, float], Tensor]


class PackedTensor(Tensor):
    """K or V of a layer that is still packed; any op of torch except our attention dequantizes it first.

    Args:
        restore: returns the tensor [B, Hkv, n, D].
        attend: (q [B, Hq, 1, D], softmax_scale) -> [B, 1, Hq, D], over this layer's K and V.
        like: gives dtype and device.
    """

    @staticmethod
    def __new__(cls, restore: Callable[[], Tensor], attend: Attend, like: Tensor, shape: Sequence[int]) -> PackedTensor:
        tensor: PackedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=False
        )
        return tensor

    def __init__(self, restore: Callable[[], Tensor], attend: Attend, like: Tensor, shape: Sequence[int]) -> None:
        self.attend, self._restore = attend, restore
        self._restored: Tensor | None = None

    def materialize(self) -> Tensor:
        """[B, Hkv, n, D], cached."""
        if self._restored is None:
            self._restored = self._restore()
        return self._restored

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(PackedTensor, PackedTensor.materialize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, {self.dtype})"


_NOT_COVERED = ("softcap", "position_bias", "s_aux", "cache", "sliding_window")
"""Arguments of models whose attention is more than a softmax over all tokens."""


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it.

    Args:
        query: [B, Hq, n, D]; key, value: [B, Hkv, S, D].
        attention_mask: [B, 1, n, S], true where a query sees a token; None if causal.
    Returns:
        [B, n, Hq, D], and no weights.
    """
    scaling = kwargs.get("scaling")
    if (
        isinstance(key, PackedTensor)
        and query.shape[2] == 1
        and query.dtype == key.dtype
        and scaling is not None
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in _NOT_COVERED)
        and (attention_mask is None or (attention_mask.dtype == torch.bool and bool(attention_mask.all())))
    ):
        return key.attend(query, scaling), None
    dense_kv = dense(key), dense(value)
    out: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, *dense_kv, attention_mask, **kwargs)
    return out


def dense(x: Tensor) -> Tensor:
    """K or V, dequantized if packed."""
    return x.materialize() if isinstance(x, PackedTensor) else x


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that uses SDPA read packed K and V meanwhile; other implementations stay."""
    before = model.config._attn_implementation
    is_switched = before == "sdpa" and model._can_set_attn_implementation()
    if is_switched:
        model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        if is_switched:
            model.set_attn_implementation(before)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
