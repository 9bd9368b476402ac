"""Every tolerance of the project, with where it comes from. Nothing else may hold one.

Two questions are never mixed: *fast against reference* (tight, of one op or one layer) and *quantised against full
precision* (fidelity, a distribution). Measured figures are from torch 2.13 on x86-64; each bound leaves a margin for
another order of FP32 sums.
"""

from __future__ import annotations

# -- Reference against transformers, the same weights in fp32 --------------------------------------------------------
# Logits, absolute. Measured: 6e-6 on the tiny checkpoint over prefill and 32 decode steps.
TRANSFORMERS_LOGITS = 1e-4
# Share of K and V values that may round to the other BF16 neighbour, since FP32 sums run in another order: relative noise
# of about 1e-6 against BF16 steps of 2**-8.
BF16_TIES = 1e-3

# -- Levels ------------------------------------------------------------------------------------------------------------
# Two computations of a rotated coordinate from the same K or V, in FP32 with different orders of summation, differ by
# about 2e-7. BF16 keeps 8 bits: rounding moves a value by up to 2**-8 of itself.
ROTATED_FP32 = 1e-6
# K or V that differ in their last FP32 bits may put x / norm on the other side of a BF16 rounding point: one of the D
# products of a rotated coordinate then changes by up to 2**-7 of itself, of the order of 2**-7 / D = 6e-5.
ROTATED_BF16_FLIP = 2e-4
# A golden that rounds the rotated coordinate to BF16 before it is compared: half a unit in the last place, relative.
BF16_HALF_ULP = 2.0**-8
# The same coordinate one BF16 layer later: hidden states differ by BF16 roundings here and there. Norms are seen to differ
# by up to 0.6 % there, so a unit vector is off by about that in a random direction: 5e-4 a coordinate, times five for the
# largest of 50,000. Measured: 2.2e-3.
ROTATED_BF16_LAYER = 2.5e-3

# -- The published mini model ------------------------------------------------------------------------------------------
GOLDEN_COSINE = 0.9999
# Share of equal levels: all but the ties that its rounding of the rotated vector makes (0.4 to 0.6 %) in the first
# layer; in the second those and the BF16 roundings of the hidden state. Measured .9948 and .9839.
GOLDEN_MATCH_FIRST_LAYER = 0.99
GOLDEN_MATCH_LATER_LAYER = 0.98
# Norms: stored there rounded to BF16 (2**-8), of hidden states that differ by BF16 roundings.
GOLDEN_NORM_FIRST_LAYER = 2.0**-8
GOLDEN_NORM_LATER_LAYER = 2.0**-6

# -- Fidelity of 4 bits ------------------------------------------------------------------------------------------------
# Relative squared error of Gaussian vectors: Lloyd-Max's distortion at 16 levels, the limit of a high head_dim. At 128
# unit vectors' coordinates have lighter tails: 0.00934 before the renormalisation (-1.6 %), 0.00920 after it (-3.1 %).
TQ4_DISTORTION = 0.009497
TQ4_DISTORTION_MARGIN = 0.02
TQ4_MEAN_COSINE = 0.995
