"""A model from a GGUF file, as llama.cpp's converters write it: its settings and tensors under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from haarkv.models import gguf_hybrid
from haarkv.models.config import decimal
from haarkv.models.gguf_file import GGUFFile, GGUFTensor, block_type
from haarkv.models.gguf_names import EXPERTS, IN_GEMMA_LAYER, IN_LAYER, OUTER, SAMPLING, rows_of
from haarkv.models.gguf_place import Place
from haarkv.models.gguf_settings import ROPE_FACTORS, GGUFSettings
from haarkv.models.gguf_words import words_of
from haarkv.models.source import DRAFTING_ENTRY, Empty, Held, Words, checked_sampling
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks

_LAYER = re.compile(r"blk\.([0-9]{1,4})\.(\w+)\.(weight|bias)")
_IN_HYBRID_LAYER = IN_LAYER | gguf_hybrid.IN_LAYER
_NOTHING: Mapping[str, str] = {}
_ANY_LAYER = re.compile(r"blk\.([0-9]{1,4})\.(.+)")


@lru_cache(maxsize=1)
def _opened(path: Path, size: int, changed: int) -> GGUFFile:  # noqa: ARG001
    """A model is asked for several times while it is loaded: its file is read once."""
    return GGUFFile(path)


class GGUFSource:
    """A GGUF file; attributes and methods as of `models.source.Source`.

    Raises:
        InputError: as of `GGUFFile`.
    """

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
        """Every tensor by Hugging Face's name; one that has none keeps its own, for whoever refuses it."""
        if self._architecture in gguf_hybrid.ARCHITECTURES:
            return self._found_hybrid()
        gemma, llama = self._architecture == "gemma3", self._architecture == "llama"
        found: dict[str, Place] = {}
        for name, tensor in self._file.tensors.items():
            if name in OUTER:
                found[OUTER[name]] = Place(tensor, shifted=gemma and name == "output_norm.weight")
            elif name != ROPE_FACTORS:
                layer = _LAYER.fullmatch(name)
                index, part, kind = layer.groups() if layer else ("", "", "")
                known = IN_GEMMA_LAYER if gemma else IN_LAYER
                if part in known:
                    count = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part) if llama else None
                    heads = self._said.said(f"attention.{count}", self._said.said("attention.head_count")) if count else None
                    place = Place(tensor, heads=self._heads(name, tensor, heads), shifted=gemma and part.endswith("norm"))
                    found[f"model.layers.{index}.{known[part]}.{kind}"] = place
                elif part in EXPERTS and len(tensor.shape) == 3:
                    found |= _of_experts(index, part, tensor)
                else:
                    found[name] = Place(tensor)
        return found

    def _found_hybrid(self) -> dict[str, Place]:
        """The same of layers that keep a state."""
        found = {
            OUTER[name]: Place(tensor, shifted=name == "output_norm.weight")
            for name, tensor in self._file.tensors.items()
            if name in OUTER
        }
        return found | self._layers(range(self.settings().get("num_hidden_layers") or 0))

    def _layers(self, which: range, more: Mapping[str, str] = _NOTHING) -> dict[str, Place]:
        """Some layers of a hybrid, numbered from 0 on. All norms are stored with 1 added, but for DeltaNet's own.

        Args:
            more: Hugging Face's whole names of what only these have, by the file's within a layer.
        """
        settings = self.settings()
        found: dict[str, Place] = {}
        for name, tensor in self._file.tensors.items():
            layer = _ANY_LAYER.fullmatch(name)
            index, rest = layer.groups() if layer else (-1, "")
            if name in OUTER or (layer and int(index) not in which):
                continue
            number, part = int(index) - which.start, rest.removesuffix(".weight")
            if part in EXPERTS and len(tensor.shape) == 3:
                found |= _of_experts(number, part, tensor)
                continue
            known = f"{_IN_HYBRID_LAYER[part]}.weight" if part in _IN_HYBRID_LAYER else gguf_hybrid.other_name(rest)
            own = more.get(part) or (f"model.layers.{number}.{known}" if known else name)
            order = gguf_hybrid.order_of(own, tensor.shape, settings)
            found[own] = Place(tensor, shifted=part.endswith("norm") and part != "ssm_norm", order=order)
        return found

    def drafting(self) -> tuple[GGUFSource, GGUFSource] | None:
        entry, layer = (_Drafting(self.path, before) for before in (True, False))
        return (entry, layer) if entry.tensors() else None

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
        self, place: Place, order: gguf_hybrid.Order, dtype: torch.dtype, part: tuple[slice, ...] | None
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
        if self._held(place).cuts(columns):
            return None
        begin, end, _ = columns.indices(place.shape[1])
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

    def sampling(self) -> dict[str, float]:
        said = {name: self._entries.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
        return checked_sampling(
            {name: decimal(value) for name, value in said.items() if value is not None}, self.path, tuple(SAMPLING.values())
        )


class _Drafting(GGUFSource):
    """The first of the layers that stand behind a hybrid's own and predict several tokens.

    Args:
        before: what stands before it, in place of the layer.
    """

    def __init__(self, path: Path, before: bool) -> None:
        super().__init__(path)
        self._before = before

    def _found(self) -> dict[str, Place]:
        if self._architecture not in gguf_hybrid.ARCHITECTURES:
            return {}
        behind = self.settings().get("num_hidden_layers") or 0
        found = self._layers(range(behind, behind + 1), gguf_hybrid.DRAFTING)
        return {name: place for name, place in found.items() if (name in DRAFTING_ENTRY) == self._before}


def _of_experts(layer: object, part: str, tensor: GGUFTensor) -> dict[str, Place]:
    """The projections of a layer's experts, each by Hugging Face's name."""
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{EXPERTS[part]}.weight": Place(tensor, expert)
        for expert in range(tensor.shape[0])
    }
