"""Paged storage of K and V in any format: fields by block, codes and scales apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tq_ops.errors import NonFiniteError
from tq_ops.formats import KVFormat, NonFiniteVectorError

BLOCK_SIZE = 128


class PagedKVCache:
    """The K and V of every layer, stored in blocks of tokens.

    Each field of a format is one zeroed tensor a layer, [num_blocks, Hkv, block_size, *field.shape]: one head's codes of
    one block lie together, which is the tile that a fused kernel loads. Slot s is row s % block_size of block
    s // block_size.

    Args:
        k_format, v_format: how K and V are stored; they may differ.
        num_layers, num_kv_heads, head_dim: the model's.
        num_blocks: blocks of each layer.
        block_size: tokens a block.
        device: where the tensors live.
    Raises:
        InputError: a format has no layout for this head_dim.
    """

    def __init__(
        self,
        k_format: KVFormat,
        v_format: KVFormat,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        device: torch.device | str = "cpu",
    ) -> None:
        self.k_format, self.v_format = k_format, v_format
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = torch.device(device)
        self._k = [self._allocate(k_format) for _ in range(num_layers)]
        self._v = [self._allocate(v_format) for _ in range(num_layers)]

    def _allocate(self, kv_format: KVFormat) -> dict[str, Tensor]:
        groups = self.block_size // kv_format.group_tokens
        return {
            name: torch.zeros(self.num_blocks, self.num_kv_heads, groups, *field.shape, dtype=field.dtype, device=self.device)
            for name, field in kv_format.fields(self.head_dim).items()
        }

    def k_fields(self, layer: int) -> dict[str, Tensor]:
        """The very tensors that hold a layer's K, by field name."""
        return self._k[layer]

    def v_fields(self, layer: int) -> dict[str, Tensor]:
        """The very tensors that hold a layer's V, by field name."""
        return self._v[layer]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Quantise and store K and V.

        Args:
            k, v: [T, Hkv, D] fp32 or bf16; K after RoPE, V as projected.
            slot_mapping: [T] int64, no slot twice.
        Raises:
            IndexError: a slot outside the cache.
            NonFiniteError: naming layer, side, token, slot and KV head; nothing of this layer was written.
        """
        if slot_mapping.numel() and not 0 <= int(slot_mapping.min()) <= int(slot_mapping.max()) < self.num_slots:
            raise IndexError(f"slots must lie in 0 … {self.num_slots - 1}")
        quantized = [
            _quantize(kv_format, side, x, layer, slot_mapping)
            for kv_format, side, x in ((self.k_format, "K", k), (self.v_format, "V", v))
        ]
        block, offset = slot_mapping // self.block_size, slot_mapping % self.block_size
        for fields, stored in zip(quantized, (self._k[layer], self._v[layer]), strict=True):
            for name, values in fields.items():
                stored[name][block, :, offset] = values

    def read(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """De-quantised K and V of whole blocks, for the reference and for tests.

        Args:
            block_table: [B, n] int32; -1 pads and reads as block 0, to be masked by the caller.
        Returns:
            K and V, each [B, Hkv, n * block_size, D] fp32.
        """
        k = _gather(self.k_format, self._k[layer], layer, block_table)
        return k, _gather(self.v_format, self._v[layer], layer, block_table)

    @property
    def num_slots(self) -> int:
        """Tokens that the cache can hold."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes really allocated: every field of every layer."""
        return sum(t.nbytes for layer in (*self._k, *self._v) for t in layer.values())


def _quantize(kv_format: KVFormat, side: str, x: Tensor, layer: int, slot_mapping: Tensor) -> dict[str, Tensor]:
    try:
        return kv_format.quantize(x, layer)
    except NonFiniteVectorError as error:
        token, head = error.index
        slot = int(slot_mapping[token])
        where = f"layer {layer}: {side} of token {token} of the batch (slot {slot}), KV head {head}"
        raise NonFiniteError(f"{where} is not finite or too large for {kv_format.name}") from None


def _gather(kv_format: KVFormat, stored: dict[str, Tensor], layer: int, block_table: Tensor) -> Tensor:
    blocks = block_table.clamp(min=0).long()
    # [B, n, Hkv, block, *] -> [B, Hkv, n * block, *]: a head's blocks one after the other.
    fields = {name: tensor[blocks].transpose(1, 2).flatten(2, 3) for name, tensor in stored.items()}
    return kv_format.dequantize(fields, layer)


def bytes_per_token(k_format: KVFormat, v_format: KVFormat, num_layers: int, num_kv_heads: int, head_dim: int) -> float:
    """KV bytes of one token in all layers and heads, K and V, scales included."""
    both = k_format.bytes_per_vector(head_dim) + v_format.bytes_per_vector(head_dim)
    return num_layers * num_kv_heads * both


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold so many tokens of one sequence."""
    return math.ceil(tokens / block_size)
