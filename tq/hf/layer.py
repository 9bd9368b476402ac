"""One layer of the cache, with the methods that transformers calls; and transformers' attention implementation `tq`, whose
decode steps read it as it is packed.

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
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from haarkv.models.balance import Scales
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from tq.hf.store import Store

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


# -- The layer ----------------------------------------------------------------------------------------------------------


class TQLayer(CacheLayerMixin):  # type: ignore[misc]
    """K and V of one layer, packed; replaces transformers' `DynamicLayer` or `DynamicSlidingWindowLayer`.

    `keys` and `values` stay None.

    Args:
        layer: index of the layer, which chooses the rotation.
        sink, tail: tokens in the model's dtype; the tail of K and of V.
        window: sliding window in tokens, or None.
        scales: of K's and V's channels.
        require_context: refuses more tokens than the formats hold for.
        reads_packed: whether the model's attention is `attention`.
    """

    is_compileable = False

    def __init__(
        self, k_format: KVFormat, v_format: KVFormat, layer: int, *, sink: int, tail: tuple[int, int], window: int | None,
        scales: Scales = (None, None), require_context: Callable[[int], None] = lambda _: None,
        reads_packed: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.k_format, self.v_format, self.layer = k_format, v_format, layer
        self.sink, self.tail, self.sliding_window = sink, tail, window
        self.is_sliding = window is not None
        self._scales, self._require_context = scales, require_context
        self._reads_packed = reads_packed
        # A token that has left the tail returns to it as it is packed.
        self.is_croppable = tail == (0, 0)
        self.record_past = False
        self.store: Store | None = None

    def __repr__(self) -> str:
        return f"TQLayer({self.layer}, k={self.k_format.name}, v={self.v_format.name})"

    @torch.inference_mode(False)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shapes, dtype and device of K and V [B, Hkv, n, D]."""
        self.store = Store(
            self.layer, (self.k_format, self.v_format), (key_states, value_states), sink=self.sink, tails=self.tail,
            scales=self._scales,
        )  # fmt: skip
        self.is_initialized = True

    # This memory is written again later, so it must not belong to an inference mode that may have ended.
    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens and return all visible ones in temporaries, as `Store.extend` says.

        Args:
            key_states, value_states: [B, Hkv, n, D] of a floating dtype; K after RoPE.
        Returns:
            K and V, each [B, Hkv, visible + n, D] in the dtype handed in, without gradient; packed where attention reads that.
        Raises:
            InputError: other shapes than before, a head_dim without layout, or more tokens than learned coordinates hold for.
            NonFiniteError: naming layer, side, row, KV head and position; nothing was stored.
        """
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store, states, count = self.store, (key_states, value_states), key_states.shape[2]
        assert store is not None
        self._check_shapes(store, states)
        self._require_context(store.end + count)
        # Formats choose their own precision, even in a model that runs under autocast.
        with torch.autocast(key_states.device.type, enabled=False):
            if count == 1 and self.sliding_window is None and self._reads_packed() and store.kernels:
                store.write(*states)
                return self._packed_tensor(store, 0, key_states), self._packed_tensor(store, 1, value_states)
            keys, values = store.extend(states, self._visible(store.end))
        if not self.record_past:
            self._forget(store)
        return keys, values

    @staticmethod
    def _packed_tensor(store: Store, side: int, x: Tensor) -> PackedTensor:
        tokens = store.end
        return PackedTensor(lambda: store.read(side, tokens, x.dtype), store.attend, x, (*x.shape[:2], tokens, x.shape[3]))

    def _check_shapes(self, store: Store, states: tuple[Tensor, Tensor]) -> None:
        for name, x, head_dim in zip("KV", states, store.head_dims, strict=True):
            if (x.shape[0], x.shape[1], x.shape[3]) != (store.rows, store.heads, head_dim):
                raise InputError(
                    f"layer {self.layer}: {name} has the shape {list(x.shape)}, but the cache holds {store.rows} rows of "
                    f"{store.heads} KV heads of {head_dim}; reset() empties it"
                )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that the next `update` with this many new ones returns, and the position of the first."""
        length = self.get_seq_length()
        visible = self._visible(length)
        return visible + query_length, length - visible

    def get_seq_length(self) -> int:
        """Tokens seen, those outside the window included."""
        return self.store.end if self.store else 0

    def get_max_length(self) -> int:
        """The sliding window in tokens; -1 without one."""
        return -1 if self.sliding_window is None else self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next `crop`, so that it can go back."""
        self.record_past = True

    def reset(self) -> None:
        """Forget everything, shapes included."""
        self.store, self.is_initialized, self.record_past = None, False, False

    @torch.inference_mode(False)
    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens; an InputError if others that left the window had to come back."""
        if tokens_to_remove > 0:
            raise InputError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")
        if (store := self.store) is None:
            return
        left = max(store.end + tokens_to_remove, 0)
        if left - store.begin < self._visible(left):
            raise InputError(
                f"layer {self.layer}: {store.end - left} tokens cannot be removed, the window of {self.sliding_window} has "
                "already left the tokens before them behind; call activate_past_recording() first"
            )
        store.drop_newest(store.end - left)
        self._forget(store)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row beam_idx[i] [B] int64."""
        self._apply(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self._apply(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: [n] int64, or [B] bool."""
        self._apply(lambda tensor: tensor[torch.as_tensor(indices, device=tensor.device)])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _apply(self, change: Any) -> None:
        if self.store:
            self.store.apply(change)

    def _visible(self, length: int) -> int:
        """Of this many tokens, those that the next one may see."""
        return length if self.sliding_window is None else min(length, self.sliding_window - 1)

    def _forget(self, store: Store) -> None:
        if self.sliding_window is not None:
            store.keep_newest(self._visible(store.end))
