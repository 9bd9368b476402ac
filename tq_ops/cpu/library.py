"""The compiled kernels, loaded once, and the structures of their C interface, as its headers declare them."""

from __future__ import annotations

import ctypes
import re
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from haarkv.tq_ops.cpu.build import INTERFACE, LIBRARY, interface_digest
from haarkv.tq_ops.errors import InputError

ISAS = ("portable", "avx2", "avx512vnni", "amx")
"""Instruction sets. Each needs more of the CPU than the one before; the index is the library's own number for it."""
BF16_PRODUCTS = 1 << 8
"""Of `haarkv_isas`: `avx512vnni` multiplies BF16 by BF16 (`vdpbf16ps`) on this CPU."""


class Cell(IntEnum):
    """What K or V is stored in, as in csrc/kernels.h."""

    NIBBLE = 4
    BYTE = 8
    BF16 = 16
    FP32 = 32
    MIXED = 1


class Gate(IntEnum):
    """The function of a gate, as in csrc/kernels.h."""

    SILU = 0
    GELU = 1
    SIGMOID = 2


class Structure(ctypes.Structure):
    """A C structure that keeps the tensors alive whose addresses it holds.

    Fields are given by name, a tensor or None for a pointer; all others are 0. A copy (`from_buffer_copy`) owns nothing: keep
    the original as long as the copy is used.
    """

    def __init__(self, **fields: object) -> None:
        unknown = fields.keys() - {name for name, *_ in self._fields_}
        assert not unknown, unknown
        self.owned = [value for value in fields.values() if isinstance(value, (Tensor, Structure))]
        super().__init__(**{name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in fields.items()
                            if value is not None})  # fmt: skip


_NUMBERS: dict[str, Any] = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float}


def _structures() -> dict[str, type[Structure]]:
    """The structures of the headers of the C interface, by their names there without `Haarkv`."""
    structures: dict[str, type[Structure]] = {}
    text = re.sub(r" *//.*", "", "".join(header.read_text(encoding="utf-8") for header in INTERFACE))
    for name, body in re.findall(r"^struct (?:Haarkv)?(\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        fields = [
            (field, c_void_p if pointer else (_NUMBERS | structures).get(kind), size)
            for kind, names in re.findall(r"^    (?:const )?(?:Haarkv)?(\w+)([ *][^();]*);", body, re.MULTILINE)
            for pointer, field, size in re.findall(r"(\*?) *(\w+)(?:\[(\w+)\])?", names)
        ]
        # Others, of constants and of functions, are the kernels' own.
        if "(*" not in body and all(kind is not None and (not size or size.isdigit()) for _, kind, size in fields):
            layout = [(field, kind * int(size) if size else kind) for field, kind, size in fields if kind]
            structures[name] = type(name, (Structure,), {"_fields_": layout})
    return structures


_STRUCTURES = _structures()
globals().update(_STRUCTURES)


if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Structure]:
        """A structure of the headers: `library.Attention`."""


WEIGHT_TYPES = (
    "FP32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4",
)  # fmt: skip
"""What the numbers of a weight lie in; the index is the library's own number for it. Blocks have the names of their types."""
BLOCKS = WEIGHT_TYPES[2:]
DENSE_VECTORS = (
    "input_norm", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "mixer_out_norm", "post_norm", "mlp_out_norm",
)  # fmt: skip
"""Norms and biases of a dense layer, by their fields in `LayerWeights`."""
DENSE_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Its projections, likewise."""
_CALLS = {
    "haarkv_attention": "Attention", "haarkv_store": "Store", "haarkv_linear": "Linear", "haarkv_rms_norm": "RmsNorm",
    "haarkv_rope": "Rope", "haarkv_gated_mul": "GatedMul", "haarkv_gated_delta": "GatedDelta", "haarkv_layers": "Layers",
}  # fmt: skip


class KernelsMissingError(InputError):
    """The C++ kernels are not built, or cannot be loaded here."""


@cache
def load() -> ctypes.CDLL:
    """The library; a KernelsMissingError if it was not compiled, or for another kind of machine."""
    how = "install a C++ compiler and run `python -m haarkv.tq_ops.cpu.build`"
    if not LIBRARY.exists():
        raise KernelsMissingError(f"the C++ kernels of the CPU are not built; {how}")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise KernelsMissingError(f"the C++ kernels of the CPU cannot be loaded ({error}); {how}") from None
    if not all(hasattr(library, name) for name in ("haarkv_interface", *_CALLS)) or (
        library.haarkv_interface() != interface_digest()
    ):
        raise KernelsMissingError(f"the C++ kernels of the CPU are older than their sources; {how}")
    if not library.haarkv_isas():
        raise KernelsMissingError(f"the C++ kernels of the CPU were compiled for another machine; {how}")
    for name, structure in _CALLS.items():
        getattr(library, name).argtypes, getattr(library, name).restype = [ctypes.POINTER(_STRUCTURES[structure])], None
    library.haarkv_store.restype = library.haarkv_layers.restype = library.haarkv_gated_delta.restype = c_int32
    return library


def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has and the library was compiled for, the fastest last; raises as `load`."""
    bits = load().haarkv_isas()
    return tuple(isa for i, isa in enumerate(ISAS) if bits >> i & 1)
