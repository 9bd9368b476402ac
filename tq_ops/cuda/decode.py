"""Decode attention in CUDA C++ (`csrc/decode.cu`): what it takes, its compilation, its launch, and the memory that it needs.

It does what `attention` does for one new token a sequence, in one launch. Triton attends to prompts, in FP32, at head_dim 64
but for tq4, and wherever CUDA C++ cannot be compiled. It is compiled where it runs, by NVIDIA's own bindings of NVRTC and of
the driver. PyTorch brings NVRTC with its CUDA builds, so no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.codebooks.cubic import WIDTHS
from haarkv.tq_ops.cuda import schedule
from haarkv.tq_ops.cuda.available import only_compiles
from haarkv.tq_ops.cuda.in_bf16 import Part, layer_windows
from haarkv.tq_ops.cuda.layout import Layout, make_columns
from haarkv.tq_ops.cuda.lookup import half_constants
from haarkv.tq_ops.cuda.rotate import Rotated
from haarkv.tq_ops.errors import warn
from haarkv.tq_ops.formats.learned import COLUMNS as LEARNED
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.layer import LayerKV

SOURCES = Path(__file__).with_name("csrc")
THREADS = 256
TILE = 256
"""Tokens that a thread block takes at a time."""
_SPAN = 32  # tokens that a warp takes of a tile at a time; a sliding window may begin within them
MOST_BLOCKS = 128
"""Thread blocks that share a KV head's work, at most: their parts' weights fit in shared memory while they merge."""
_MOST_GROUP, _MOST_NUMBERS = 16, 2048  # query heads of a KV head; those times head_dim: more would spill
_WIDEST_LOAD = 16
_SEQUENCES = 1024  # that a cache's counters have room for at first
_BITS = {2, 3, 4}
_STEP_BYTES = 48  # bytes of shared memory
_RESERVED_BYTES = 1024  # of shared memory, that each thread block takes beside its own


class _Side(ctypes.Structure):
    _fields_: ClassVar = [
        ("codes", ctypes.c_int64), ("scales", ctypes.c_int64),
        ("codes_stride", ctypes.c_int), ("scales_stride", ctypes.c_int),
    ]  # fmt: skip


class Arguments(ctypes.Structure):
    """`Arguments` of csrc/shapes.cuh."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in (
            "q", "out", "rotation", "parts", "part_maxima", "part_sums", "arrived", "positions", "seq_lens", "block_table",
            "k_centroids", "v_centroids", "in_bf16", "in_bf16_maxima", "in_bf16_sums", "gains", "lacks",
        )),
        ("k", _Side), ("v", _Side), ("sequences", ctypes.c_int), ("table_width", ctypes.c_int), ("scale", ctypes.c_float),
    ]  # fmt: skip


class Shape(NamedTuple):
    """The macros, in capitals, that csrc/decode.cu is compiled with."""

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


def takes(q: Tensor, kv: LayerKV, k: Layout, v: Layout) -> bool:
    """Whether the kernel is made for queries [B, Hq, D], one a sequence, and this cache, and can be compiled here."""
    group, head_dim = q.shape[1] // kv.shape.num_kv_heads, q.shape[2]
    bits = {v.bits} if k.learned else {k.bits, v.bits}
    compiles = (bits <= {4} and not k.learned) or (head_dim > 64 and bits <= _BITS)
    fits = group <= _MOST_GROUP and _columns(group) * head_dim <= _MOST_NUMBERS and kv.block_size % 16 == 0
    if not (compiles and fits and q.is_cuda and q.dtype == torch.bfloat16) or nvrtc_missing():
        return False
    if shared_bytes(group, head_dim) > shared_memory(q.device)[0]:
        return False
    if not all(_is_aligned(fields["codes"]) for fields in kv.fields):
        return False
    return q.device.type != "cuda" or _is_usable(kernel_shape(q, kv, k, v), device=q.device)


def kernel_shape(q: Tensor, kv: LayerKV, k: Layout, v: Layout) -> Shape:
    """A call's `Shape`."""
    kv_shape, windows = kv.shape, layer_windows(kv)
    group = q.shape[1] // kv_shape.num_kv_heads
    return Shape(
        kv_shape.num_kv_heads, group, kv_shape.head_dim, k.bits, v.bits, kv.block_size,
        blocks_a_processor(group, kv_shape.head_dim, shared_memory(q.device)[1]),
        windows[0].tail if windows else 0, windows[0].sink if windows else 0, int(k.learned is not None), kv_shape.window or 0,
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
    """Thread blocks that a processor with this shared memory holds: two of 128 registers a thread, or one if those spill."""
    register_limit = 2 if _columns(group) * head_dim <= 8 * 128 else 1
    return max(1, min(register_limit, memory // (shared_bytes(group, head_dim) + _RESERVED_BYTES)))


def shared_bytes(group: int, head_dim: int) -> int:
    """Dynamic shared memory of a thread block: the table of pairs, an output, the weights of its parts, maxima and sums."""
    return 65536 + _columns(group) * (head_dim + MOST_BLOCKS + 2 * (THREADS // 32 + 1)) * 4 + _STEP_BYTES


def _columns(group: int) -> int:
    return -(-group // 8) * 8


def compile_kernel(target: str, *values: int) -> bytes:
    """csrc/decode.cu compiled for the values of a `Shape`; target `sm_90` gives machine code, `compute_90` PTX."""
    shape = Shape(*values)
    macros: dict[str, int | str] = {name.upper(): value for name, value in shape._asdict().items()}
    if shape.k_learned:
        columns = make_columns(LEARNED[shape.k_bits])
        cubic = (tuple(number & 0xFFFF for number in half_constants(bits, place=1)[2:]) for bits in WIDTHS)
        macros |= {"K_COLUMNS": _rows(columns.units), "K_PARTS": _rows(columns.parts), "K_CUBIC": _rows(cubic)}
    # What is written down here and there is compared as it is compiled.
    macros |= {
        "SHARED_BYTES": shared_bytes(shape.group, shape.head_dim), "ARGUMENT_BYTES": ctypes.sizeof(Arguments),
        "BLOCK_THREADS": THREADS, "TILE_TOKENS": TILE, "MOST_BLOCKS": MOST_BLOCKS, "STRETCH": STRETCH,
    }  # fmt: skip
    return compile_source(target, macros)


def _rows(rows: Iterable[tuple[int, ...]]) -> str:
    """Tuples as C++ initializes an array of structures with them."""
    return ",".join(f"{{{','.join(map(str, row))}}}" for row in rows)


@cache
def _kernel(shape: Shape, device: torch.device) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    binary = compile_kernel(f"sm_{major}{minor}", *shape)
    return Kernel(binary, "decode", shared_bytes(shape.group, shape.head_dim), device)


# A counter a sequence and KV head, zeros between launches. Launches over one cache follow each other, so they share them.
_counters: WeakKeyDictionary[PagedKVCache, list[Tensor]] = WeakKeyDictionary()


def _counter_set(cache: PagedKVCache, sequences: int, heads: int, device: torch.device) -> Tensor:
    counters = _counters.setdefault(cache, [])
    # Earlier ones stay alive: a captured graph may hold them.
    if not counters or counters[-1].numel() < sequences * heads:
        room = max(_SEQUENCES, 1 << (sequences - 1).bit_length())
        counters.append(torch.zeros(room * heads, dtype=torch.int32, device=device))
    return counters[-1]


def attend(
    q: Tensor, rotated: Rotated, at: LayerView, layouts: tuple[Layout, Layout], scale: float, in_bf16: Part | None = None
) -> Tensor:
    """Attention of one new token a sequence [B, Hq, D] bf16, in one launch and without waiting for the device.

    Rounding points: as of the Triton kernels. Calls over one cache must follow each other on one stream: they share counters,
    which the first of them makes, before a graph is captured.

    Args:
        q: for its shape and device; `rotated`: the same, from `prologue.rotate`.
        layouts: of K and V.
        scale: softmax_scale * log2(e).
        in_bf16: from `attend_windows`, where tokens stay in BF16.
    """
    (k, v), batch, sequences, device = layouts, at.batch, len(q), q.device
    shape, table = kernel_shape(q, at.kv, k, v), batch.block_table.contiguous()
    visible = schedule.most_visible(table.shape[1] * at.kv.block_size, at.kv.shape.window, 1, _SPAN)
    most_tiles = min(MOST_BLOCKS, sequences * -(-visible // TILE))
    blocks = schedule.count_programs(shape.heads, most_tiles, device, shape.processor_blocks)
    # Two parts a thread block: the end of one sequence and the begin of the next.
    vectors, out = blocks * shape.heads * 2 * _columns(shape.group), torch.empty_like(q)
    parts, (maxima, sums) = torch.empty(vectors * shape.head_dim, device=device), torch.empty(2, vectors, device=device)
    pointers = {
        "q": rotated.queries, "out": out, "rotation": v.rotation, "parts": parts, "part_maxima": maxima, "part_sums": sums,
        "arrived": _counter_set(at.cache, sequences, shape.heads, device), "positions": batch.positions,
        "seq_lens": batch.seq_lens, "block_table": table, "k_centroids": k.centroids, "v_centroids": v.centroids,
        "gains": rotated.gains, "lacks": rotated.lacks,
    }  # fmt: skip
    if in_bf16:
        pointers |= {"in_bf16": in_bf16.vectors, "in_bf16_maxima": in_bf16.maxima, "in_bf16_sums": in_bf16.sums}

    def side(fields: dict[str, Tensor]) -> _Side:
        codes, scales = fields["codes"], fields["scale"]
        return _Side(address(codes), address(scales), codes.stride(0), scales.stride(0))

    arguments = Arguments(
        **{name: address(tensor) for name, tensor in pointers.items() if tensor is not None},
        k=side(at.kv.k.fields), v=side(at.kv.v.fields), sequences=sequences, table_width=table.shape[1],
        scale=scale,
    )  # fmt: skip
    kernel = _kernel(shape, device)
    if not only_compiles():
        kernel.launch((blocks, shape.heads), THREADS, arguments)
    return out


# -- NVRTC and the driver ----------------------------------------------------------------------------------------------
class CompileError(RuntimeError):
    """NVRTC refused a source; the text is its log."""


@cache
def nvrtc_missing() -> str | None:
    """None, or in one sentence why no CUDA C++ can be compiled."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed; pip install 'haarkv[cuda]'"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        message = " ".join(str(error).split())
        return f"NVRTC cannot be loaded; pip install 'cuda-bindings=={major}.*' beside a PyTorch for CUDA {major} ({message})"
    return None


def compile_source(target: str, macros: Mapping[str, int | str]) -> bytes:
    """csrc/decode.cu and the headers beside it, compiled; CompileError with NVRTC's log."""
    from cuda.bindings import nvrtc

    headers, source = sorted(SOURCES.glob("*.cuh")), (SOURCES / "decode.cu").read_bytes()
    texts, names = [header.read_bytes() for header in headers], [header.name.encode() for header in headers]
    program = _require_success(nvrtc.nvrtcCreateProgram(source, b"decode.cu", len(headers), texts, names))
    try:
        options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{key}={value}" for key, value in macros.items())]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(result):
            log = bytes(_require_success(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(log.decode(errors="replace").strip("\0 \n"))
        binary = target.startswith("sm_")
        size, get = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if binary else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        out = bytes(_require_success(size(program)))
        _require_success(get(program, out))
        return out
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Kernel:
    """A kernel of machine code on one GPU, and the dynamic shared memory of its thread blocks, in bytes."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._device, self._shared_bytes = device, shared_bytes
        with torch.cuda.device(device):
            self._module = _require_success(driver.cuModuleLoadData(binary))
            self._function = _require_success(driver.cuModuleGetFunction(self._module, name.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _require_success(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    def launch(self, grid: tuple[int, int], threads: int, arguments: ctypes.Structure) -> None:
        """Queue one launch on PyTorch's current stream; its one parameter is a structure passed by value."""
        from cuda.bindings import driver

        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream().cuda_stream
            _require_success(
                driver.cuLaunchKernel(
                    self._function, *grid, 1, threads, 1, 1, self._shared_bytes, stream, ctypes.addressof(parameters), 0
                )
            )


def address(tensor: Tensor) -> int:
    """A tensor's address for a kernel."""
    return tensor.data_ptr()


@cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory that a thread block may ask for, and of a processor; an H100's where there is no GPU."""
    if device.type != "cuda":
        return 227 * 1024, 228 * 1024
    from cuda.bindings import driver

    torch.cuda.init()
    number = _require_success(driver.cuDeviceGet(torch.cuda.current_device() if device.index is None else device.index))
    names = "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"
    attributes = (getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}") for name in names)
    block, processor = (int(_require_success(driver.cuDeviceGetAttribute(one, number))) for one in attributes)
    return block, processor


def _require_success(response: tuple[Any, ...]) -> Any:
    """The rest of a response of the bindings, whose first part must be success."""
    result, *rest = response
    if int(result):
        raise RuntimeError(f"{type(result).__name__}: {result.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)
