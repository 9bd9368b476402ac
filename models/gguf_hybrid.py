"""Gated DeltaNet as llama.cpp's files hold it: settings and tensors of `qwen35` and `qwen35moe` under Hugging Face's names.

Its converter lays out heads of V by their number among those that share a key head, then by key head; Hugging Face has it the
other way about. It stores what memory decays by as `-exp(A_log)`, and the convolution without its middle axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD

ARCHITECTURES = frozenset({"qwen35", "qwen35moe"})
IN_LAYER = {
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
"""Names of a layer's tensors, before `.weight`, beside those that every family has."""
DRAFTING = {
    "nextn.eh_proj": "mtp.fc.weight",
    "nextn.enorm": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm": FINAL_NORM,
    "nextn.embed_tokens": EMBEDDING,
    "nextn.shared_head_head": HEAD,
}
"""What a layer that predicts several tokens has beside other layers' (`models.mtp`), by whole names."""
_OTHERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_ENTRIES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.group_count": "linear_num_key_heads",
    "full_attention_interval": "full_attention_interval",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


@dataclass(frozen=True)
class Order:
    """How a tensor of Hugging Face's is made of a file's.

    Attributes:
        rows, columns: for each of Hugging Face's, the file's; None where they are the same.
        shape: that it has at last; None if it is the file's.
        logged: the file holds -exp of it.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    shape: tuple[int, ...] | None = None
    logged: bool = False


def entries(said: Callable[[str], Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of DeltaNet and of layers beside the model's own, as the entries of a `config.json`.

    Args:
        said: an entry of the model's architecture.
        found: the entries that all architectures have.
    """
    more = {name: value for key, name in _ENTRIES.items() if (value := said(key)) is not None}
    inner, heads = said("ssm.inner_size"), more.get("linear_num_value_heads")
    if isinstance(inner, int) and isinstance(heads, int) and heads > 0:
        more["linear_value_head_dim"] = inner // heads
    # Layers that predict several tokens at once stand behind the others.
    layers, ahead = found.get("num_hidden_layers"), said("nextn_predict_layers")
    if isinstance(layers, int) and isinstance(ahead, int) and 0 < ahead < layers:
        more["num_hidden_layers"] = layers - ahead
    return more


def other_name(rest: str) -> str | None:
    """Hugging Face's name within a layer of a tensor that is no `.weight` of `IN_LAYER`; None if it is none of DeltaNet's."""
    return _OTHERS.get(rest)


def order_of(name: str, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Order | None:
    """How a tensor of DeltaNet's, or a gate of one number a token, is read; None if it is read as it lies.

    Args:
        name: Hugging Face's.
        shape: the file's.
        settings: the entries of a `config.json`.
    """
    if name.endswith("mlp.shared_expert_gate.weight"):
        return Order(shape=(1, shape[-1]))
    numbers = [settings.get(key) for key in ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")]
    if ".linear_attn." not in name or not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    key_heads, value_heads, dim = (int(number) for number in numbers if number)
    if value_heads % key_heads:
        return None
    last = name.split(".linear_attn.")[1]
    of_heads, of_values = _v_order(key_heads, value_heads, 1), _v_order(key_heads, value_heads, dim)
    keys = shape[0] - len(of_values)
    after_keys = torch.cat([torch.arange(max(0, keys)), max(0, keys) + of_values])
    orders = {
        "in_proj_qkv.weight": Order(rows=after_keys),
        "conv1d.weight": Order(rows=after_keys, shape=(shape[0], 1, shape[-1])),
        "in_proj_z.weight": Order(rows=of_values),
        "in_proj_a.weight": Order(rows=of_heads),
        "in_proj_b.weight": Order(rows=of_heads),
        "A_log": Order(rows=of_heads, logged=True),
        "dt_bias": Order(rows=of_heads),
        "out_proj.weight": Order(columns=of_values),
    }
    order = orders.get(last)
    if order is None or not _fits(order, shape):
        return None  # whoever compares shapes says what is wrong
    return order


def _fits(order: Order, shape: tuple[int, ...]) -> bool:
    lengths = ((order.rows, shape[0]), (order.columns, shape[-1]))
    return all(index is None or len(index) == size for index, size in lengths)


def _v_order(key_heads: int, value_heads: int, dim: int) -> Tensor:
    """[value_heads * dim] int64: for each of Hugging Face's rows of V, the file's."""
    shared = value_heads // key_heads
    head = torch.arange(value_heads)
    in_file = head % shared * key_heads + head // shared
    return (in_file.unsqueeze(1) * dim + torch.arange(dim)).flatten()
