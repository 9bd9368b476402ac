"""The attention implementation `tq` of transformers: decode steps read a `TQCache` as it is packed.

    model.set_attn_implementation("tq")

Importing this module registers it by transformers' own interface. A step of one token a row, padded on the left or not, goes
through the attention kernels for the device; everything else goes to transformers' SDPA with K and V restored, as it does
without it.
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

Attend = Callable[[Tensor, float, tuple[int, ...]], Tensor]


class Stored(Tensor):
    """K or V of a layer that is still packed: any op of torch restores it first, except attention that reads it packed.

    Args:
        restore: makes the tensor [B, Hkv, n, D].
        attend: (q [B, Hq, 1, D], softmax_scale, padding at the beginning of each row) -> [B, 1, Hq, D], attention over this
            layer's K and V.
        like: gives dtype and device.
        shape: of the tensor.
        padded: `attend` takes padding.
    """

    @staticmethod
    def __new__(
        cls, restore: Callable[[], Tensor], attend: Attend, like: Tensor, shape: Sequence[int], *, padded: bool = False
    ) -> Stored:
        stored: Stored = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=False
        )
        return stored

    def __init__(
        self, restore: Callable[[], Tensor], attend: Attend, like: Tensor, shape: Sequence[int], *, padded: bool = False
    ) -> None:
        self.attend, self.padded, self._restore = attend, padded, restore
        self._restored: Tensor | None = None

    def restored(self) -> Tensor:
        """[B, Hkv, n, D], made once."""
        if self._restored is None:
            self._restored = self._restore()
        return self._restored

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Stored, Stored.restored, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Stored({list(self.shape)}, {self.dtype})"


_NOT_COVERED = ("softcap", "position_bias", "s_aux", "cache", "sliding_window")
"""Arguments of models whose attention is more than a softmax over all tokens."""


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers asks for it.

    Args:
        module: the model's attention module.
        query: [B, Hq, n, D]; key, value: [B, Hkv, S, D].
        attention_mask: [B, 1, n, S], true where a query sees a token; None where it sees all up to its own.
    Returns:
        [B, n, Hq, D], and no weights.
    """
    scaling = kwargs.get("scaling")
    if (
        isinstance(key, Stored)
        and query.shape[2] == 1
        and query.dtype == key.dtype
        and scaling is not None
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in _NOT_COVERED)
    ):
        padding = () if attention_mask is None else left_padding(attention_mask) if key.padded else None
        if padding is not None:
            return key.attend(query, scaling, padding), None
    restored = dense(key), dense(value)
    out: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, *restored, attention_mask, **kwargs)
    return out


def left_padding(mask: Tensor) -> tuple[int, ...] | None:
    """How many tokens each row of a step's mask [B, 1, 1, S] hides at its beginning; None if it hides others, or all of a row.

    A mask of numbers, which are added to logits, is None as well.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return None
    seen = mask[:, 0, 0]
    counts = mask.shape[-1] - seen.sum(-1)
    if not torch.equal(seen, torch.arange(mask.shape[-1], device=mask.device) >= counts.unsqueeze(-1)):
        return None
    padding = tuple(counts.tolist())
    return None if max(padding) == mask.shape[-1] else padding


def dense(x: Tensor) -> Tensor:
    """K or V with numbers, whether it is packed or not."""
    return x.restored() if isinstance(x, Stored) else x


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that uses SDPA read packed K and V meanwhile; any other implementation is the caller's wish, and stays."""
    before = model.config._attn_implementation
    switched = before == "sdpa" and model._can_set_attn_implementation()
    if switched:
        model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        if switched:
            model.set_attn_implementation(before)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
