"""`pytest --shaken SEED`: torch as another machine may compute it.

Every FP32 result of a sum of products or of a plain sum (matmul, linear, attention, convolution, sum, mean, norm, softmax,
cumsum, variance) moves by -1, 0 or +1 unit in the last place, element by element. The direction is a hash of the seed, of the
operation with its shape and of the result itself; of a sum along rows, of the row alone. So a seed is a machine: the same
operands give the same bits wherever and whenever they are computed, and a product of another shape may not. Sums that a
machine rounds to BF16 or FP16 are shaken in FP32 first.

Left alone: float64 and integers; results that end in ten zero bits, which is how exact ones look, 0, 1 and 0.25 among them;
sums of one number; compiled kernels, which are not torch's; other processes.
"""

from __future__ import annotations

import threading
import zlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {
    "mm",
    "bmm",
    "addmm",
    "addbmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "vdot",
    "linear",
    "matmul",
    "einsum",
    "convolution",
}
ATTENTION = {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"}
SUMS = {"sum", "mean", "norm", "linalg_vector_norm", "cumsum", "var", "std", "var_mean", "std_mean", "nansum"}
NORMALIZATIONS = {
    "_softmax",
    "softmax",
    "_log_softmax",
    "log_softmax",
    "logsumexp",
    "native_layer_norm",
    "rms_norm",
    "_fused_rms_norm",
}
SHAKEN = PRODUCTS | ATTENTION | SUMS | NORMALIZATIONS
HALF = (torch.bfloat16, torch.float16)
EXACT_BITS = 10


def shaken(x: torch.Tensor, salt: int, period: int = 0) -> torch.Tensor:
    """x [...] fp32, each element moved by -1, 0 or +1 unit in the last place; a number that is not finite or exact stays.

    Places count from 0 again after `period` elements, where it is given: rows that are computed one by one are rounded alike.
    """
    if not x.numel():
        return x
    bits = x.contiguous().view(torch.int32)
    # Of the mantissa alone: numbers that are twice as large, or negative, are rounded alike on any machine.
    place = torch.arange(x.numel(), dtype=torch.int32).view(x.shape) % (period or x.numel())
    hash_bits = ((bits & 0x7FFFFF) ^ (place * 0x27D4EB2F)) * 0x5BD1E995 + salt
    hash_bits = (hash_bits ^ (hash_bits >> 15)) * 0x2C1B3C6D
    move = ((hash_bits >> 13) & 0x7FFF) % 3 - 1
    inexact = (bits & (2**EXACT_BITS - 1) != 0) & torch.isfinite(x)
    return (bits + move.to(torch.int32) * inexact).view(torch.float32)


def plain(x: object) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def along_rows(result: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether an operation over x went along its last axis, by the shape of the result."""
    return x.ndim > 0 and (result.shape == x.shape or result.numel() * x.shape[-1] == x.numel())


class AnotherMachine(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        base = name.removesuffix("_") if name not in SHAKEN else name
        result = func(*args, **kwargs)
        if base not in SHAKEN:
            return result
        first = result[0] if isinstance(result, tuple) else result
        if not plain(first) or (
            base in SUMS and plain(args[0]) and args[0].numel() == first.numel() != 0 and base != "cumsum"
        ):
            return result
        # torch may call one product linear, matmul, mm or addmm: its result names it. Along a row the others go row by row.
        operand = first if base in PRODUCTS | ATTENTION else args[0]
        row = base not in PRODUCTS | ATTENTION and along_rows(first, operand)
        shape = tuple(operand.shape[-1:] if row else operand.shape)
        kind = "product" if base in PRODUCTS else base.strip("_")
        begin = next((i for i, size in enumerate(shape) if size != 1), len(shape))  # leading ones do not count
        salt = zlib.crc32(repr((self.seed, kind, shape[begin:])).encode()) - 2**31
        period = (shape[-1] if first.shape == operand.shape else 1) if row else 0
        if first.dtype == torch.float32:
            shaken_result = shaken(first, salt, period)
        elif first.dtype in HALF:
            shaken_result = self._in_fp32(func, args, kwargs, salt, period, first.dtype)
        else:
            return result
        if name == base and "out" not in kwargs:
            return (shaken_result, *result[1:]) if isinstance(result, tuple) else shaken_result
        first.copy_(shaken_result)
        return result

    def _in_fp32(self, func, args, kwargs, salt, period, dtype):
        """Computed from the same numbers in FP32, shaken, and rounded once."""

        def wide(x):
            if isinstance(x, torch.Tensor):
                return x.float() if x.dtype in HALF else x
            if isinstance(x, torch.dtype):
                return torch.float32 if x in HALF else x
            return [wide(y) for y in x] if isinstance(x, (list, tuple)) else x

        result = func(*map(wide, args), **{key: wide(value) for key, value in kwargs.items() if key != "out"})
        return shaken(result[0] if isinstance(result, tuple) else result, salt, period).to(dtype)


def become(seed: int) -> None:
    """From now on, in every thread of this process."""
    AnotherMachine(seed).__enter__()
    start = threading.Thread._bootstrap_inner

    def start_shaken(thread):
        with AnotherMachine(seed):
            start(thread)

    threading.Thread._bootstrap_inner = start_shaken
