"""The kernels' half of every `tq_ops.npu.sides.Side`."""

from haarkv.tq_ops.npu.kernels.bf16 import Plain
from haarkv.tq_ops.npu.kernels.tq4 import Packed
from haarkv.tq_ops.npu.kernels.tq4_seed import SeedBytes

_KERNELS = {kernel.side: kernel for kernel in (Packed, SeedBytes, Plain)}


def kernel_of(side):
    """The `CacheSide` of a `Side`."""
    return _KERNELS[side]
