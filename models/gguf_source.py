"""A model from a GGUF file: its tensors under Hugging Face's names, in Hugging Face's order.

llama.cpp's converter interleaves the rows of a Llama's Q and K for RoPE. Of Gated DeltaNet it orders heads of V by their index
within a key head first, and stores decays as -exp(A_log) and the convolution without its middle axis. Norms of 1 + w are
stored as 1 + w.
"""

from __future__ import annotations

import math
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from haarkv.models.config import Attention, ModelConfig, decimal
from haarkv.models.gguf_file import KV_CHOICE, GGUFFile, GGUFTensor, block_type
from haarkv.models.gguf_metadata import ROPE_FACTORS, GGUFSettings, build_words
from haarkv.models.hf_config import parse_config
from haarkv.models.layer import DeltaNet
from haarkv.models.source import DRAFTING, CheckpointTensor, Part, Words, checked_sampling
from haarkv.models.tensors import StoredTensor
from haarkv.models.weights import checkpoint_tensors
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks, Empty, empty_tensor

_NEXTN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
    "embed_tokens": "embed_tokens",
    "shared_head_head": "lm_head",
}
"""Further tensors of the drafting layer (`models.mtp`); gguf has no names for them."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_HF_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.")


@cache
def _name_map(architecture: str) -> gguf.TensorNameMap:
    """gguf's names, of a model of one layer."""
    arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), gguf.MODEL_ARCH.LLAMA)
    return gguf.get_tensor_name_map(arch, 1)


def stored_name(name: str, architecture: str) -> str:
    """A file's name of a tensor that Hugging Face calls `name`, the same for stacked experts; unknown names stay.

    >>> stored_name("model.layers.3.mlp.up_proj.weight", "llama")
    'blk.3.ffn_up.weight'
    """
    layer = _HF_LAYER.fullmatch(name)
    if layer:
        # As the converter renames them.
        name = "model.layers.0." + re.sub(r"experts\.[0-9]+", "experts", layer[2]).replace("dt_bias", "dt_proj.bias")
    file_name: str = _name_map(architecture).get_name(name, try_suffixes=(".weight", ".bias")) or name
    return file_name.replace("blk.0.", f"blk.{layer[1]}.") if layer else file_name


def stored_tensors_of(config: ModelConfig, architecture: str) -> dict[str, StoredTensor]:
    """The tensors of a config by a file's names; of stacked experts the first."""
    tensors = checkpoint_tensors(config)
    names = (name for name in tensors if ".experts." not in name or ".experts.0." in name)
    return {stored_name(name, architecture): tensors[name] for name in names}


@dataclass(frozen=True, kw_only=True)
class _FileTensor(CheckpointTensor):
    """A tensor made of a file's.

    Attributes:
        stored: the file's.
        expert: index in a stacked tensor.
        rows, columns: index in the file of each row or column; None if they are in order.
        change: applied to the file's numbers in FP32.
    """

    opened: GGUFFile
    stored: GGUFTensor
    expert: int | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    change: Callable[[Tensor], Tensor] | None = None

    def _rows_and_columns(self, part: Part) -> tuple[Tensor, slice]:
        """Rows [R] int64 in the file of a part of a matrix, and the part's columns."""
        count = self.shape[0]
        rows = torch.arange(count) if self.rows is None else self.rows
        rows, columns = (rows, slice(None)) if part is None else (rows[part[0]], part[1])
        return rows + count * (self.expert or 0), columns

    def read(self, dtype: torch.dtype, part: Part = None, empty: Empty = empty_tensor) -> Tensor:
        is_matrix = len(self.stored.shape) > 1
        if is_matrix and self.columns is None and self.shape == self.stored.shape[self.expert is not None :]:
            if part is None and self.expert is None and self.rows is None:
                return self.opened.read(self.stored, dtype, change=self.change, empty=empty)
            return self.opened.read(self.stored, dtype, *self._rows_and_columns(part), self.change, empty)
        whole = self.opened.read(self.stored, dtype, self.rows if is_matrix else None, change=self.change, empty=empty)
        if self.rows is not None and not is_matrix:
            whole = whole[self.rows]
        if self.columns is not None:
            whole = whole[:, self.columns]
        whole = whole.view(self.shape)
        return whole if part is None else whole[part].contiguous()

    def read_blocks(self, dtype: torch.dtype, part: Part = None) -> Blocks | None:
        if self.blocks is None:
            return None
        kind, raw_rows = block_type(self.stored.kind), self.opened.stored_rows(self.stored)
        rows, columns = self._rows_and_columns(part)
        if self.cuts(columns):
            return None
        begin, end, _ = columns.indices(self.shape[1])
        data = raw_rows[rows] if self.rows is not None else raw_rows[int(rows[0]) : int(rows[-1]) + 1]
        return Blocks(data[:, begin // kind.numbers * kind.nbytes : end // kind.numbers * kind.nbytes], kind, dtype)


def _order(name: str, mixer: object, shape: tuple[int, ...], architecture: str) -> dict[str, Any]:
    """Fields of `_FileTensor`, and a shape, for a tensor by Hugging Face name; {} if rows and columns are in order.

    Args:
        shape: the file's. Of one that does not fit, nothing is reordered: comparing shapes says what is wrong.
    """
    order: dict[str, Any] = {}
    if name.endswith("mlp.shared_expert_gate.weight"):
        order = {"shape": (1, shape[-1])}
    elif isinstance(mixer, DeltaNet):
        v_heads, v_rows = (_v_order(mixer, dim) for dim in (1, mixer.value_dim))
        keys = max(0, shape[0] - len(v_rows))
        after_keys = torch.cat([torch.arange(keys), keys + v_rows])
        orders: dict[str, dict[str, Any]] = {
            "in_proj_qkv.weight": {"rows": after_keys},
            "conv1d.weight": {"rows": after_keys, "shape": (shape[0], 1, shape[-1])},
            "in_proj_z.weight": {"rows": v_rows},
            "in_proj_a.weight": {"rows": v_heads},
            "in_proj_b.weight": {"rows": v_heads},
            "A_log": {"rows": v_heads, "change": lambda decay: torch.log(-decay)},
            "dt_bias": {"rows": v_heads},
            "out_proj.weight": {"columns": v_rows},
        }
        order = orders.get(name.rpartition(".linear_attn.")[2], {})
    elif isinstance(mixer, Attention) and architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = mixer.num_heads if name.endswith("q_proj.weight") else mixer.num_kv_heads
        if shape[0] == heads * mixer.head_dim:
            order = {"rows": torch.arange(shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)}
    fits = all(len(order[axis]) == size for axis, size in (("rows", shape[0]), ("columns", shape[-1])) if axis in order)
    return order if fits else {}


def _v_order(mixer: DeltaNet, dim: int) -> Tensor:
    """[heads of V * dim] int64: row of the file for each row of V."""
    shared = mixer.num_value_heads // mixer.num_key_heads
    head = torch.arange(mixer.num_value_heads)
    in_file = head % shared * mixer.num_key_heads + head // shared
    return (in_file.unsqueeze(1) * dim + torch.arange(dim)).flatten()


@lru_cache(maxsize=1)
def _open_file(path: Path, size: int, mtime_ns: int) -> GGUFFile:  # noqa: ARG001
    # Loading opens a model several times.
    return GGUFFile(path)


@lru_cache(maxsize=1)
def _words(path: Path, file: GGUFFile) -> Words:
    # A vocabulary of 262,144 tokens takes two seconds, and a model's first run needs it three times.
    embedding = file.tensors.get("token_embd.weight")
    return build_words(path, file.entries, embedding.shape[0] if embedding else None)


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
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, _FileTensor]:
        """Every tensor by Hugging Face's name, or by its own if the config has none of it."""
        config, tensors = parse_config(self.path, self.settings()), dict[str, _FileTensor]()
        specs = stored_tensors_of(config, self.architecture) | self._drafting_specs(config)
        for name, stored in self.file.tensors.items():
            layer, spec = _LAYER.match(name), specs.get(name)
            if name == ROPE_FACTORS or (layer and spec is None and self._drafts and int(layer[1]) >= config.num_layers):
                continue
            if spec is None:
                tensors[name] = self._file_tensor(stored)
            elif ".experts.0." in spec.name and len(stored.shape) == 3:
                for expert in range(stored.shape[0]):
                    tensors[spec.name.replace(".experts.0.", f".experts.{expert}.")] = self._file_tensor(stored, expert)
            else:
                mixer = config.layers[int(layer[1])].mixer if layer and int(layer[1]) < config.num_layers else None
                order = _order(spec.name, mixer, stored.shape, self.architecture)
                change = (lambda weight: weight - 1.0) if spec.plus_one else None
                tensors[spec.name] = self._file_tensor(stored, **{"change": change} | order)
        return tensors

    @property
    def _drafts(self) -> bool:
        """Whether drafting layers stand behind the model's own."""
        return bool(self._settings.setting("nextn_predict_layers"))

    def _drafting_specs(self, config: ModelConfig) -> dict[str, StoredTensor]:
        """Tensors of the drafting layer by the file's names: those of a layer of attention, and what is around it."""
        like = next((index for index, layer in enumerate(config.layers) if isinstance(layer.mixer, Attention)), None)
        if like is None or not self._drafts:
            return {}
        before, layer = f"blk.{config.num_layers}.", f"model.layers.{like}."
        specs = {
            name.replace(f"blk.{like}.", before): replace(spec, name=spec.name.replace(layer, f"{DRAFTING}layers.0."))
            for name, spec in stored_tensors_of(config, self.architecture).items()
            if spec.name.startswith(layer)
        }
        plus_one = config.final_norm.plus_one
        return specs | {
            f"{before}nextn.{name}.weight": StoredTensor(f"{DRAFTING}{theirs}.weight", (), plus_one and "norm" in name)
            for name, theirs in _NEXTN.items()
        }

    def _file_tensor(self, stored: GGUFTensor, expert: int | None = None, **order: Any) -> _FileTensor:
        order = {name: value for name, value in order.items() if value is not None}
        file_shape = stored.shape[expert is not None :]
        shape = order.pop("shape", file_shape)
        by_rows = "columns" not in order and "change" not in order and shape == file_shape
        blocks = stored.blocks if len(shape) == 2 and by_rows else None
        in_place = "rows" not in order and by_rows and (expert is None or blocks is not None)
        nbytes, block = stored.nbytes // (1 if expert is None else stored.shape[0]), 1
        if blocks is not None:
            block = block_type(stored.kind).numbers
        return _FileTensor(
            shape, stored.dtype, nbytes, self.file.paths[stored.part], stored.fault, blocks, in_place, block,
            opened=self.file, stored=stored, expert=expert, **order,
        )  # fmt: skip

    def by_stored_name(self, column_values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of columns, [in] by Hugging Face's names, in the file's names and order: [1 or experts, in]."""
        file_names = {id(tensor): name for name, tensor in self.file.tensors.items()}
        matrices: dict[str, dict[int, Tensor]] = {}
        for name, tensor in self._tensors.items():
            if (values := column_values.get(name)) is None or len(values) != tensor.stored.shape[-1]:
                continue
            if tensor.columns is not None:
                values = torch.empty_like(values).index_copy_(0, tensor.columns, values)
            matrices.setdefault(file_names[id(tensor.stored)], {})[tensor.expert or 0] = values
        return {
            name: torch.stack([each[expert] for expert in sorted(each)]) for name, each in matrices.items()
            if len(each) == math.prod(self.file.tensors[name].shape[:-2])
        }  # fmt: skip

    def words(self) -> Words:
        return _words(self.path, self.file)

    def sampling(self) -> dict[str, float]:
        values = {name: decimal(self.file.entries.get(f"general.sampling.{key}")) for key, name in _SAMPLING.items()}
        return checked_sampling(values, self.path, tuple(values))

    def kv_choice(self) -> bytes:
        text = self.file.entries.get(KV_CHOICE)
        try:
            return b64decode(text) if isinstance(text, str) else b""
        except ValueError:
            return b""
