"""Every tolerance with which haarkv judges executors. Tolerances of tests are in `tests/support/bounds.py`."""

import torch

# -- A figure of an executor against sixteen honest runs (`validation.layers.null`) ------------------------------------------
# Limit of the distance from the honest runs' mean, in their standard deviations: by Student's distribution, one honest run in
# ten million lies farther away.
SIGMAS = 9.0
# Factor on that limit: a correct device may round once more wherever the reference rounds. Also the limit of a vector stored
# at another scale: its distance from the vector to store, as a multiple of the reference's.
FARTHER = 1.5
# As SIGMAS, for counts of rare events (Poisson's distribution).
POISSON_SIGMAS = 7.0
# Numbers of any forward that may fall to the other side of a rounding point.
TIES = 14
# Limits are never below these. Gain: the error of a reciprocal root in FP32. Slip: a fiftieth of a known mistake. Length:
# scales of a forward may be the next FP16 number, which differs by 2**-11 to 2**-10 of itself, for 14 to 7 of them; or one
# scale differs by 2**-8, if a coordinate of a learned key rounds to another BF16 number.
LEAST = {"gain": 4e-6, "slip": 0.02, "length": TIES * 2.0**-11}
# The same for attention's gain in a BF16 model: a device may round centroids to FP16, each by at most this share of itself.
FP16_GAIN = 2.0**-11
# Unit of energies, as a share of the largest number: one rounding to BF16; in FP32 the error of a sum, eight roundings.
STEP = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20, torch.float64: 2.0**-20}
# Activations rounded to 8 bits may differ if they lie this near the middle of two steps; in steps.
BLOCK_X_TIE = 0.02
# Free-running, a layer gets the executor's own input, but honest runs start from the reference's. Factor on their limits.
FREE = 4.0

# -- One executor against itself ---------------------------------------------------------------------------------------------
# Relative distance of K or V stored by a layer that runs alone from those of a whole forward: some ties may fall the other
# way. One moves a vector by a twentieth at most; two are allowed.
SAME_KV = 0.1

# -- Two executors (`tq diff`, `tq dev bringup`) ----------------------------------------------------------------------------
# Limit of the difference of a logit after the same tokens, in standard deviations of the position's logits: two tokens whose
# logits lie closer are a near tie. Measured on `tiny`, tq4: the reference's sums in another order 0.070 in BF16 and 0.024 in
# FP32; cpu 0.180 over 512 positions of BF16; npu in PyPTO's interpreter 0.092.
EXECUTOR_LOGITS = {"bfloat16": 64 * 2.0**-8, "float32": 16 * 2.0**-8}
# Relative error of the update that a layer of the NPU's programs adds to a hidden state, if it is mostly attention. Measured:
# 6.0e-3, the largest of 130 tokens; a mask that is off by one token gives 0.1 to 0.7.
NPU_LAYER_ADDED = 1e-2
