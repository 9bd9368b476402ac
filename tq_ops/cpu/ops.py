"""The op table of CPUs: attention over packed codes, quantize-append and BF16 projections in C++, the rest by the reference.

Signatures and rounding points are those of `tq_ops.reference`; where they differ, it is said.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.layout import READS, Layout, layout, one_quantizer
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.reads import unsupported

# From so many tokens on the matrix product of torch overtakes reading the weight by rows.
_MOST_TOKENS_BY_ROWS = 64


class CpuOps:
    """The table, on one instruction level.

    Args:
        level: of `library.levels()`; the CPU's best unless given.
    Raises:
        KernelsMissingError: the kernels are not built.
        InputError: the CPU does not have that level.
    """

    rms_norm = staticmethod(reference.rms_norm)
    rope = staticmethod(reference.rope)
    silu_mul = staticmethod(reference.silu_mul)

    def __init__(self, level: str | None = None) -> None:
        self._library = library.load()
        available = library.levels()
        self.level = level or available[-1]
        if self.level not in available:
            raise InputError(f"this CPU has no kernels of level {self.level!r}; choose from {', '.join(available)}")
        self._level = library.LEVELS.index(self.level)
        self._caches: WeakKeyDictionary[PagedKVCache, dict[int, _Prepared]] = WeakKeyDictionary()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Projection `x @ weight.T`; few tokens by a BF16 weight in C++, where the weight is read once and as it is.

        Args:
            x: [T, in] bf16 or fp32.
            weight: [out, in] of x's dtype.
        Returns:
            [T, out] fp32.
        Rounding points: those of the reference: none but FP32 sums, in another order.
        """
        if weight.dtype != torch.bfloat16 or not 0 < x.shape[0] <= _MOST_TOKENS_BY_ROWS:
            return reference.linear(x, weight)
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty(x.shape[0], weight.shape[0])
        call = library.Linear(
            weight=weight.data_ptr(), x=x.data_ptr(), y=y.data_ptr(), tokens=x.shape[0], inputs=weight.shape[1],
            outputs=weight.shape[0], bf16=_is_bf16(x), level=self._level, threads=torch.get_num_threads(),
        )  # fmt: skip
        self._library.haarkv_linear(ctypes.byref(call))
        return y

    def store_kv(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        """Quantize K and V and store them, each once, at their slots; `tq4` in C++, `tbq4_0` as the reference does.

        Args:
            k, v: [T, Hkv, D] fp32 or bf16; K after RoPE.
            batch: says where they go.
        Raises:
            IndexError, NonFiniteError: as the reference; nothing of this layer was written.
            InputError: a plan or head_dim that the kernels cannot read.
        Rounding points: those of `tq4`; a level may differ from the reference's where FP32 sums in another order decide.
        """
        call = self._prepared(cache, layer).store
        if call is None:
            return reference.store_kv(k, v, cache, layer, batch)
        k, v, slots = k.contiguous(), v.contiguous(), batch.slot_mapping.contiguous()
        call = library.Store.from_buffer_copy(call)
        call.k, call.v, call.slots = k.data_ptr(), v.data_ptr(), slots.data_ptr()
        call.k_bf16, call.v_bf16, call.tokens, call.threads = _is_bf16(k), _is_bf16(v), k.shape[0], torch.get_num_threads()
        if self._library.haarkv_store(ctypes.byref(call)):
            # Nothing was written: the reference finds the fault again and names it.
            reference.store_kv(k, v, cache, layer, batch)
        return None

    def paged_attention(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        """Causal attention of new tokens over the packed codes of their sequences, in the rotated domain.

            logits = (q @ rotation . centroids[level]) * k_scale * softmax_scale
            out = sum((p * v_scale) * centroids[level]) / sum(p) @ rotation.T

        K and V exist un-packed in registers only. Sums do not depend on the number of threads, on the rest of the batch or on
        how a prompt was cut: 1,024 keys at a time, merged in order.

        Args:
            q: [T, Hq, D] bf16 or fp32, after RoPE.
            softmax_scale: of the logits, 1/sqrt(D).
        Returns:
            [T, Hq, D] of q's dtype.
        Raises:
            InputError: a plan or head_dim that the kernels cannot read.
        Rounding points: for a bf16 q, each block's probabilities (against the block's own maximum) to BF16, their sum taken
        of the rounded ones; blocks merged in FP32; the output to BF16. The rotated q stays in FP32.

        On level `avx512vnni` a bf16 q goes by sums of 16-bit integers, which are exact. Three more roundings, each by half a
        step at most: centroids to `Layout.levels` (5e-5 of a coordinate's standard deviation); the rotated q to steps of
        max|q| / 32,767 or, where 32 coordinates could overflow 32 bits, the least s with sum|q| / s <= 2**31 / largest level;
        p * v_scale of up to 128 keys likewise, by row. Logits are off by 2.4e-5 (q) and 3.1e-5 (centroids) of their standard
        deviation over random keys, root mean square; that q is BF16 has cost 1.1e-3 of it before. 128 weights are off by
        127 / 2 / 32,767 = 2e-3 of the largest together, at worst, where BF16 takes 2e-3 of each, or 2.3e-4 of their sum.
        """
        q, positions = q.contiguous(), batch.positions.contiguous()
        block_table, query_start = batch.block_table.contiguous(), batch.query_start_loc.contiguous()
        out = torch.empty_like(q)
        call = library.Attention.from_buffer_copy(self._prepared(cache, layer).attention)
        call.q, call.out, call.positions, call.num_heads = q.data_ptr(), out.data_ptr(), positions.data_ptr(), q.shape[1]
        call.block_table, call.query_start = block_table.data_ptr(), query_start.data_ptr()
        call.sequences, call.max_blocks = block_table.shape
        call.bf16, call.softmax_scale, call.threads = _is_bf16(q), softmax_scale, torch.get_num_threads()
        self._library.haarkv_attention(ctypes.byref(call))
        return out

    def _prepared(self, cache: PagedKVCache, layer: int) -> _Prepared:
        """The calls of one layer, made once a cache: filling them in takes longer than storing a token."""
        prepared = self._caches.setdefault(cache, {})
        if layer not in prepared:
            prepared[layer] = _prepare(cache, layer, self._level)
        return prepared[layer]


@dataclass(frozen=True)
class _Prepared:
    """Calls with all that a cache and a layer decide; `store` is None if the kernels cannot quantize its formats."""

    attention: library.Attention
    store: library.Store | None


def _prepare(cache: PagedKVCache, layer: int, level: int) -> _Prepared:
    """
    Raises:
        InputError: a plan or head_dim that the kernels cannot read.
    """
    if reason := unsupported(READS, cache.plan, cache.head_dim):
        raise InputError(reason)
    k_fields, v_fields = cache.k_fields(layer), cache.v_fields(layer)
    keys, values = (layout(kv_format, layer, cache.head_dim) for kv_format in cache.plan.layers[layer])
    attention = library.Attention(
        cache=library.Cache(
            k=_side(k_fields, keys), v=_side(v_fields, values),
            num_kv_heads=cache.num_kv_heads, head_dim=cache.head_dim, block_size=cache.block_size,
        ),
        q=0, out=0, turn=keys.rotate.data_ptr(), turn_back=values.rotate_back.data_ptr(), block_table=0, query_start=0,
        positions=0, sequences=0, max_blocks=0, num_heads=0, bf16=0, softmax_scale=0, level=level, threads=0,
    )  # fmt: skip
    if not one_quantizer(cache.plan.layers[layer], cache.head_dim):
        return _Prepared(attention, None)
    store = library.Store(
        k=0, v=0, k_bf16=0, v_bf16=0, k_codes=k_fields["codes"].data_ptr(), v_codes=v_fields["codes"].data_ptr(),
        k_scales=k_fields["scale"].data_ptr(), v_scales=v_fields["scale"].data_ptr(),
        k_codes_stride=k_fields["codes"].stride(0), v_codes_stride=v_fields["codes"].stride(0),
        k_scales_stride=k_fields["scale"].stride(0), v_scales_stride=v_fields["scale"].stride(0),
        quantizer=library.Quantizer(
            rotation=keys.rotation.data_ptr(), boundaries=keys.boundaries.data_ptr(), centroids=keys.centroids.data_ptr(),
            head_dim=cache.head_dim,
        ),
        slots=0, tokens=0, num_slots=cache.num_slots, num_kv_heads=cache.num_kv_heads, block_size=cache.block_size,
        level=level, threads=0,
    )  # fmt: skip
    return _Prepared(attention, store)


_IS_BF16 = {torch.bfloat16: True, torch.float32: False}


def _is_bf16(x: Tensor) -> bool:
    found = _IS_BF16.get(x.dtype)
    if found is None:
        raise TypeError(f"the kernels take bfloat16 or float32, not {x.dtype}")
    return found


def _side(fields: dict[str, Tensor], of: Layout) -> library.SideArgs:
    scale = fields["scale"]
    return library.SideArgs(
        codes=fields["codes"].data_ptr(), scales=scale.data_ptr(), centroids=of.centroids.data_ptr(),
        codes_stride=fields["codes"].stride(0), scales_stride=scale.stride(0),
        scales_per_vector=scale.shape[3] if scale.ndim == 4 else 1, unit=of.unit, levels=of.levels.data_ptr(),
    )  # fmt: skip
