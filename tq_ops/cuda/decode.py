"""Decode attention in CUDA C++ (`csrc/decode.cu`): what it takes, its launch, and the memory that it needs.

It does what `attention.attend_kernel` and `merge_kernel` do for one new token a sequence, in one launch. The Triton kernels
stay for prompts, FP32, head_dim 64 but for tq4, and wherever CUDA C++ cannot be compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from haarkv.codebooks.cubic import WIDTHS
from haarkv.tq_ops.cuda import available
from haarkv.tq_ops.cuda.arguments import Part, layer_windows
from haarkv.tq_ops.cuda.available import capability, only_compiles, processors
from haarkv.tq_ops.cuda.layout import Layout, Rotated, make_columns
from haarkv.tq_ops.cuda.lookup import half_constants
from haarkv.tq_ops.errors import warn
from haarkv.tq_ops.formats.learned import COLUMNS as LEARNED
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.layer import LayerKV

SOURCES = Path(__file__).with_name("csrc")
THREADS = 256
TILE = 256
"""Tokens that a thread block takes at a time."""
_SPAN = 32  # of those a warp's; a window begins within one
MOST_BLOCKS = 128
"""Thread blocks that share a KV head's work, at most: the weights of so many parts fit in shared memory while they merge."""
_MOST_GROUP, _MOST_NUMBERS = 16, 2048  # query heads of a KV head; those times head_dim: more would spill
_WIDEST_LOAD = 16
_SEQUENCES = 1024  # that a cache's counters have room for at first


class _Side(ctypes.Structure):
    _fields_: ClassVar = [
        ("codes", ctypes.c_int64), ("scales", ctypes.c_int64),
        ("codes_stride", ctypes.c_int), ("scales_stride", ctypes.c_int),
    ]  # fmt: skip


class Arguments(ctypes.Structure):
    """`Arguments` of csrc/decode.cu."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in (
            "q", "out", "rotation", "parts", "part_maxima", "part_sums", "arrived", "positions", "seq_lens", "block_table",
            "k_centroids", "v_centroids", "in_bf16", "in_bf16_maxima", "in_bf16_sums", "gains", "lacks",
        )),
        ("k", _Side), ("v", _Side), ("sequences", ctypes.c_int), ("table_width", ctypes.c_int), ("scale", ctypes.c_float),
    ]  # fmt: skip


class Shape(NamedTuple):
    """What the kernel is compiled for; the source asks its caller to define these, in capitals."""

    heads: int
    group: int
    head_dim: int
    k_bits: int
    v_bits: int
    block: int
    processor_blocks: int
    tail: int
    sink: int
    k_learned: int
    window: int = 0


_BITS = (2, 3, 4)
_STEP_BYTES = 48  # bytes of shared memory
_RESERVED_BYTES = 1024
"""Bytes of shared memory that each thread block takes beside its own."""


def takes(q: Tensor, kv: LayerKV, k: Layout, v: Layout) -> bool:
    """Whether the kernel is made for these queries [B, Hq, D], one a sequence, and this cache, and can be compiled here."""
    group, head_dim = q.shape[1] // kv.shape.num_kv_heads, q.shape[2]
    bits = {v.bits} if k.learned else {k.bits, v.bits}
    compiles = (bits <= {4} and not k.learned) or (head_dim > 64 and bits <= {*_BITS})
    fits = group <= _MOST_GROUP and _columns(group) * head_dim <= _MOST_NUMBERS and kv.block_size % 16 == 0
    if not (compiles and fits and q.is_cuda and q.dtype == torch.bfloat16) or available.nvrtc_missing():
        return False
    if shared_bytes(group, head_dim) > available.most_shared_bytes(q.device):
        return False
    if not all(_is_aligned(fields["codes"]) for fields in kv.fields):
        return False
    return q.device.type != "cuda" or _is_usable(kernel_shape(q, kv, k, v), device=q.device)


def kernel_shape(q: Tensor, kv: LayerKV, k: Layout, v: Layout) -> Shape:
    """What is compiled for a call."""
    kv_shape, windows = kv.shape, layer_windows(kv)
    group = q.shape[1] // kv_shape.num_kv_heads
    return Shape(
        kv_shape.num_kv_heads, group, kv_shape.head_dim, k.bits, v.bits, kv.block_size,
        blocks_a_processor(group, kv_shape.head_dim, available.processor_shared_bytes(q.device)),
        windows.tail if windows else 0, windows.sink if windows else 0, int(k.learned is not None), kv_shape.window or 0,
    )  # fmt: skip


def _is_aligned(codes: Tensor) -> bool:
    """Whether every token's bytes begin where the widest load may, and a block's stride fits 32 bits."""
    return codes.data_ptr() % _WIDEST_LOAD == codes.stride(0) % _WIDEST_LOAD == 0 and codes.stride(0) < 2**31


@cache
def _is_usable(shape: Shape, device: torch.device) -> bool:
    """Whether it can be compiled and loaded; if not, a warning says why, once, and the Triton kernels run."""
    try:
        _kernel(shape, device)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        warn(f"decode attention runs in Triton: CUDA C++ cannot be used on {device}: {reason}")
        return False
    return True


def blocks_a_processor(group: int, head_dim: int, memory: int) -> int:
    """Thread blocks that a processor holds at once: two of 128 registers a thread, or one where that is too few.

    Args:
        memory: shared memory of a processor. A consumer GPU's holds one.
    """
    register_limit = 2 if _columns(group) * head_dim <= 8 * 128 else 1
    return max(1, min(register_limit, memory // (shared_bytes(group, head_dim) + _RESERVED_BYTES)))


def shared_bytes(group: int, head_dim: int) -> int:
    """Dynamic shared memory of a thread block: the table of pairs, an output, the weights of its parts, maxima and sums."""
    return 65536 + _columns(group) * (head_dim + MOST_BLOCKS + 2 * (THREADS // 32 + 1)) * 4 + _STEP_BYTES


def _columns(group: int) -> int:
    return 8 * int(triton.cdiv(group, 8))


def compile_kernel(target: str, *values: int) -> bytes:
    """What NVRTC makes of `csrc/decode.cu` for the values of a `Shape`."""
    shape = Shape(*values)
    macros: dict[str, int | str] = {name.upper(): value for name, value in shape._asdict().items()}
    if shape.k_learned:
        columns = make_columns(LEARNED[shape.k_bits])
        cubic = (tuple(number & 0xFFFF for number in half_constants(bits, place=1)[2:]) for bits in WIDTHS)
        macros |= {"K_COLUMNS": _rows(columns.units), "K_PARTS": _rows(columns.parts), "K_CUBIC": _rows(cubic)}
    # What is written down here and there is compared as it is compiled.
    macros |= {
        "SHARED_BYTES": shared_bytes(shape.group, shape.head_dim), "ARGUMENT_BYTES": ctypes.sizeof(Arguments),
        "BLOCK_THREADS": THREADS, "TILE_TOKENS": TILE, "MOST_BLOCKS": MOST_BLOCKS,
        "STRETCH": STRETCH,
    }  # fmt: skip
    return available.compiled_cpp(SOURCES, "decode.cu", target, macros)


def _rows(rows: Iterable[tuple[int, ...]]) -> str:
    """Tuples as C++ initializes an array of structures with them."""
    return ",".join(f"{{{','.join(map(str, row))}}}" for row in rows)


@cache
def _kernel(shape: Shape, device: torch.device) -> available.Kernel:
    shared = shared_bytes(shape.group, shape.head_dim)
    return available.Kernel(compile_kernel(f"sm_{capability(device)}", *shape), "decode", shared, device)


# A counter a sequence and KV head, zeros between launches. Launches over one cache follow each other, so they share them.
_counters: WeakKeyDictionary[PagedKVCache, list[Tensor]] = WeakKeyDictionary()


def _counter_set(cache: PagedKVCache, sequences: int, heads: int, device: torch.device) -> Tensor:
    counters = _counters.setdefault(cache, [])
    # Earlier ones stay alive: a captured graph may hold them.
    if not counters or counters[-1].numel() < sequences * heads:
        room = max(_SEQUENCES, 1 << (sequences - 1).bit_length())
        counters.append(torch.zeros(room * heads, dtype=torch.int32, device=device))
    return counters[-1]


def count_blocks(sequences: int, heads: int, most_tokens: int, at_once: int, device: torch.device) -> int:
    """Thread blocks that share a KV head's work: as many as run at once, and no more than there are tiles at most."""
    return max(1, min(at_once * processors(device) // heads, MOST_BLOCKS, sequences * -(-most_tokens // TILE)))


def attend(
    q: Tensor, rotated: Rotated, at: LayerView, k: Layout, v: Layout, scale: float, in_bf16: Part | None = None
) -> Tensor:
    """Attention of one new token a sequence, in one launch and without waiting for the device.

    Rounding points: those of the Triton kernels: queries, centroids and probabilities (in units of a power of two below the
    largest V scale so far) in FP16, sums in FP32; the probabilities are summed before they are rounded.

    Args:
        q: [B, Hq, D] bf16, for its shape and device.
        rotated: the same, from `ops.rotate`.
        scale: softmax_scale * log2(e).
        in_bf16: what `attend_kept` makes of the tokens in BF16, where some stay in it.
    Returns:
        [B, Hq, D] bf16.

    Calls over one cache must follow each other on one stream: they share counters, which the first of them makes. Make it
    before a graph is captured, as a warm-up does.
    """
    shape, sequences, device = kernel_shape(q, at.kv, k, v), len(q), q.device
    batch, heads, table = at.batch, shape.heads, at.batch.block_table.contiguous()
    capacity = table.shape[1] * at.kv.block_size
    most_tokens = min(capacity, shape.window + _SPAN) if shape.window else capacity
    blocks = count_blocks(sequences, heads, most_tokens, shape.processor_blocks, device)
    columns = _columns(shape.group)
    slots = blocks * heads * 2  # of thread blocks: the end of one sequence and the begin of the next
    sums = torch.empty(slots * columns * shape.head_dim, dtype=torch.float32, device=device)
    maxima, totals = torch.empty(2, slots * columns, dtype=torch.float32, device=device)
    out = torch.empty_like(q)

    def side(fields: dict[str, Tensor]) -> _Side:
        codes, scales = fields["codes"], fields["scale"]
        return _Side(available.address(codes), available.address(scales), codes.stride(0), scales.stride(0))

    pointers = (
        rotated.queries, out, v.rotation, sums, maxima, totals, _counter_set(at.cache, sequences, heads, device),
        batch.positions, batch.seq_lens, table, k.centroids, v.centroids,
        *((in_bf16.parts, in_bf16.maxima, in_bf16.sums) if in_bf16 else (None, None, None)),
        rotated.gains, rotated.lacks,
    )  # fmt: skip
    arguments = Arguments(
        *(0 if tensor is None else available.address(tensor) for tensor in pointers),
        *map(side, at.kv.fields), sequences, table.shape[1], scale,
    )  # fmt: skip
    kernel = _kernel(shape, device)
    if not only_compiles():
        kernel.launch((blocks, heads), THREADS, arguments)
    return out
