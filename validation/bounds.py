"""Every tolerance of what judges executors: fifteen rows. All others are in `tests/support/bounds.py`."""

import torch

# -- A figure beside those of sixteen honest runs (`validation.layers.null`) ------------------------------------------------
# It is a fault if it lies farther from their mean than so many of their standard deviations: by Student's distribution one
# honest run in ten million does.
SIGMAS = 9.0
# A device may be so many times as far off as honest runs are: it may round once more wherever the reference rounds. A vector
# stored at another scale may be so many times as far off as the reference's.
FARTHER = 1.5
# The same as SIGMAS, of rare events that are counted.
POISSON_SIGMAS = 7.0
# In any forward so many single numbers may fall to the other side of a rounding point.
TIES = 14
# What is always allowed. Gain: a reciprocal root of FP32 may be off by so much. Slip: a fiftieth of a known mistake.
# Length: so many scales of a forward may be the next FP16 number, 2**-11 of themselves away; or one is 2**-8 away, where a
# coordinate of a learned key rounds to another BF16 number.
LEAST = {"gain": 4e-6, "slip": 0.02, "length": TIES * 2.0**-11}
# Attention's gain in a BF16 model, whose levels' values a device may keep in FP16: each moves by at most this share of itself.
FP16_GAIN = 2.0**-11
# The step in which energies are counted: one rounding of the largest number. FP32 sums are off by eight of theirs.
STEP = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20, torch.float64: 2.0**-20}
# Activations rounded to 8 bits may differ where they lie so near the middle of two steps, in steps.
BLOCK_X_TIE = 0.02
# A layer that is fed what the executor made of the layer before is held against honest runs of the reference's input; its own
# input may spread so many times as much.
FREE = 4.0

# -- One executor against itself ---------------------------------------------------------------------------------------------
# K or V that it stored in a layer run alone and in a whole forward: ties may fall the other way, each by a twentieth of the
# vector at most.
SAME_KV = 0.1

# -- Two executors (`tq diff`, `tq dev bringup`) ----------------------------------------------------------------------------
# By how much a logit may differ after the same tokens, in standard deviations of the position's logits: tokens that lie
# closer are a near tie. Measured on `tiny`, tq4: the reference's sums in another order 0.070 in BF16 and 0.024 in FP32; cpu
# 0.180 over 512 positions of BF16; npu in PyPTO's interpreter 0.092.
EXECUTOR_LOGITS = {"bfloat16": 64 * 2.0**-8, "float32": 16 * 2.0**-8}
# What a layer of the NPU's programs adds to a hidden state, relative, where little but attention is added. Measured: 6.0e-3,
# the largest of 130 tokens; a mask that is off by one moves it by 0.1 to 0.7.
NPU_LAYER_ADDED = 1e-2
