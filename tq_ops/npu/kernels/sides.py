"""What a program needs of a `tq_ops.npu.sides.Side`: the parameters of its signature, and its `CacheSide`."""

import pypto

from haarkv.tq_ops.npu.kernels.bf16 import Plain
from haarkv.tq_ops.npu.kernels.learned import LearnedKeys
from haarkv.tq_ops.npu.kernels.side import DTYPES
from haarkv.tq_ops.npu.kernels.tq4 import Packed
from haarkv.tq_ops.npu.kernels.tq4_seed import SeedBytes
from haarkv.tq_ops.npu.kernels.turned import TurnedKeys
from haarkv.tq_ops.npu.sides import BF16, PUBLISHED, TQ4

_KERNELS = {TQ4.name: Packed, PUBLISHED.name: SeedBytes, BF16.name: Plain}


def kernel_of(side):
    """The class of a `Side`'s `CacheSide`."""
    if side.layout:
        return TurnedKeys if side.turning else LearnedKeys
    return _KERNELS[side.name]


def parameter(stored):
    """The type of a program's parameter that is a `Stored` field."""
    return pypto.Tensor([pypto.DYNAMIC, stored.width], DTYPES[stored.dtype])
