"""Weights in the blocks of GGUF files: quantized by gguf where it can, else of random bytes with ordinary scales."""

from dataclasses import replace
from itertools import cycle

import gguf
import numpy as np
import torch

from haarkv.models.gguf_file import block_type
from haarkv.tq_ops.weight import Blocks, dense

TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
"""Those that the kernels of the CPU multiply with."""
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
"""Of types that gguf cannot write, where a block's FP16 scales lie."""
LEVELS = {"Q4_1": 4, "Q5_1": 4, "Q4_K": 16, "Q5_K": 16}
"""Of types with a minimum, where a block's levels begin: with all of them zero, the minima are left."""


def random_blocks(kind, outputs, inputs, seed=0, dtype=torch.float32):
    """Blocks [outputs, inputs]; inputs are whole blocks of the type."""
    generator, gguf_type = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf_type]
    if kind in HALVES:
        data = generator.integers(0, 256, (outputs, inputs // numbers, nbytes), np.uint8)
        for at in HALVES[kind]:
            scales = generator.uniform(5e-4, 2e-3, (outputs, inputs // numbers, 1)).astype(np.float16)
            data[..., at : at + 2] = scales.view(np.uint8)
        data = data.reshape(outputs, -1)
    else:
        rows = generator.normal(0.02, 0.05, (outputs, inputs)).astype(np.float32)
        data = gguf.quantize(rows, gguf_type)
    return Blocks(torch.from_numpy(np.ascontiguousarray(data)), block_type(gguf_type), dtype)


def in_blocks(model, kinds=TYPES):
    """A model whose projections and head lie in blocks of these types, one after the other; embeddings stay as they are.

    What gguf cannot write is random, as large as the weight was to within a power of two.
    """
    layers, kinds = [], cycle(kinds)

    def encode(weight):
        kind = next(kinds)
        if weight.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            kind = "Q8_0"
        if kind in HALVES:
            random_weight = random_blocks(kind, *weight.shape, dtype=weight.dtype)
            larger = torch.log2(weight.float().norm() / dense(random_weight).float().norm()).round()
            return random_weight * torch.full((len(weight), 1), 2.0 ** float(larger))
        data = gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
        return Blocks(torch.from_numpy(np.ascontiguousarray(data)), block_type(gguf.GGMLQuantizationType[kind]), weight.dtype)

    for layer in model.weights.layers:
        layers.append(layer.map(lambda field, weight: encode(weight) if field.endswith("_proj") else weight))
    weights = replace(model.weights, layers=tuple(layers), lm_head=encode(model.weights.lm_head))
    return replace(model, weights=weights)


def block_bytes(weight):
    """The bytes of its blocks [outputs, blocks, bytes], as they lie."""
    return weight.data.view(len(weight), -1, weight.type.nbytes)


def block_minima(weight):
    """[outputs, inputs] fp32, what numbers of a type with a minimum begin at; zero of the others."""
    if weight.type.name not in LEVELS:
        return torch.zeros(weight.shape)
    data = block_bytes(weight).clone()
    data[..., LEVELS[weight.type.name] :] = 0
    return weight.type.restore(data.view(len(weight), -1))


def shapes(kind):
    """[inputs, outputs]: groups of eight blocks that are full, and cut short by each number of blocks."""
    whole = random_blocks(kind, 1, 256).type.numbers
    return [(256, 1), (1024, 70), (2560, 33)] if whole == 256 else [(32, 1), (96, 33), (352, 70), (512, 17), (1728, 33)]


def random_inputs(tokens, inputs):
    """Numbers of which some are much larger than others, as hidden states are."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, inputs, generator=generator)
    return x * torch.where(torch.rand(1, inputs, generator=generator) < 0.02, 30.0, 1.0)
