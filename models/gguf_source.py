"""A model from a GGUF file: its tensors under Hugging Face's names, in Hugging Face's order.

llama.cpp's converter interleaves the rows of a Llama's Q and K for RoPE. Of Gated DeltaNet it orders heads of V by their index
within a key head first, and stores decays as -exp(A_log) and the convolution without its middle axis. Norms of 1 + w are
stored as 1 + w.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import decimal
from haarkv.models.gguf_file import GGUFFile, GGUFTensor, block_type
from haarkv.models.gguf_settings import ROPE_FACTORS, GGUFSettings, architecture_row
from haarkv.models.gguf_tokenizer import build_words
from haarkv.models.source import DRAFTING, CheckpointTensor, Empty, Words, checked_sampling
from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks

_OUTER = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Names within a layer without `.weight` or `.bias`."""
_NEXTN = {
    "nextn.eh_proj": "mtp.fc.weight",
    "nextn.enorm": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm": "mtp.norm.weight",
    "nextn.embed_tokens": "mtp.embed_tokens.weight",
    "nextn.shared_head_head": "mtp.lm_head.weight",
}
"""Further tensors of the drafting layer (`models.mtp`)."""
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Projections of all experts of a layer, stacked in one tensor."""
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


def stored_name(name: str, architecture: str) -> str:
    """A file's name of a tensor that Hugging Face calls `name`, the same for stacked experts; unknown names stay.

    >>> stored_name("model.layers.3.mlp.up_proj.weight", "llama")
    'blk.3.ffn_up.weight'
    """
    layer = _HF_LAYER.fullmatch(name)
    if layer is None:
        return next(file_name for file_name, theirs in _OUTER.items() if theirs == name)
    index, rest = layer.groups()
    part, _, kind = rest.rpartition(".")
    expert = _EXPERT.fullmatch(part)
    names, part = (_EXPERTS, expert[1]) if expert else (architecture_row(architecture).names, part)
    whole = next((file_name for file_name, theirs in _WHOLE.items() if theirs == rest), f"{part}.{kind}")
    return f"blk.{index}." + next((f"{file_name}.{kind}" for file_name, theirs in names.items() if theirs == part), whole)


def _llama_row_order(count: int, heads: int) -> Tensor:
    """[count] int64: row of the file for each row of a Llama's Q or K."""
    return torch.arange(count).view(heads, count // heads // 2, 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class TensorMapping:
    """How a tensor of Hugging Face's is made of a file's.

    Attributes:
        expert: index in a stacked tensor.
        rows, columns: index in the file of each row or column; None if they are in order.
        axes: final shape; None if it is the file's.
        change: applied to the file's numbers in FP32.
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
        """Whether it is whole rows of the file's."""
        return self.columns is None and self.axes is None and self.change is None

    @property
    def blocks(self) -> str | None:
        """Type of its quantized blocks, where they can be kept."""
        return self.tensor.blocks if len(self.shape) == 2 and self.by_rows else None

    @property
    def in_place(self) -> bool:
        """Whether it stays in the file's pages."""
        return self.rows is None and self.by_rows and (self.expert is None or self.blocks is not None)

    def rows_and_columns(self, part: tuple[slice, ...] | None) -> tuple[Tensor, slice]:
        """Rows [R] int64 in the file of a part of a matrix, and the part's columns."""
        count = self.shape[0]
        rows = torch.arange(count) if self.rows is None else self.rows
        rows, columns = (rows, slice(None)) if part is None else (rows[part[0]], part[1])
        return rows + count * (self.expert or 0), columns


def _delta_order(name: str, shape: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TensorMapping` for a tensor of DeltaNet or a shared expert's gate, by Hugging Face name and file's shape."""
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
    # Of another size, it is not reordered: comparing shapes says what is wrong.
    fits = all(len(order[axis]) == size for axis, size in (("rows", shape[0]), ("columns", shape[-1])) if axis in order)
    return order if fits else {}


def _decay_log(decay: Tensor) -> Tensor:
    return torch.log(-decay)


def _less_one(weight: Tensor) -> Tensor:
    return weight - 1.0


def _v_order(key_heads: int, value_heads: int, dim: int) -> Tensor:
    """[value_heads * dim] int64: row of the file for each row of V."""
    shared = value_heads // key_heads
    head = torch.arange(value_heads)
    in_file = head % shared * key_heads + head // shared
    return (in_file.unsqueeze(1) * dim + torch.arange(dim)).flatten()


@lru_cache(maxsize=1)
def _open_file(path: Path, size: int, mtime_ns: int) -> GGUFFile:  # noqa: ARG001
    # Loading opens a model several times.
    return GGUFFile(path)


class GGUFSource:
    """A GGUF file, a `Source`."""

    def __init__(self, path: Path) -> None:
        self.path = self.settings_path = self.sampling_path = path
        try:
            stat = path.stat()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        self.file = _open_file(path, stat.st_size, stat.st_mtime_ns)
        self._settings = GGUFSettings(path, self.file)
        self.architecture = self._settings.architecture

    def files(self) -> Sequence[Path]:
        return self.file.paths

    def settings(self) -> Mapping[str, Any]:
        return self._settings.read()

    def tensors(self) -> Mapping[str, CheckpointTensor]:
        return {name: self._checkpoint_tensor(mapping) for name, mapping in self._mappings.items()}

    def _checkpoint_tensor(self, mapping: TensorMapping) -> CheckpointTensor:
        tensor, kind = mapping.tensor, mapping.blocks
        block = 1 if kind is None else block_type(tensor.kind).numbers
        path = self.file.paths[tensor.part]
        return CheckpointTensor(mapping.shape, tensor.dtype, mapping.nbytes, path, tensor.fault, kind, mapping.in_place, block)

    @cached_property
    def _mappings(self) -> dict[str, TensorMapping]:
        """Every tensor by Hugging Face's name, or by its own if it has none."""
        row, mappings = architecture_row(self.architecture), dict[str, TensorMapping]()
        settings: Mapping[str, Any] = self.settings() if row.hybrid else {}
        # Behind a hybrid's own layers stands the drafting layer, and perhaps others.
        own_layers = settings.get("num_hidden_layers") or 0 if settings else _MOST_LAYERS
        for name, tensor in self.file.tensors.items():
            layer = _LAYER.fullmatch(name)
            index, rest = layer.groups() if layer else (-1, name)
            if name == ROPE_FACTORS or int(index) > own_layers:
                continue
            drafts, (part, _, kind) = int(index) == own_layers, rest.rpartition(".")
            before = f"{DRAFTING}layers.0." if drafts else f"model.layers.{int(index)}."
            if layer and part in _EXPERTS and len(tensor.shape) == 3:
                for expert in range(tensor.shape[0]):
                    mappings[f"{before}mlp.experts.{expert}.{_EXPERTS[part]}.weight"] = TensorMapping(tensor, expert)
                continue
            in_layer = f"{row.names[part]}.{kind}" if part in row.names and kind in ("weight", "bias") else _WHOLE.get(rest)
            hf_name = f"{before}{in_layer}" if layer and in_layer else _OUTER.get(name, name)
            hf_name = _NEXTN.get(part, hf_name) if drafts else hf_name
            norm = row.plus_one and part.endswith("norm") and part != "ssm_norm"
            order: dict[str, Any] = {"rows": self._rows(name, part, tensor), "change": _less_one if norm else None}
            mappings[hf_name] = TensorMapping(tensor, **order | _delta_order(hf_name, tensor.shape, settings))
        return mappings

    def _rows(self, name: str, part: str, tensor: GGUFTensor) -> Tensor | None:
        count = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part) if self.architecture == "llama" else None
        heads = self._settings.setting(f"attention.{count}", self._settings.setting("attention.head_count")) if count else None
        if heads is None:
            return None
        rows = tensor.shape[0]
        if not isinstance(heads, int) or heads <= 0 or rows % (2 * heads):
            raise InputError(f"{self.path}: {name} has {rows} rows, which {shown(heads)} heads cannot share evenly")
        return _llama_row_order(rows, heads)

    def read(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None, empty: Empty | None = None) -> Tensor:
        mapping = self._mappings[name]
        options: dict[str, Any] = {"change": mapping.change} | ({} if empty is None else {"empty": empty})
        is_matrix = len(mapping.tensor.shape) > 1
        if is_matrix and mapping.columns is None and mapping.axes is None:
            if part is None and mapping.expert is None and mapping.rows is None:
                return self.file.read(mapping.tensor, dtype, **options)
            return self.file.read(mapping.tensor, dtype, *mapping.rows_and_columns(part), **options)
        whole = self.file.read(mapping.tensor, dtype, mapping.rows if is_matrix else None, **options)
        if mapping.rows is not None and not is_matrix:
            whole = whole[mapping.rows]
        if mapping.columns is not None:
            whole = whole[:, mapping.columns]
        whole = whole.view(mapping.shape)
        return whole if part is None else whole[part].contiguous()

    def blocks(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None) -> Blocks | None:
        mapping = self._mappings[name]
        if mapping.blocks is None:
            return None
        kind, raw_rows = block_type(mapping.tensor.kind), self.file.stored_rows(mapping.tensor)
        rows, columns = mapping.rows_and_columns(part)
        if self._checkpoint_tensor(mapping).cuts(columns):
            return None
        begin, end, _ = columns.indices(mapping.shape[1])
        data = raw_rows[rows] if mapping.rows is not None else raw_rows[int(rows[0]) : int(rows[-1]) + 1]
        return Blocks(data[:, begin // kind.numbers * kind.nbytes : end // kind.numbers * kind.nbytes], kind, dtype)

    def by_stored_name(self, column_values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of columns, [in] by Hugging Face's names, in the file's names and order; [experts, in] of stacked experts."""
        file_names = {id(tensor): name for name, tensor in self.file.tensors.items()}
        values_by_name: dict[str, Tensor] = {}
        experts: dict[str, dict[int, Tensor]] = {}
        for name, mapping in self._mappings.items():
            if (values := column_values.get(name)) is None or len(values) != mapping.tensor.shape[-1]:
                continue
            file_name = file_names[id(mapping.tensor)]
            if mapping.columns is not None:
                values = torch.empty_like(values).index_copy_(0, mapping.columns, values)
            if mapping.expert is None:
                values_by_name[file_name] = values
            else:
                experts.setdefault(file_name, {})[mapping.expert] = values
        for file_name, expert_values in experts.items():
            if len(expert_values) == self.file.tensors[file_name].shape[0]:
                values_by_name[file_name] = torch.stack([expert_values[expert] for expert in sorted(expert_values)])
        return values_by_name

    def words(self) -> Words:
        embedding = self.file.tensors.get("token_embd.weight")
        return build_words(self.path, self.file.entries, embedding.shape[0] if embedding else None)

    def sampling(self) -> dict[str, float]:
        values = {name: decimal(self.file.entries.get(f"general.sampling.{key}")) for key, name in _SAMPLING.items()}
        return checked_sampling(values, self.path, tuple(values))
