"""What llama.cpp calls the tensors of a GGUF file, beside Hugging Face's names, and how it orders their rows."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD

OUTER = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
IN_GEMMA_LAYER = IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Projections of all experts of a layer, one after the other in one tensor."""
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.[0-9]+\.(\w+)")


def stored_name(name: str, *, gemma: bool) -> str:
    """A file's name of a tensor that Hugging Face calls `name`; experts that are stored together have the same.

    >>> stored_name("model.layers.3.mlp.up_proj.weight", gemma=False)
    'blk.3.ffn_up.weight'
    """
    outer = {theirs: ours for ours, theirs in OUTER.items()}
    if name in outer:
        return outer[name]
    found = _LAYER.fullmatch(name)
    assert found is not None, name
    index, part, kind = found.groups()
    if (expert := _EXPERT.fullmatch(part)) is not None:
        part = next(stored for stored, known in EXPERTS.items() if known == expert[1])
    else:
        part = next(stored for stored, known in (IN_GEMMA_LAYER if gemma else IN_LAYER).items() if known == part)
    return f"blk.{index}.{part}.{kind}"


def rows_of(count: int, heads: int) -> Tensor:
    """Where llama.cpp's converter puts the rows of Q or K: coordinates that RoPE turns together lie side by side there.

    Returns:
        [count] int64, for each row of Hugging Face's order that in the file.
    """
    return torch.arange(count).view(heads, count // heads // 2, 2).transpose(1, 2).reshape(-1)
