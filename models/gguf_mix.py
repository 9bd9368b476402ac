"""Which type of blocks each tensor of a GGUF file is stored in: mixes, by what llama.cpp's quantiser gives them.

A mix gives more bits to what costs most: the head, and in some layers V's and the MLP's last projection. Blocks of 256 numbers
need rows of whole blocks; where there are none, a type of 32 numbers that has at least as many bits takes their place.
"""

from __future__ import annotations

import math

import gguf

from haarkv.models.config import ModelConfig
from haarkv.models.footprint import WeightBytes
from haarkv.models.weights import EMBEDDING, HEAD, checkpoint_tensors
from haarkv.tq_ops.errors import InputError

MIXES = ("q4_k_m", "q6_k", "q4_k", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16", "f32")
"""Each the type of all matrices but `q4_k_m`, which is of Q4_K and Q6_K."""
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""In place of blocks that do not divide a row."""
_MORE_BITS = ("v_proj.weight", "down_proj.weight")
_PLAIN = "F32"
_ALWAYS_PLAIN = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight", ".conv1d.weight")
"""Matrices that stay as they are: what they choose or mix is worth more than their bytes."""


def type_of(name: str, shape: tuple[int, ...], config: ModelConfig, mix: str) -> str:
    """gguf's name of the type of a tensor.

    Args:
        name: Hugging Face's.
        mix: one of `MIXES`.
    Raises:
        InputError: no such mix.
    """
    if mix not in MIXES:
        raise InputError(f"no such type of weights: {mix}; choose from {', '.join(MIXES)}")
    if len(shape) < 2 or name.endswith(_ALWAYS_PLAIN):
        return _PLAIN
    wanted = mix.upper()
    if mix == "q4_k_m":
        last = name == HEAD or (config.tied and name == EMBEDDING)
        wanted = "Q6_K" if last or (name.endswith(_MORE_BITS) and _has_more_bits(name, config.num_layers)) else "Q4_K"
    numbers, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted]]
    if shape[-1] % numbers:
        wanted = _NARROW.get(wanted, "F16")
        if shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted]][0]:
            return "F16"
    return wanted


def _has_more_bits(name: str, layers: int) -> bool:
    """The first and the last eighth of the layers, and of the others each third."""
    index = int(name.removeprefix("model.layers.").partition(".")[0])
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def mixed_bytes(config: ModelConfig, mix: str) -> WeightBytes:
    """What a model's weights would take in a file of a mix, from whose pages they are computed with.

    Raises:
        InputError: no such mix.
    """
    kept = 0
    for name, tensor in checkpoint_tensors(config).items():
        numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_of(name, tensor.shape, config, mix)]]
        kept += math.prod(tensor.shape) // numbers * nbytes
    return WeightBytes(kept=kept)
