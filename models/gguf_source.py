"""A model from a GGUF file, as llama.cpp's converters write it: its settings and tensors under Hugging Face's names.

The converter puts coordinates of Q and K that a Llama's RoPE turns together side by side. Of Gated DeltaNet it lays out heads
of V by their number among those that share a key head, then by key head; Hugging Face has it the other way about. It stores
what memory decays by as `-exp(A_log)`, the convolution without its middle axis, and norms that multiply with 1 + w as that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import decimal
from haarkv.models.gguf_file import GGUFFile, GGUFTensor, block_type
from haarkv.models.gguf_settings import HYBRIDS, ROPE_FACTORS, GGUFSettings
from haarkv.models.gguf_tokenizer import build_words
from haarkv.models.source import DRAFTING, CheckpointTensor, Empty, Words, checked_sampling
from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks

_OUTER = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
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
_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Names within a layer that are no part's `.weight` or `.bias`."""
_NEXTN = {
    "nextn.eh_proj": "mtp.fc.weight",
    "nextn.enorm": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm": "mtp.norm.weight",
    "nextn.embed_tokens": "mtp.embed_tokens.weight",
    "nextn.shared_head_head": "mtp.lm_head.weight",
}
"""What a layer that predicts several tokens has beside other layers' (`models.mtp`), by whole names."""
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Projections of all experts of a layer, one after the other in one tensor."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_HF_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.[0-9]+\.(\w+)")
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
_MOST_LAYERS = 10**4
_PLUS_ONE = {"gemma3", *HYBRIDS}
"""Architectures whose norms are stored with 1 added, but for DeltaNet's own."""


def _names_in_layer(architecture: str) -> Mapping[str, str]:
    """Hugging Face's names of a layer's parts, by the file's."""
    more = {"gemma3": _IN_GEMMA_LAYER, **dict.fromkeys(HYBRIDS, _IN_HYBRID_LAYER)}
    return _IN_LAYER | more.get(architecture, {})


def stored_name(name: str, architecture: str) -> str:
    """A file's name of a tensor that Hugging Face calls `name`; experts that are stored together have the same.

    One that no file holds keeps its own within the layer.

    >>> stored_name("model.layers.3.mlp.up_proj.weight", "llama")
    'blk.3.ffn_up.weight'
    """
    layer = _HF_LAYER.fullmatch(name)
    if layer is None:
        return next(file_name for file_name, theirs in _OUTER.items() if theirs == name)
    index, rest = layer.groups()
    part, _, kind = rest.rpartition(".")
    expert = _EXPERT.fullmatch(part)
    names, part = (_EXPERTS, expert[1]) if expert else (_names_in_layer(architecture), part)
    whole = next((file_name for file_name, theirs in _WHOLE.items() if theirs == rest), f"{part}.{kind}")
    return f"blk.{index}." + next((f"{file_name}.{kind}" for file_name, theirs in names.items() if theirs == part), whole)


def _llama_row_order(count: int, heads: int) -> Tensor:
    """[count] int64: of each row of a Llama's Q or K in Hugging Face's order, where llama.cpp's converter puts it."""
    return torch.arange(count).view(heads, count // heads // 2, 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class TensorPlace:
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

    def rows_and_columns(self, part: tuple[slice, ...] | None) -> tuple[Tensor, slice]:
        """Of a matrix, the rows [R] int64 of the file that a part of it lies in, in its order, and the part's columns."""
        count = self.shape[0]
        rows = torch.arange(count) if self.rows is None else self.rows
        rows, columns = (rows, slice(None)) if part is None else (rows[part[0]], part[1])
        return rows + count * (self.expert or 0), columns


def _delta_order(name: str, shape: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the `TensorPlace` of a tensor of DeltaNet's, or of a gate of one number a token; {} if it is read as it lies.

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
    head_order, value_order = _v_order(key_heads, value_heads, 1), _v_order(key_heads, value_heads, dim)
    keys = max(0, shape[0] - len(value_order))
    after_keys = torch.cat([torch.arange(keys), keys + value_order])
    orders: dict[str, dict[str, Any]] = {
        "in_proj_qkv.weight": {"rows": after_keys},
        "conv1d.weight": {"rows": after_keys, "axes": (shape[0], 1, shape[-1])},
        "in_proj_z.weight": {"rows": value_order},
        "in_proj_a.weight": {"rows": head_order},
        "in_proj_b.weight": {"rows": head_order},
        "A_log": {"rows": head_order, "change": _decay_log},
        "dt_bias": {"rows": head_order},
        "out_proj.weight": {"columns": value_order},
    }
    order = orders.get(name.split(".linear_attn.")[1], {})
    # Of another size, it is read as it lies: comparing shapes says what is wrong.
    fits = all(len(order[axis]) == size for axis, size in (("rows", shape[0]), ("columns", shape[-1])) if axis in order)
    return order if fits else {}


def _decay_log(decay: Tensor) -> Tensor:
    return torch.log(-decay)


def _less_one(weight: Tensor) -> Tensor:
    """w of 1 + w."""
    return weight - 1.0


def _v_order(key_heads: int, value_heads: int, dim: int) -> Tensor:
    """[value_heads * dim] int64: for each of Hugging Face's rows of V, the file's."""
    shared = value_heads // key_heads
    head = torch.arange(value_heads)
    in_file = head % shared * key_heads + head // shared
    return (in_file.unsqueeze(1) * dim + torch.arange(dim)).flatten()


@lru_cache(maxsize=1)
def _open_file(path: Path, size: int, mtime_ns: int) -> GGUFFile:  # noqa: ARG001
    """A model is asked for several times while it is loaded: its file is read once."""
    return GGUFFile(path)


class GGUFSource:
    """A GGUF file; attributes and methods as of `models.source.Source`."""

    def __init__(self, path: Path) -> None:
        self.path = self.settings_path = self.sampling_path = path
        try:
            stat = path.stat()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        self._file = _open_file(path, stat.st_size, stat.st_mtime_ns)
        self._entries = self._file.entries
        self._said = GGUFSettings(path, self._file)
        self.architecture = self._said.architecture
        self._places: dict[str, TensorPlace] = {}

    def files(self) -> Sequence[Path]:
        return self._file.paths

    def settings(self) -> Mapping[str, Any]:
        return self._said.read()

    def tensors(self) -> Mapping[str, CheckpointTensor]:
        self._places = self._places or self._find_places()
        return {name: self._checkpoint_tensor(place) for name, place in self._places.items()}

    def _checkpoint_tensor(self, place: TensorPlace) -> CheckpointTensor:
        tensor, kind = place.tensor, place.blocks
        block = 1 if kind is None else block_type(tensor.kind).numbers
        path = self._file.paths[tensor.part]
        return CheckpointTensor(place.shape, tensor.dtype, place.nbytes, path, tensor.fault, kind, place.in_place, block)

    def _find_places(self) -> dict[str, TensorPlace]:
        """Every tensor by Hugging Face's name; one that has none keeps its own, and is refused by it."""
        change = _less_one if self.architecture in _PLUS_ONE else None
        places = {
            _OUTER[name]: TensorPlace(tensor, change=change if name == "output_norm.weight" else None)
            for name, tensor in self._file.tensors.items()
            if name in _OUTER
        }
        settings: Mapping[str, Any] = self.settings() if self.architecture in HYBRIDS else {}
        # Behind a hybrid's own layers stands one that predicts several tokens, and perhaps others.
        own_layers = settings.get("num_hidden_layers") or 0 if settings else _MOST_LAYERS
        names = _names_in_layer(self.architecture)
        for name, tensor in self._file.tensors.items():
            layer = _LAYER.fullmatch(name)
            index, rest = layer.groups() if layer else (-1, "")
            if name in _OUTER or name == ROPE_FACTORS or (layer and int(index) > own_layers):
                continue
            drafts, (part, _, kind) = int(index) == own_layers, rest.rpartition(".")
            before = f"{DRAFTING}layers.0." if drafts else f"model.layers.{int(index)}."
            if part in _EXPERTS and len(tensor.shape) == 3:
                places |= _expert_places(before, part, tensor)
                continue
            hf_name = f"{names[part]}.{kind}" if part in names and kind in ("weight", "bias") else _WHOLE.get(rest)
            hf_name = (_NEXTN.get(part) if drafts else None) or (f"{before}{hf_name}" if hf_name else name)
            norm = self.architecture in _PLUS_ONE and part.endswith("norm") and part != "ssm_norm"
            order: dict[str, Any] = {"rows": self._rows(name, part, tensor), "change": _less_one if norm else None}
            places[hf_name] = TensorPlace(tensor, **order | _delta_order(hf_name, tensor.shape, settings))
        return places

    def _rows(self, name: str, part: str, tensor: GGUFTensor) -> Tensor | None:
        """The file's order of the rows of a Llama's Q or K."""
        count = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part) if self.architecture == "llama" else None
        heads = self._said.setting(f"attention.{count}", self._said.setting("attention.head_count")) if count else None
        if heads is None:
            return None
        rows = tensor.shape[0]
        if not isinstance(heads, int) or heads <= 0 or rows % (2 * heads):
            raise InputError(f"{self.path}: {name} has {rows} rows, which {shown(heads)} heads cannot share evenly")
        return _llama_row_order(rows, heads)

    def _place(self, name: str) -> TensorPlace:
        self._places = self._places or self._find_places()
        return self._places[name]

    def read(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None, empty: Empty | None = None) -> Tensor:
        place = self._place(name)
        options: dict[str, Any] = {"change": place.change} | ({} if empty is None else {"empty": empty})
        is_matrix = len(place.tensor.shape) > 1
        if is_matrix and place.columns is None and place.axes is None:
            if part is None and place.expert is None and place.rows is None:
                return self._file.read(place.tensor, dtype, **options)
            return self._file.read(place.tensor, dtype, *place.rows_and_columns(part), **options)
        whole = self._file.read(place.tensor, dtype, place.rows if is_matrix else None, **options)
        if place.rows is not None and not is_matrix:
            whole = whole[place.rows]
        if place.columns is not None:
            whole = whole[:, place.columns]
        whole = whole.view(place.shape)
        return whole if part is None else whole[part].contiguous()

    def blocks(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None) -> Blocks | None:
        place = self._place(name)
        if place.blocks is None:
            return None
        kind, raw_rows = block_type(place.tensor.kind), self._file.stored_rows(place.tensor)
        rows, columns = place.rows_and_columns(part)
        if self._checkpoint_tensor(place).cuts(columns):
            return None
        begin, end, _ = columns.indices(place.shape[1])
        # In the file's pages, but where their order is another.
        data = raw_rows[rows] if place.rows is not None else raw_rows[int(rows[0]) : int(rows[-1]) + 1]
        return Blocks(data[:, begin // kind.numbers * kind.nbytes : end // kind.numbers * kind.nbytes], kind, dtype)

    @property
    def file(self) -> GGUFFile:
        """The file, with its own names."""
        return self._file

    def by_stored_name(self, column_values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is known of columns of matrices, by the names and in the order that the file has.

        Args:
            column_values: [in] each, by Hugging Face's names.
        Returns:
            [in] each; [experts, in] of experts that are stored together, if it is known of all.
        """
        self._places = self._places or self._find_places()
        file_names = {id(tensor): name for name, tensor in self._file.tensors.items()}
        values_by_name: dict[str, Tensor] = {}
        experts: dict[str, dict[int, Tensor]] = {}
        for name, place in self._places.items():
            if (values := column_values.get(name)) is None or len(values) != place.tensor.shape[-1]:
                continue
            file_name = file_names[id(place.tensor)]
            if place.columns is not None:
                values = torch.empty_like(values).index_copy_(0, place.columns, values)
            if place.expert is None:
                values_by_name[file_name] = values
            else:
                experts.setdefault(file_name, {})[place.expert] = values
        for file_name, expert_values in experts.items():
            if len(expert_values) == self._file.tensors[file_name].shape[0]:
                values_by_name[file_name] = torch.stack([expert_values[expert] for expert in sorted(expert_values)])
        return values_by_name

    def words(self) -> Words:
        embedding = self._file.tensors.get("token_embd.weight")
        return build_words(self.path, self._entries, embedding.shape[0] if embedding else None)

    def sampling(self) -> dict[str, float]:
        sampling = {name: self._entries.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
        return checked_sampling(
            {name: decimal(value) for name, value in sampling.items() if value is not None},
            self.path,
            tuple(_SAMPLING.values()),
        )


def _expert_places(before: str, part: str, tensor: GGUFTensor) -> dict[str, TensorPlace]:
    """The projections of a layer's experts, each by Hugging Face's name, which begins with the layer's."""
    return {
        f"{before}mlp.experts.{expert}.{_EXPERTS[part]}.weight": TensorPlace(tensor, expert)
        for expert in range(tensor.shape[0])
    }
