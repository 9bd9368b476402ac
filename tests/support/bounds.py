"""Tolerances by which tests judge an op, a format, a model or an outside implementation, with where each comes from.

What judges executors of users is `haarkv.validation.bounds`; tests of a single formula state theirs beside the formula.

Two questions are never mixed: *fast against reference* (tight, of one op or one layer) and *quantized against full
precision* (fidelity, a distribution). Measured figures are from torch 2.13 on x86-64; each bound leaves a margin for
another order of FP32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from haarkv.validation.bounds import EXECUTOR_LOGITS
from haarkv.validation.layers.null import BLOCK_X_LARGEST, BLOCK_X_TOTAL

__all__ = ["BLOCK_X_LARGEST", "BLOCK_X_TOTAL", "EXECUTOR_LOGITS"]

# -- Reference against transformers, the same weights in fp32 --------------------------------------------------------
# Logits, absolute. Measured: 3.0e-5 at most over six shapes and the tiny checkpoint, prefill and 32 decode steps.
TRANSFORMERS_LOGITS = 1e-4
# Share of K and V values that may round to the other BF16 neighbour, since FP32 sums run in another order: relative noise
# of about 1e-6 against BF16 steps of 2**-8.
BF16_TIES = 1e-3

# -- Levels ------------------------------------------------------------------------------------------------------------
# Two computations of a rotated coordinate from the same K or V, in FP32 with different orders of summation, differ by
# about 2e-7. BF16 keeps 8 bits: rounding moves a value by up to 2**-8 of itself.
ROTATED_FP32 = 1e-6

# -- Fidelity of 4 bits ------------------------------------------------------------------------------------------------
# Cosine of a 4-bit round trip of whatever Hypothesis draws. Measured: 0.990 at the lowest (0.995 is the mean of Gaussian
# vectors).
TQ4_LOWEST_COSINE = 0.97
# Length of a round trip where the scale is a normal FP16 number: 2**-11 of FP16 and what a BF16 rotation is off.
# Measured: 8e-4.
TQ4_LENGTH = 4e-3

# -- Reference against the float64 oracle of the tests -------------------------------------------------------------------
# Share of a BF16 layer's output that may have other bits than the oracle's: one number on the way that falls to the other
# side of a rounding point moves its token's. Measured over four seeds: 0 mostly, 0.067 (one of 13 tokens) at most; without
# the device's rounding points 0.48 and more.
ORACLE_BF16_LAYER_DIFFERENT = 0.2
# One op in FP32 with results of size 1, absolute. Measured: 2e-6 in attention, less than 1e-6 in all others.
ORACLE_OP = 5e-6

# -- One forward against itself, its FP32 sums in another order --------------------------------------------------------
# The same forward in FP32 whose sums were taken in another order (other chunk, other batch), whatever was rounded on the
# way: logits of size 1, absolute. Measured: 4e-6 for every KV format.
REORDERED_LOGITS = 3e-5
# K and V of such a forward, relative to the vector's length. Measured: 2e-6.
REORDERED_KV = 1e-5

# -- An op table against the reference ---------------------------------------------------------------------------------
# Share of a BF16 op's numbers that may have other bits than the reference's where both round at the same points: FP32 sums in
# another order. Measured: 0.0003 in attention, 0.016 in a case of 128 numbers; rounding the output alone: 0.21 and 0.24.
OP_TABLE_BF16_DIFFERENT = 0.02

# -- Weights in blocks, beside the product with the numbers restored from them ---------------------------------------------
# Of a step of x: half of it, and a few roundings of FP32 on the way to it.
BLOCK_X_HALF_STEP = 0.5 + 2.0**-7
# Beside two roundings for each eight blocks, of what a chain has added up so far: of the scale, of the sum of a block's
# integers, of step and sum together, and three additions of chains.
BLOCK_ADDITIONS = 8
# Logits of a whole model, relative, by the model's dtype. Measured over four families: 1.0e-4 in FP32; 1.1e-2 in BF16, where
# the reference rounds the restored numbers to BF16.
BLOCK_LOGITS = {"float32": 5e-4, "bfloat16": 5e-2}


# -- One op, one layer -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LayerBounds:
    """What an op or a layer may differ by, in a model of one dtype. Relative errors are of each vector against its length.

    Measured: the reference's table with its sums taken in float64, and in FP32 in two halves from the end, attention without
    its rounding points or (BF16) with rotated Q, centroids and probabilities in FP16, against the table itself; `tiny` with
    200 and 37 tokens of code and 3 decode steps, and `random:14b --layers 1` in BF16 with 24 and 9 random ones.

    Attributes:
        op: one op with an FP32 result, fed the reference's inputs.
        rounded_op: one op whose result is rounded to the model's dtype.
        attention: the same, of attention, each head's output by itself.
        kv_noise: each coordinate of the unit vector of a K or V that a layer makes of the reference's hidden state.
        length: of a stored vector.
        logits: of a whole forward against the head on the executor's own last hidden state: the largest difference,
            relative to the logits' standard deviation.
    """

    op: float
    rounded_op: float
    attention: float
    kv_noise: float
    length: float
    logits: float


# Measured, largest: op 5e-7, attention 7e-6, length 3e-4 (a tie changes it by so much; an FP16 scale steps by 1e-3), logits
# 1.4e-6. No level is unexplained from a kv_noise of 1e-6 on.
LAYER_FP32 = LayerBounds(op=1e-5, rounded_op=1e-5, attention=1e-4, kv_noise=1e-5, length=2e-3, logits=1e-3)
# Measured, largest: op 5e-7, rounded_op 1.0e-3, attention 7.1e-3 (it rounds probabilities to BF16, another may round them and
# the rotated Q to FP16), length 6e-4, logits 2e-6. A normed hidden state of which one number falls to the other BF16
# neighbour turns K by 2**-8 / sqrt(hidden_size) of its length or so, 2.4e-4 for `tiny`: no level is unexplained from a
# kv_noise of 1e-4 on.
LAYER_BF16 = LayerBounds(op=1e-5, rounded_op=2.0**-8, attention=2.0**-6, kv_noise=3e-4, length=4e-3, logits=2.0**-5)
