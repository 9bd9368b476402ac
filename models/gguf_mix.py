"""Which type of blocks each tensor of a GGUF file is stored in: mixes, by what llama.cpp's quantiser gives them.

A mix gives more bits to what costs most: the head, and in some layers V's and the MLP's last projection. Blocks of 256 numbers
need rows of whole blocks; where there are none, a type of 32 numbers that has at least as many bits takes their place.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from haarkv.models.config import ModelConfig
from haarkv.models.footprint import WeightBytes
from haarkv.models.gguf_file import block_type_named
from haarkv.models.weights import EMBEDDING, HEAD, checkpoint_tensors
from haarkv.tq_ops.errors import InputError

_TYPES = ("Q6_K", "Q4_K", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "BF16", "F16", "F32")
MIXES = ("q4_k_m", *map(str.lower, _TYPES))
"""Each the type of all matrices but the head, which has at least Q6_K's bits; `q4_k_m` is of Q4_K and Q6_K."""
_FEWER_BITS = ("Q4_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""In place of blocks that do not divide a row."""
_COSTS_MOST = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")
_PLAIN_PARTS = ("ffn_gate_inp", "ssm_conv1d", "rope_freqs", "norm")
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.")
_LAYERS = "model.layers."


@dataclass(frozen=True)
class Place:
    """Where in a model a matrix stands, as far as a mix asks.

    Attributes:
        layer: its number, of `layers`; None outside of them.
        is_head: it makes logits; the embedding does where the head is tied to it.
        costs_most: it projects to V, or out of an MLP.
    """

    layers: int
    layer: int | None = None
    is_head: bool = False
    costs_most: bool = False

    @property
    def has_more_bits(self) -> bool:
        """The head; of the first and the last eighth of the layers, and of the others each third, what costs most."""
        if self.layer is None or not self.costs_most:
            return self.is_head
        eighth = self.layers // 8
        return self.layer < eighth or self.layer >= 7 * self.layers // 8 or (self.layer - eighth) % 3 == 2


def place_called(name: str, layers: int, *, tied: bool) -> Place:
    """Of a tensor by gguf's name."""
    found = _LAYER.match(name)
    head = "token_embd.weight" if tied else "output.weight"
    return Place(layers, int(found[1]) if found else None, name == head, bool(found) and name.endswith(_COSTS_MOST))


def type_of(place: Place, width: int, mix: str) -> str:
    """gguf's name of the type of a matrix.

    Args:
        width: numbers of a row.
        mix: one of `MIXES`.
    Raises:
        InputError: no such mix.
    """
    if mix not in MIXES:
        raise InputError(f"no such type of weights: {mix}; choose from {', '.join(MIXES)}")
    wanted = mix.upper()
    if mix == "q4_k_m":
        wanted = "Q6_K" if place.has_more_bits else "Q4_K"
    elif place.is_head and wanted in _FEWER_BITS:
        wanted = "Q6_K"
    for name in (wanted, _NARROW.get(wanted, "F16")):
        if width % block_type_named(name).numbers == 0:
            return name
    return "F16"


def stays_plain(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of gguf's name is in no blocks, whatever the mix: vectors, routers, short convolutions."""
    return len(shape) < 2 or not name.endswith(".weight") or any(part in name for part in _PLAIN_PARTS)


def mixed_bytes(config: ModelConfig, mix: str) -> WeightBytes:
    """What a model's weights would take in a file of a mix, from whose pages they are computed with.

    Raises:
        InputError: no such mix.
    """
    kept = 0
    for name, tensor in checkpoint_tensors(config).items():
        called, shape = _as_in_a_file(name), tensor.shape
        place = place_called(called, config.num_layers, tied=config.tied)
        kind = block_type_named("F32" if stays_plain(called, shape) else type_of(place, shape[-1], mix))
        kept += math.prod(shape) // kind.numbers * kind.nbytes
    return WeightBytes(kept=kept)


_IN_A_FILE = {"v_proj": "attn_v", "down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp",
              "conv1d": "ssm_conv1d"}  # fmt: skip
"""Ends of Hugging Face's names that a mix asks for."""


def _as_in_a_file(name: str) -> str:
    """A name as a file has it, as far as a mix asks."""
    outer = {EMBEDDING: "token_embd.weight", HEAD: "output.weight"}
    if name in outer or not name.startswith(_LAYERS):
        return outer.get(name, name)
    number, _, rest = name.removeprefix(_LAYERS).partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{number}.{next((to for end, to in _IN_A_FILE.items() if part.endswith(end)), 'other')}.{kind}"
