"""A model from a GGUF file, as llama.cpp's converters write it: its settings and tensors under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np
import torch
from torch import Tensor

from haarkv.models import gguf_hybrid
from haarkv.models.gguf_file import GGUFFile, GGUFTensor, block_type
from haarkv.models.gguf_names import EXPERTS, IN_GEMMA_LAYER, IN_LAYER, OUTER, SAMPLING, rows_of
from haarkv.models.gguf_rope import llama3_entries, scaling_entries
from haarkv.models.gguf_words import words_of
from haarkv.models.source import Empty, Held, Words, checked_sampling
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks

MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text",
    "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe",
}  # fmt: skip
"""`model_type` by general.architecture; any other is refused by its own name, as of a folder."""
_ENTRIES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_ROPE = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.(\w+)\.(weight|bias)")
_IN_HYBRID_LAYER = IN_LAYER | gguf_hybrid.IN_LAYER
_ANY_LAYER = re.compile(r"blk\.([0-9]{1,4})\.(.+)")
_GEMMA_PATTERN, _GEMMA_LOCAL_BASE, _GEMMA_27B = 6, 1e4, 62
"""What llama.cpp takes where a Gemma 3 does not say it: every sixth layer sees all tokens, RoPE's base of the others, and the
layers of the one member whose attention is scaled by another number than its head's."""
_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
"""Special tokens that end an answer, whatever the file says of them; llama.cpp goes by the same names."""


@lru_cache(maxsize=1)
def _opened(path: Path, size: int, changed: int) -> GGUFFile:  # noqa: ARG001
    """A model is asked for several times while it is loaded: its file is read once."""
    return GGUFFile(path)


@dataclass(frozen=True)
class _Place:
    """Where a tensor of Hugging Face's name lies.

    Attributes:
        expert: which of those that are stored together.
        heads: its rows are permuted within each of so many heads.
        shifted: it is stored with 1 added.
        order: of rows, columns and axes where Hugging Face has another.
    """

    tensor: GGUFTensor
    expert: int | None = None
    heads: int | None = None
    shifted: bool = False
    order: gguf_hybrid.Order | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.order is not None and self.order.shape is not None:
            return self.order.shape
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes // (1 if self.expert is None else self.tensor.shape[0])

    @property
    def blocks(self) -> str | None:
        """Name of the type of its blocks, where they can be kept: in the file's order, or with whole rows in another."""
        by_rows = self.order is None or (self.order.rows is not None and self.order.shape is None)
        return self.tensor.blocks if len(self.shape) == 2 and not self.shifted and by_rows else None

    @property
    def in_place(self) -> bool:
        """Whether what is kept of it stays in the file's pages."""
        return (
            self.heads is None and self.order is None and not self.shifted and (self.expert is None or self.blocks is not None)
        )

    def wanted(self, part: tuple[slice, ...] | None) -> tuple[Tensor, slice]:
        """Of a matrix, the rows [R] int64 of the file that a part of it lies in, in its order, and the part's columns."""
        count = self.shape[0]
        rows = torch.arange(count) if self.heads is None else rows_of(count, self.heads)
        if self.order is not None and self.order.rows is not None:
            rows = self.order.rows
        rows, columns = (rows, slice(None)) if part is None else (rows[part[0]], part[1])
        return rows + count * (self.expert or 0), columns


class GGUFSource:
    """A GGUF file; attributes and methods as of `models.source.Source`.

    Raises:
        InputError: it is none, is damaged, or is one part of several.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.settings_path = self.sampling_path = path
        try:
            stat = path.stat()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        self._file = _opened(path, stat.st_size, stat.st_mtime_ns)
        self._entries = self._file.entries
        self._architecture = str(self._entries.get("general.architecture"))
        if (parts := self._entries.get("split.count", 1)) != 1:
            raise InputError(f"{path} is one of {shown(parts)} parts of a model; join them with llama-gguf-split --merge")
        self._places: dict[str, _Place] = {}

    def _said(self, key: str, default: Any = None) -> Any:
        """An entry of the model's architecture."""
        return self._entries.get(f"{self._architecture}.{key}", default)

    def settings(self) -> Mapping[str, Any]:
        embedding = self._file.tensors.get("token_embd.weight")
        found = {name: _decimal(value) for key, name in _ENTRIES.items() if (value := self._said(key)) is not None}
        found["model_type"] = MODEL_TYPES.get(self._architecture, self._architecture)
        found["vocab_size"] = embedding.shape[0] if embedding else self._said("vocab_size")
        found["tie_word_embeddings"] = "output.weight" not in self._file.tensors
        found["attention_bias"] = found["model_type"] != "qwen2" and "blk.0.attn_q.bias" in self._file.tensors
        found["mlp_bias"] = "blk.0.ffn_up.bias" in self._file.tensors
        found["eos_token_id"] = self._ends()
        self._add_shapes(found)
        found |= scaling_entries(self.path, self._architecture, self._entries)
        if (factors := self._file.tensors.get(_ROPE)) is not None:
            found |= self._llama3(factors, found)
        if self._architecture in gguf_hybrid.ARCHITECTURES:
            found |= gguf_hybrid.entries(self._said, found)
        if found["model_type"] == "gemma3_text":
            self._add_gemma(found)
        elif window := found.get("sliding_window"):
            if self._architecture != "llama":
                name = f"{self._architecture} with a sliding window of {shown(window)}"
                raise InputError(f"{self.path}: {name}, and the file does not say of which layers; none is read")
            found["model_type"] = "mistral"  # llama.cpp calls a Mistral a llama
        return found

    def _add_shapes(self, found: dict[str, Any]) -> None:
        """What a file may leave out and a `config.json` may not."""
        heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
        found.setdefault("num_key_value_heads", heads)
        found.setdefault("rope_theta", 1e4)
        if isinstance(heads, int) and isinstance(hidden, int) and heads:
            found.setdefault("head_dim", hidden // heads)
        dim, rotated = found.get("head_dim"), self._said("rope.dimension_count")
        if (width := self._said("attention.value_length", dim)) != dim:
            raise InputError(
                f"{self.path}: heads of V have {shown(width)} channels and those of K {shown(dim)}; none is built"
            )
        if isinstance(rotated, int) and isinstance(dim, int) and dim:
            found["partial_rotary_factor"] = rotated / dim
        if self._architecture == "qwen3moe":
            found["norm_topk_prob"] = self._said("expert_weights_norm", True)
        elif self._architecture not in gguf_hybrid.ARCHITECTURES and found.pop("num_experts", None):
            found["model_type"] += " with experts"

    def _llama3(self, factors: GGUFTensor, found: Mapping[str, Any]) -> dict[str, Any]:
        dim, theta = found.get("head_dim"), found["rope_theta"]
        if factors.fault is not None:
            raise InputError(f"{self.path}: {_ROPE} {factors.fault}")
        if factors.shape != (dim // 2 if isinstance(dim, int) else None,) or not isinstance(theta, float):
            raise InputError(f"{self.path}: {_ROPE} has shape {list(factors.shape)}, heads have {shown(dim)} channels")
        return llama3_entries(self.path, self._file.read(factors, torch.float32), theta)

    def _add_gemma(self, found: dict[str, Any]) -> None:
        layers, window = found.get("num_hidden_layers"), found.get("sliding_window")
        every = self._said("attention.sliding_window_pattern", _GEMMA_PATTERN) if window else 1
        if isinstance(layers, int) and 0 < layers < 2**10:
            if isinstance(every, list):
                local = [bool(is_local) for is_local in every]
            elif isinstance(every, int) and every > 0:
                local = [bool((index + 1) % every) for index in range(layers)]
            else:
                raise InputError(f"{self.path}: sliding_window_pattern {shown(every)} is neither a number nor a list")
            found["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in local]
        found["hidden_activation"] = found["hidden_act"] = "gelu_pytorch_tanh"
        found["rope_local_base_freq"] = _decimal(self._said("rope.freq_base_swa", _GEMMA_LOCAL_BASE))
        found["final_logit_softcapping"] = self._said("final_logit_softcapping")
        scale = found.get("head_dim")
        if layers == _GEMMA_27B and all(isinstance(found.get(key), int) for key in ("hidden_size", "num_attention_heads")):
            scale = found["hidden_size"] // max(1, found["num_attention_heads"])
        found["query_pre_attn_scalar"] = scale

    def _ends(self) -> list[Any]:
        tokens, kinds = (self._entries.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
        ids = [self._entries.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        if isinstance(tokens, list) and isinstance(kinds, list):
            control = {token: id for id, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == 3}
            ids += [control.get(name) for name in _ENDS]
        # One that is no number is refused with the rest of the settings; a list has no hash.
        return [id for at, id in enumerate(ids) if id is not None and id not in ids[:at]]

    def tensors(self) -> Mapping[str, Held]:
        self._places = self._places or self._found()
        return {
            name: Held(
                place.shape, place.tensor.dtype, place.nbytes, self.path, place.tensor.fault, place.blocks, place.in_place
            )
            for name, place in self._places.items()
        }  # fmt: skip

    def _found(self) -> dict[str, _Place]:
        """Every tensor by Hugging Face's name; one that has none keeps its own, for whoever refuses it."""
        if self._architecture in gguf_hybrid.ARCHITECTURES:
            return self._found_hybrid()
        gemma, llama = self._architecture == "gemma3", self._architecture == "llama"
        found: dict[str, _Place] = {}
        for name, tensor in self._file.tensors.items():
            if name in OUTER:
                found[OUTER[name]] = _Place(tensor, shifted=gemma and name == "output_norm.weight")
            elif name != _ROPE:
                layer = _LAYER.fullmatch(name)
                index, part, kind = layer.groups() if layer else ("", "", "")
                known = IN_GEMMA_LAYER if gemma else IN_LAYER
                if part in known:
                    count = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part) if llama else None
                    heads = self._said(f"attention.{count}", self._said("attention.head_count")) if count else None
                    place = _Place(tensor, heads=self._heads(name, tensor, heads), shifted=gemma and part.endswith("norm"))
                    found[f"model.layers.{index}.{known[part]}.{kind}"] = place
                elif part in EXPERTS and len(tensor.shape) == 3:
                    found |= _of_experts(index, part, tensor)
                else:
                    found[name] = _Place(tensor)
        return found

    def _found_hybrid(self) -> dict[str, _Place]:
        """The same of layers that keep a state. All norms are stored with 1 added, but for DeltaNet's own."""
        settings, found = self.settings(), {}
        for name, tensor in self._file.tensors.items():
            if name in OUTER:
                found[OUTER[name]] = _Place(tensor, shifted=name == "output_norm.weight")
                continue
            layer = _ANY_LAYER.fullmatch(name)
            index, rest = layer.groups() if layer else ("", "")
            part = rest.removesuffix(".weight")
            if layer and int(index) >= (settings.get("num_hidden_layers") or 0):
                continue  # it predicts several tokens at once
            if part in EXPERTS and len(tensor.shape) == 3:
                found |= _of_experts(index, part, tensor)
                continue
            known = f"{_IN_HYBRID_LAYER[part]}.weight" if part in _IN_HYBRID_LAYER else gguf_hybrid.other_name(rest)
            own = f"model.layers.{index}.{known}" if known else name
            order = gguf_hybrid.order_of(own, tensor.shape, settings)
            found[own] = _Place(tensor, shifted=part.endswith("norm") and part != "ssm_norm", order=order)
        return found

    def _heads(self, name: str, tensor: GGUFTensor, heads: object) -> int | None:
        if heads is None:
            return None
        rows = tensor.shape[0]
        if not isinstance(heads, int) or heads <= 0 or rows % (2 * heads):
            raise InputError(f"{self.path}: {name} has {rows} rows, which {shown(heads)} heads cannot share evenly")
        return heads

    def read(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None, empty: Empty | None = None) -> Tensor:
        self._places = self._places or self._found()
        place = self._places[name]
        options: dict[str, Any] = {} if empty is None else {"empty": empty}
        change: Callable[[Tensor], Tensor] | None = (lambda values: values - 1.0) if place.shifted else None
        if place.order is not None:
            return self._read_in_order(place, place.order, dtype, part)
        if len(place.shape) == 1:
            whole = self._file.read(place.tensor, dtype, change=change, **options)
            whole = whole if place.heads is None else whole[rows_of(len(whole), place.heads)]
            return whole if part is None else whole[part].contiguous()
        if part is None and place.expert is None and place.heads is None:
            return self._file.read(place.tensor, dtype, change=change, **options)
        rows, columns = place.wanted(part)
        return self._file.read(place.tensor, dtype, rows, columns, change, **options)

    def _read_in_order(
        self, place: _Place, order: gguf_hybrid.Order, dtype: torch.dtype, part: tuple[slice, ...] | None
    ) -> Tensor:
        change: Callable[[Tensor], Tensor] | None = (lambda values: torch.log(-values)) if order.logged else None
        of_matrix = order.rows if len(place.tensor.shape) > 1 else None
        whole = self._file.read(place.tensor, dtype, of_matrix, change=change)
        if of_matrix is None and order.rows is not None:
            whole = whole[order.rows]
        if order.columns is not None:
            whole = whole[:, order.columns]
        whole = whole.view(place.shape)
        return whole if part is None else whole[part].contiguous()

    def blocks(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None) -> Blocks | None:
        self._places = self._places or self._found()
        place = self._places[name]
        if place.blocks is None:
            return None
        kind, stored = block_type(place.tensor.kind), self._file.stored_rows(place.tensor)
        rows, columns = place.wanted(part)
        begin, end, _ = columns.indices(place.shape[1])
        if begin % kind.numbers or end % kind.numbers:
            return None
        # In the file's pages, but where their order is another.
        data = stored[rows] if place.heads or place.order else stored[int(rows[0]) : int(rows[-1]) + 1]
        return Blocks(data[:, begin // kind.numbers * kind.nbytes : end // kind.numbers * kind.nbytes], kind, dtype)

    @property
    def file(self) -> GGUFFile:
        """The file, with its own names."""
        return self._file

    def by_stored_name(self, of_columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is known of columns of matrices, by the names and in the order that the file has.

        Args:
            of_columns: [in] each, by Hugging Face's names.
        Returns:
            [in] each; [experts, in] of experts that are stored together, if it is known of all.
        """
        self._places = self._places or self._found()
        called = {id(tensor): name for name, tensor in self._file.tensors.items()}
        found: dict[str, Tensor] = {}
        experts: dict[str, dict[int, Tensor]] = {}
        for name, place in self._places.items():
            if (known := of_columns.get(name)) is None or len(known) != place.tensor.shape[-1]:
                continue
            stored = called[id(place.tensor)]
            if place.order is not None and place.order.columns is not None:
                known = torch.empty_like(known).index_copy_(0, place.order.columns, known)
            if place.expert is None:
                found[stored] = known
            else:
                experts.setdefault(stored, {})[place.expert] = known
        for stored, of_each in experts.items():
            if len(of_each) == self._file.tensors[stored].shape[0]:
                found[stored] = torch.stack([of_each[expert] for expert in sorted(of_each)])
        return found

    def words(self) -> Words:
        embedding = self._file.tensors.get("token_embd.weight")
        return words_of(self.path, self._entries, embedding.shape[0] if embedding else None)

    def eos_token_ids(self) -> tuple[int, ...]:
        return ()

    def sampling(self) -> dict[str, float]:
        said = {name: self._entries.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
        return checked_sampling(
            {name: _decimal(value) for name, value in said.items() if value is not None}, self.path, tuple(SAMPLING.values())
        )


def _of_experts(layer: str, part: str, tensor: GGUFTensor) -> dict[str, _Place]:
    """The projections of a layer's experts, each by Hugging Face's name."""
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{EXPERTS[part]}.weight": _Place(tensor, expert)
        for expert in range(tensor.shape[0])
    }


def _decimal(value: Any) -> Any:
    """A number that a file holds as FP32, as the shortest decimal that stands for it: 1e-06 and not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
