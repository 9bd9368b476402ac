"""The compiled kernels, loaded once, and the structures of their C interface (csrc/driver.cpp)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache

from torch import Tensor

from haarkv.tq_ops.cpu.build import LIBRARY
from haarkv.tq_ops.errors import InputError

ISAS = ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""Instruction sets. Each needs more of the CPU than the one before; the index is the library's own number for it."""


class Cell(IntEnum):
    """What a side stores, as csrc/kernels.h says."""

    NIBBLE = 4
    BYTE = 8
    BF16 = 16
    FP32 = 32
    MIXED = 1


class Gate(IntEnum):
    """What a gate goes through, as csrc/kernels.h says."""

    SILU = 0
    GELU = 1
    SIGMOID = 2


class Structure(ctypes.Structure):
    """A C structure that keeps the tensors alive whose addresses it holds.

    Give every field by name, so that the two sides cannot be mixed up by position: a tensor for a pointer, 0 for one that each
    call fills in. A copy (`from_buffer_copy`) owns nothing: keep the original as long as the copy is used.
    """

    def __init__(self, **fields: object) -> None:
        missing = {name for name, _ in self._fields_} ^ fields.keys()  # type: ignore[misc]
        assert not missing, missing
        self.owned = [value for value in fields.values() if isinstance(value, (Tensor, Structure))]
        super().__init__(**{name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in fields.items()})


class Kept(Structure):
    """Tokens in BF16 beside what is packed; no vectors where there are none."""

    _fields_ = (
        ("vectors", c_void_p), ("block_stride", c_int64), ("tail", c_int32), ("sink", c_int32), ("ring", c_int32),
        ("block_size", c_int32),
    )  # fmt: skip


class SideArgs(Structure):
    """K or V of one layer."""

    _fields_ = (
        ("codes", c_void_p), ("scales", c_void_p), ("centroids", c_void_p), ("codes_stride", c_int64),
        ("scales_stride", c_int64), ("levels", c_int32), ("bytes", c_int32), ("cell", c_int32), ("first_plane", c_int32),
        ("second_plane", c_int32), ("unit", c_float), ("integers", c_void_p), ("mean", c_void_p), ("columns", c_void_p),
        ("kept", Kept),
    )  # fmt: skip


class Cache(Structure):
    """Both sides and their shape."""

    _fields_ = (("k", SideArgs), ("v", SideArgs), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("block_size", c_int32))


class Matrix(Structure):
    """A matrix, or one of each KV head."""

    _fields_ = (
        ("numbers", c_void_p), ("pairs", c_void_p), ("head_stride", c_int64), ("inputs", c_int32), ("outputs", c_int32),
        ("bf16", c_int32),
    )  # fmt: skip


class Stretches(Structure):
    """How RoPE turns keys that are stored by stretches."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("half", c_int32), ("count", c_int32))


class Attention(Structure):
    """One call of `haarkv_attention`."""

    _fields_ = (
        ("cache", Cache), ("stretches", Stretches), ("q", c_void_p), ("out", c_void_p), ("rotation", Matrix),
        ("rotation_back", Matrix), ("block_table", c_void_p), ("query_start", c_void_p), ("positions", c_void_p),
        ("rows", c_void_p), ("kept_table", c_void_p), ("sequences", c_int32), ("max_blocks", c_int32),
        ("kept_blocks", c_int32), ("num_heads", c_int32), ("bf16", c_int32), ("window", c_int32), ("softmax_scale", c_float),
        ("isa", c_int32), ("threads", c_int32),
    )  # fmt: skip


class Quantizer(Structure):
    """The tables by which vectors are quantized; those from `mean` to `tries` are of learned keys."""

    _fields_ = (
        ("matrix", Matrix), ("boundaries", c_void_p), ("centroids", c_void_p), ("mean", c_void_p), ("weights", c_void_p),
        ("gains", c_void_p), ("columns", c_void_p), ("tries", c_int32), ("along", c_int32),
        ("first_plane", c_int32), ("second_plane", c_int32), ("bytes", c_int32), ("cell", c_int32),
    )  # fmt: skip


class StoreSide(Structure):
    """K or V of new tokens and where they go."""

    _fields_ = (
        ("x", c_void_p), ("codes", c_void_p), ("scales", c_void_p), ("codes_stride", c_int64), ("scales_stride", c_int64),
        ("quantizer", Quantizer), ("stretches", Stretches), ("kept", Kept), ("bf16", c_int32),
    )  # fmt: skip


class Store(Structure):
    """One call of `haarkv_store`."""

    _fields_ = (
        ("k", StoreSide), ("v", StoreSide), ("slots", c_void_p), ("positions", c_void_p), ("query_start", c_void_p),
        ("rows", c_void_p), ("kept_slots", c_void_p), ("tokens", c_int64), ("num_slots", c_int64), ("sequences", c_int32),
        ("num_kv_heads", c_int32), ("block_size", c_int32), ("isa", c_int32), ("threads", c_int32),
    )  # fmt: skip


WEIGHT_TYPES = (
    "FP32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4",
)  # fmt: skip
"""What the numbers of a weight lie in; the index is the library's own number for it. Blocks have the names of their types."""
BLOCKS = WEIGHT_TYPES[2:]


class Weight(Structure):
    """A matrix that `Linear` multiplies with."""

    _fields_ = (
        ("data", c_void_p), ("row_scales", c_void_p), ("column_scales", c_void_p), ("row_bytes", c_int64), ("stored", c_int32),
        ("x_bits", c_int32),
    )  # fmt: skip


class Linear(Structure):
    """One call of `haarkv_linear`."""

    _fields_ = (
        ("weight", Weight), ("x", c_void_p), ("y", c_void_p), ("tokens", c_int64), ("inputs", c_int64), ("outputs", c_int64),
        ("bf16", c_int32), ("isa", c_int32), ("threads", c_int32),
    )  # fmt: skip


class RmsNorm(Structure):
    """One call of `haarkv_rms_norm`."""

    _fields_ = (
        ("x", c_void_p), ("weight", c_void_p), ("y", c_void_p), ("rows", c_int64), ("width", c_int64), ("eps", c_float),
        ("bf16", c_int32), ("weight_bf16", c_int32), ("isa", c_int32), ("threads", c_int32),
    )  # fmt: skip


class Rope(Structure):
    """One call of `haarkv_rope`."""

    _fields_ = (
        ("x", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("y", c_void_p), ("rows", c_int64), ("heads", c_int64),
        ("half", c_int64), ("isa", c_int32), ("threads", c_int32),
    )  # fmt: skip


class GatedMul(Structure):
    """One call of `haarkv_gated_mul`."""

    _fields_ = (
        ("gate", c_void_p), ("up", c_void_p), ("y", c_void_p), ("count", c_int64), ("function", c_int32), ("bf16", c_int32),
        ("isa", c_int32), ("threads", c_int32),
    )  # fmt: skip


class GatedDelta(Structure):
    """One call of `haarkv_gated_delta`."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "x", "a", "b", "conv", "a_log", "dt_bias", "out", "mixed", "gates", "windows", "memories", "seen", "positions",
            "slots", "rows", "query_start",
        )),
        ("channels", c_int64),
        *((name, c_int32) for name in (
            "sequences", "versions", "key_heads", "value_heads", "key_dim", "value_dim", "taps", "isa", "threads",
        )),
    )  # fmt: skip


DENSE_VECTORS = (
    "input_norm", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "mixer_out_norm", "post_norm", "mlp_out_norm",
)  # fmt: skip
"""Norms and biases of a dense layer, by their fields in `LayerWeights`."""
DENSE_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Its projections, likewise."""


class DenseLayer(Structure):
    """One dense layer: its weights, what its cache decides, and what else it declares."""

    _fields_ = (
        *((name, c_void_p) for name in DENSE_VECTORS), *((name, Weight) for name in DENSE_MATRICES),
        ("store", c_void_p), ("attention", c_void_p),
        ("intermediate_size", c_int64), ("num_heads", c_int32), ("norms_bf16", c_int32), ("gelu", c_int32), ("rope", c_int32),
        ("place", c_int32), ("eps", c_float), ("softmax_scale", c_float),
    )  # fmt: skip


class Turns(Structure):
    """cos and sin of a call's tokens by one rotary embedding."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class Places(Structure):
    """Slots and block table of a call's tokens, as layers of one shape have them."""

    _fields_ = (("slots", c_void_p), ("block_table", c_void_p))


class Layers(Structure):
    """One call of `haarkv_layers`."""

    _fields_ = (
        ("layers", c_void_p), ("hidden", c_void_p), ("ropes", c_void_p), ("places", c_void_p), ("positions", c_void_p),
        ("rows", c_void_p), ("query_start", c_void_p), ("count", c_int64), ("tokens", c_int64),
        ("hidden_size", c_int64), ("sequences", c_int32), ("max_blocks", c_int32), ("bf16", c_int32), ("isa", c_int32),
        ("threads", c_int32),
    )  # fmt: skip


class Rows(Structure):
    """One call of `haarkv_rows`."""

    _fields_ = (
        ("weight", Weight), ("rows", c_void_p), ("y", c_void_p), ("count", c_int64), ("outputs", c_int64),
        ("inputs", c_int64), ("threads", c_int32),
    )  # fmt: skip


_CALLS = {
    "haarkv_attention": Attention, "haarkv_store": Store, "haarkv_linear": Linear, "haarkv_rms_norm": RmsNorm,
    "haarkv_rope": Rope, "haarkv_gated_mul": GatedMul, "haarkv_gated_delta": GatedDelta, "haarkv_layers": Layers,
    "haarkv_rows": Rows,
}  # fmt: skip
_STRUCTURES = (
    Kept, SideArgs, Cache, Matrix, Stretches, Attention, Quantizer, StoreSide, Store, Weight, Linear, RmsNorm, Rope, GatedMul,
    GatedDelta, DenseLayer, Turns, Places, Layers, Rows,
)  # fmt: skip
"""In the order in which `haarkv_sizes` tells their sizes."""


class KernelsMissingError(InputError):
    """The C++ kernels are not built, or cannot be loaded here."""


@cache
def load() -> ctypes.CDLL:
    """The library.

    Raises:
        KernelsMissingError: it was not compiled, or for another kind of machine.
    """
    how = "install a C++ compiler and run `python -m haarkv.tq_ops.cpu.build`"
    if not LIBRARY.exists():
        raise KernelsMissingError(f"the C++ kernels of the CPU are not built; {how}")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise KernelsMissingError(f"the C++ kernels of the CPU cannot be loaded ({error}); {how}") from None
    if not _is_of_these_sources(library):
        raise KernelsMissingError(f"the C++ kernels of the CPU are older than their sources; {how}")
    for name, structure in _CALLS.items():
        getattr(library, name).argtypes, getattr(library, name).restype = [ctypes.POINTER(structure)], None
    library.haarkv_store.restype = library.haarkv_layers.restype = library.haarkv_gated_delta.restype = c_int32
    library.haarkv_rows.restype = c_int32
    return library


def _is_of_these_sources(library: ctypes.CDLL) -> bool:
    """Whether the library has every function, and structures of the same sizes: of another size, calls would crash."""
    if not all(hasattr(library, name) for name in ("haarkv_best_isa", "haarkv_sizes", *_CALLS)):
        return False
    sizes = (c_int64 * len(_STRUCTURES))()
    count = library.haarkv_sizes(sizes, len(sizes))
    return count == len(sizes) and list(sizes) == [ctypes.sizeof(structure) for structure in _STRUCTURES]


def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has, the fastest last.

    Raises:
        KernelsMissingError: as `load`.
    """
    return ISAS[: load().haarkv_best_isa() + 1]
