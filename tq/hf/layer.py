"""One layer of the cache, with the methods that transformers calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from haarkv.models.balance import Scales
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from tq.hf.attention import PackedTensor
from tq.hf.store import Store


class TQLayer(CacheLayerMixin):  # type: ignore[misc]
    """K and V of one layer, packed; replaces transformers' `DynamicLayer` or `DynamicSlidingWindowLayer`.

    `keys` and `values` stay None.

    Args:
        layer: index of the layer, which chooses the rotation.
        sink, tail: tokens in the model's dtype; the tail of K and of V.
        window: sliding window in tokens, or None.
        scales: of K's and V's channels.
        require_context: refuses more tokens than the formats hold for.
        reads_packed: whether the model's attention is `tq.hf.attention`.
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
        """Store new tokens and return all visible tokens, as stored, in temporaries.

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
            visible = self.get_mask_sizes(count)[0]
            store.write(*states)
            if count == 1 and self.sliding_window is None and self._reads_packed() and store.kernels:
                return self._packed_tensor(store, 0, key_states), self._packed_tensor(store, 1, value_states)
            keys, values = (store.read(side, visible, x.dtype) for side, x in enumerate(states))
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
