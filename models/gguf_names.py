"""What llama.cpp calls the tensors of a GGUF file, beside Hugging Face's names, and how it orders their numbers.

Its converter puts coordinates of Q and K that a Llama's RoPE turns together side by side. Of Gated DeltaNet it lays out heads
of V by their number among those that share a key head, then by key head; Hugging Face has it the other way about. It stores
what memory decays by as `-exp(A_log)`, the convolution without its middle axis, and norms that multiply with 1 + w as that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.gguf_file import GGUFTensor
from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD

HYBRIDS = frozenset({"qwen35", "qwen35moe"})
OUTER = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_IN_LAYER = {
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
_IN_GEMMA_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_HYBRID_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Names within a layer that are no part's `.weight` or `.bias`."""
NEXTN = {
    "nextn.eh_proj": "mtp.fc.weight",
    "nextn.enorm": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm": "mtp.norm.weight",
    "nextn.embed_tokens": "mtp.embed_tokens.weight",
    "nextn.shared_head_head": "mtp.lm_head.weight",
}
"""What a layer that predicts several tokens has beside other layers' (`models.mtp`), by whole names."""
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Projections of all experts of a layer, one after the other in one tensor."""
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.[0-9]+\.(\w+)")


def names_in_layer(architecture: str) -> Mapping[str, str]:
    """Hugging Face's names of a layer's parts, by the file's."""
    more = {"gemma3": _IN_GEMMA_LAYER, **dict.fromkeys(HYBRIDS, _IN_HYBRID_LAYER)}
    return _IN_LAYER | more.get(architecture, {})


def stored_name(name: str, architecture: str) -> str:
    """A file's name of a tensor that Hugging Face calls `name`; experts that are stored together have the same.

    One that no file holds keeps its own within the layer.

    >>> stored_name("model.layers.3.mlp.up_proj.weight", "llama")
    'blk.3.ffn_up.weight'
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return next(stored for stored, theirs in OUTER.items() if theirs == name)
    index, rest = layer.groups()
    part, _, kind = rest.rpartition(".")
    expert = _EXPERT.fullmatch(part)
    known, part = (EXPERTS, expert[1]) if expert else (names_in_layer(architecture), part)
    whole = next((stored for stored, theirs in WHOLE.items() if theirs == rest), f"{part}.{kind}")
    return f"blk.{index}." + next((f"{stored}.{kind}" for stored, theirs in known.items() if theirs == part), whole)


def rows_of(count: int, heads: int) -> Tensor:
    """[count] int64: of each row of a Llama's Q or K in Hugging Face's order, where llama.cpp's converter puts it."""
    return torch.arange(count).view(heads, count // heads // 2, 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class Place:
    """Where a tensor of Hugging Face's name lies, and how it is made of a file's.

    Attributes:
        expert: its number, where all experts are stored in one tensor.
        rows, columns: for each of Hugging Face's, the file's; None where they are the same.
        axes: the shape that it has at last; None if it is the file's.
        change: made of the file's numbers.
    """

    tensor: GGUFTensor
    expert: int | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    axes: tuple[int, ...] | None = None
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.axes or self.tensor.shape[self.expert is not None :]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes // (1 if self.expert is None else self.tensor.shape[0])

    @property
    def by_rows(self) -> bool:
        """Whether it is whole rows of the file's, in whatever order."""
        return self.columns is None and self.axes is None and self.change is None

    @property
    def blocks(self) -> str | None:
        """Name of the type of its blocks, where they can be kept."""
        return self.tensor.blocks if len(self.shape) == 2 and self.by_rows else None

    @property
    def in_place(self) -> bool:
        """Whether what is kept of it stays in the file's pages."""
        return self.rows is None and self.by_rows and (self.expert is None or self.blocks is not None)

    def wanted(self, part: tuple[slice, ...] | None) -> tuple[Tensor, slice]:
        """Of a matrix, the rows [R] int64 of the file that a part of it lies in, in its order, and the part's columns."""
        count = self.shape[0]
        rows = torch.arange(count) if self.rows is None else self.rows
        rows, columns = (rows, slice(None)) if part is None else (rows[part[0]], part[1])
        return rows + count * (self.expert or 0), columns


def delta_order(name: str, shape: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the `Place` of a tensor of DeltaNet's, or of a gate of one number a token; {} if it is read as it lies.

    The name is Hugging Face's, the shape the file's, and settings are the entries of a `config.json`.
    """
    if name.endswith("mlp.shared_expert_gate.weight"):
        return {"axes": (1, shape[-1])}
    numbers = [settings.get(key) for key in ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")]
    if ".linear_attn." not in name or not all(isinstance(number, int) and number > 0 for number in numbers):
        return {}
    key_heads, value_heads, dim = (int(number) for number in numbers if number)
    if value_heads % key_heads:
        return {}
    of_heads, of_values = _v_order(key_heads, value_heads, 1), _v_order(key_heads, value_heads, dim)
    keys = max(0, shape[0] - len(of_values))
    after_keys = torch.cat([torch.arange(keys), keys + of_values])
    orders: dict[str, dict[str, Any]] = {
        "in_proj_qkv.weight": {"rows": after_keys},
        "conv1d.weight": {"rows": after_keys, "axes": (shape[0], 1, shape[-1])},
        "in_proj_z.weight": {"rows": of_values},
        "in_proj_a.weight": {"rows": of_heads},
        "in_proj_b.weight": {"rows": of_heads},
        "A_log": {"rows": of_heads, "change": _logged},
        "dt_bias": {"rows": of_heads},
        "out_proj.weight": {"columns": of_values},
    }
    order = orders.get(name.split(".linear_attn.")[1], {})
    # Of another size, it is read as it lies: comparing shapes says what is wrong.
    fits = all(len(order[axis]) == size for axis, size in (("rows", shape[0]), ("columns", shape[-1])) if axis in order)
    return order if fits else {}


def _logged(stored: Tensor) -> Tensor:
    return torch.log(-stored)


def less_one(stored: Tensor) -> Tensor:
    """w of 1 + w."""
    return stored - 1.0


def _v_order(key_heads: int, value_heads: int, dim: int) -> Tensor:
    """[value_heads * dim] int64: for each of Hugging Face's rows of V, the file's."""
    shared = value_heads // key_heads
    head = torch.arange(value_heads)
    in_file = head % shared * key_heads + head // shared
    return (in_file.unsqueeze(1) * dim + torch.arange(dim)).flatten()
