"""A model from a GGUF file, as llama.cpp's converters write it: its settings and tensors under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import decimal
from haarkv.models.gguf_file import GGUFFile, GGUFTensor, block_type
from haarkv.models.gguf_names import (
    EXPERTS,
    HYBRIDS,
    NEXTN,
    OUTER,
    SAMPLING,
    WHOLE,
    Place,
    delta_order,
    less_one,
    names_in_layer,
    rows_of,
)
from haarkv.models.gguf_settings import ROPE_FACTORS, GGUFSettings
from haarkv.models.source import DRAFTING, Empty, Held, Words, checked_sampling
from haarkv.models.words import words_of
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
_MOST_LAYERS = 10**4
_PLUS_ONE = {"gemma3", *HYBRIDS}
"""Architectures whose norms are stored with 1 added, but for DeltaNet's own."""


@lru_cache(maxsize=1)
def _opened(path: Path, size: int, changed: int) -> GGUFFile:  # noqa: ARG001
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
        self._file = _opened(path, stat.st_size, stat.st_mtime_ns)
        self._entries = self._file.entries
        self._said = GGUFSettings(path, self._file)
        self._architecture = self._said.architecture
        self._places: dict[str, Place] = {}

    def files(self) -> Sequence[Path]:
        return self._file.paths

    def settings(self) -> Mapping[str, Any]:
        return self._said.read()

    def tensors(self) -> Mapping[str, Held]:
        self._places = self._places or self._found()
        return {name: self._held(place) for name, place in self._places.items()}

    def _held(self, place: Place) -> Held:
        tensor, kind = place.tensor, place.blocks
        block = 1 if kind is None else block_type(tensor.kind).numbers
        path = self._file.paths[tensor.part]
        return Held(place.shape, tensor.dtype, place.nbytes, path, tensor.fault, kind, place.in_place, block)

    def _found(self) -> dict[str, Place]:
        """Every tensor by Hugging Face's name; one that has none keeps its own, and is refused by it."""
        change = less_one if self._architecture in _PLUS_ONE else None
        found = {
            OUTER[name]: Place(tensor, change=change if name == "output_norm.weight" else None)
            for name, tensor in self._file.tensors.items()
            if name in OUTER
        }
        settings: Mapping[str, Any] = self.settings() if self._architecture in HYBRIDS else {}
        # Behind a hybrid's own layers stands one that predicts several tokens, and perhaps others.
        own_layers = settings.get("num_hidden_layers") or 0 if settings else _MOST_LAYERS
        known = names_in_layer(self._architecture)
        for name, tensor in self._file.tensors.items():
            layer = _LAYER.fullmatch(name)
            index, rest = layer.groups() if layer else (-1, "")
            if name in OUTER or name == ROPE_FACTORS or (layer and int(index) > own_layers):
                continue
            drafts, (part, _, kind) = int(index) == own_layers, rest.rpartition(".")
            before = f"{DRAFTING}layers.0." if drafts else f"model.layers.{int(index)}."
            if part in EXPERTS and len(tensor.shape) == 3:
                found |= _of_experts(before, part, tensor)
                continue
            own = f"{known[part]}.{kind}" if part in known and kind in ("weight", "bias") else WHOLE.get(rest)
            own = (NEXTN.get(part) if drafts else None) or (f"{before}{own}" if own else name)
            norm = self._architecture in _PLUS_ONE and part.endswith("norm") and part != "ssm_norm"
            order: dict[str, Any] = {"rows": self._rows(name, part, tensor), "change": less_one if norm else None}
            found[own] = Place(tensor, **order | delta_order(own, tensor.shape, settings))
        return found

    def _rows(self, name: str, part: str, tensor: GGUFTensor) -> Tensor | None:
        """The file's order of the rows of a Llama's Q or K."""
        count = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part) if self._architecture == "llama" else None
        heads = self._said.said(f"attention.{count}", self._said.said("attention.head_count")) if count else None
        if heads is None:
            return None
        rows = tensor.shape[0]
        if not isinstance(heads, int) or heads <= 0 or rows % (2 * heads):
            raise InputError(f"{self.path}: {name} has {rows} rows, which {shown(heads)} heads cannot share evenly")
        return rows_of(rows, heads)

    def _place(self, name: str) -> Place:
        self._places = self._places or self._found()
        return self._places[name]

    def read(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None, empty: Empty | None = None) -> Tensor:
        place = self._place(name)
        options: dict[str, Any] = {"change": place.change} | ({} if empty is None else {"empty": empty})
        is_matrix = len(place.tensor.shape) > 1
        if is_matrix and place.columns is None and place.axes is None:
            if part is None and place.expert is None and place.rows is None:
                return self._file.read(place.tensor, dtype, **options)
            return self._file.read(place.tensor, dtype, *place.wanted(part), **options)
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
        kind, stored = block_type(place.tensor.kind), self._file.stored_rows(place.tensor)
        rows, columns = place.wanted(part)
        if self._held(place).cuts(columns):
            return None
        begin, end, _ = columns.indices(place.shape[1])
        # In the file's pages, but where their order is another.
        data = stored[rows] if place.rows is not None else stored[int(rows[0]) : int(rows[-1]) + 1]
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
            if place.columns is not None:
                known = torch.empty_like(known).index_copy_(0, place.columns, known)
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

    def sampling(self) -> dict[str, float]:
        said = {name: self._entries.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
        return checked_sampling(
            {name: decimal(value) for name, value in said.items() if value is not None}, self.path, tuple(SAMPLING.values())
        )


def _of_experts(before: str, part: str, tensor: GGUFTensor) -> dict[str, Place]:
    """The projections of a layer's experts, each by Hugging Face's name, which begins with the layer's."""
    return {f"{before}mlp.experts.{expert}.{EXPERTS[part]}.weight": Place(tensor, expert) for expert in range(tensor.shape[0])}
