"""A model from a folder in Hugging Face format: `config.json`, memory-mapped weights, `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from haarkv.models.hf_config import eos_token_ids, read_hf_settings
from haarkv.models.hf_weights import INDICES, files_of_tensors, held_in, opened, read_header
from haarkv.models.hf_words import FILES, tokenizer_in
from haarkv.models.source import DRAFTING_ENTRY, MOST_TEMPLATE, Empty, Held, Words, checked_sampling, checked_templates
from haarkv.models.weights import EMBEDDING, FINAL_NORM, HEAD
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import MARK, read_file, read_json
from haarkv.tq_ops.warn import warn

_MOST_TOKENIZER = 2**27
"""Bytes of `tokenizer.json`: several times those of the largest that models come with."""
_BESIDE_TEXT = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
"""Tensors of what a model has beside its text model; none is read."""
_ROWS_AT_ONCE = 2**12
_MORE_TOKENS = "mtp."
"""How names of layers begin that predict several tokens at once (`models.mtp`)."""
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
"""Projections of all experts of a layer in one tensor, [experts, out, in]; gate and up one after the other."""
_TEXT = re.compile(r"(model\.)?language_model\.(model\.)?")
"""What stands before the names of the text model's tensors where a model has other parts."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HFFolder:
    """A folder in Hugging Face format; attributes and methods as of `models.source.Source`."""

    def __init__(self, folder: Path) -> None:
        self.path, self.settings_path = folder, folder / "config.json"
        self.sampling_path = folder / "generation_config.json"
        self._tensors: dict[str, Held] = {}
        self._stored_names: dict[str, str] = {}
        self._within: dict[str, tuple[int, slice]] = {}  # of a stacked one, the expert and its rows
        self._opened: dict[Path, Any] = {}

    def files(self) -> Sequence[Path]:
        tokenizer = self.path / "tokenizer.json"
        named = {self.settings_path, *([tokenizer] if tokenizer.exists() else [self.path / name for name in FILES])}
        named |= {self.path / index for index in INDICES}
        with suppress(InputError):  # who reads the weights says what is wrong with them
            named |= set(files_of_tensors(self.path).values())
        return sorted(path for path in named if path.is_file())

    def settings(self) -> Mapping[str, Any]:
        settings = read_hf_settings(self.settings_path)
        if settings.get("tie_word_embeddings") is not True or not self._has_its_own_head():
            return settings
        # As in transformers: what the file holds counts.
        warn(f"{self.settings_path} ties the head to the embedding, and the weights hold another head: that one is taken")
        return {**settings, "tie_word_embeddings": False}

    def _has_its_own_head(self) -> bool:
        """Whether the weights hold a head that is no copy of the embedding."""
        try:
            held = self.tensors()
        except InputError:  # reading the weights says what is wrong with them
            return False
        ends = [held[name] for name in (EMBEDDING, HEAD) if name in held]
        if len(ends) < 2 or any(of.fault for of in ends):
            return False
        if ends[0].shape != ends[1].shape:  # building the model then refuses the one that does not fit, by name
            return True
        return _ends_differ(self.path, *(of.file.stat().st_mtime_ns for of in ends))

    def tensors(self) -> Mapping[str, Held]:
        if self._tensors:
            return self._tensors
        files = files_of_tensors(self.path)
        headers = {path: read_header(path) for path in sorted(set(files.values()))}
        for stored, path in files.items():
            if (known := self.name_of(stored)) is None:
                continue
            held = held_in(headers[path], stored, path)
            for name, within, one in _unstacked(known, held):
                if name in self._tensors:
                    raise InputError(f"{path} holds {name} twice, also as {self._stored_names[name]}")
                self._stored_names[name], self._tensors[name] = stored, one
                if within:
                    self._within[name] = within
        return self._tensors

    def name_of(self, stored: str) -> str | None:
        """Hugging Face's name of a stored tensor in a model that reads text alone; None of what is not read."""
        return None if _BESIDE_TEXT.match(stored) or stored.startswith(_MORE_TOKENS) else _text_name(stored)

    def read(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None, empty: Empty | None = None) -> Tensor:
        path = self.tensors()[name].file
        if path not in self._opened:
            self._opened[path] = opened(path)
        file, stored = self._opened[path], self._stored_names[name]
        if (within := self._within.get(name)) is not None:
            one: Tensor = file.get_tensor(stored)[within]
            return (one if part is None else one[part].contiguous()).to(dtype)
        if part is not None:
            return file.get_slice(stored)[part].to(dtype).contiguous()  # type: ignore[no-any-return]
        found: Tensor = file.get_tensor(stored)
        return found.to(dtype) if empty is None or found.dtype == dtype else empty(found.shape, dtype).copy_(found)

    def blocks(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None) -> None:
        return None

    def drafting(self) -> tuple[HFFolder, HFFolder] | None:
        entry, layer = _DraftingEntry(self.path), _DraftingLayer(self.path)
        return (entry, layer) if entry.tensors() else None

    def words(self) -> Words:
        path = self.path / "tokenizer.json"
        settings, file = _optional_json(self.path / "tokenizer_config.json"), path if path.is_file() else None
        special = _special_tokens(self.path, settings)
        if file is None:
            path, tokenizer = tokenizer_in(self.path, settings, special)
        else:
            content = read_file(path, _MOST_TOKENIZER).removeprefix(MARK)
            try:
                tokenizer = FastTokenizer.from_buffer(content)
            except Exception as error:  # the library raises plain Exception
                raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
        return Words(tokenizer, path, file, _chat_templates(self.path, settings), special, self._ends(tokenizer, settings))

    def _ends(self, tokenizer: FastTokenizer, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """What `generation_config.json` says, and both files of a tokenizer."""
        named = (_text(of.get("eos_token")) for of in (settings, _optional_json(self.path / "special_tokens_map.json")))
        ids = [tokenizer.token_to_id(token) for token in named if token is not None]
        return (*eos_token_ids(_optional_json(self.sampling_path), self.sampling_path), *(id for id in ids if id is not None))

    def sampling(self) -> dict[str, float]:
        """What `generation_config.json` says.

        Without `do_sample: true` the model is meant to be greedy: only a repetition penalty counts then, as in transformers.
        With it the temperature is 1 unless the file names another.
        """
        path, content = self.sampling_path, _optional_json(self.sampling_path)
        sampled = content.get("do_sample")
        if not isinstance(sampled, bool | None):
            raise InputError(f"{path}: do_sample is neither true nor false: {shown(sampled)}")
        found = checked_sampling(content, path, _SAMPLING if sampled else ("repetition_penalty",))
        return {"temperature": 1.0, **found} if sampled else found


@cache
def _ends_differ(folder: Path, *written: int) -> bool:  # noqa: ARG001 - a file that is written anew is another
    """Whether embedding and head of a folder differ; both are read up to the first difference."""
    source = HFFolder(folder)
    rows = (slice(first, first + _ROWS_AT_ONCE) for first in range(0, source.tensors()[HEAD].shape[0], _ROWS_AT_ONCE))
    return any(not torch.equal(*(source.read(end, torch.float32, (part,)) for end in (EMBEDDING, HEAD))) for part in rows)


class _DraftingEntry(HFFolder):
    def name_of(self, stored: str) -> str | None:
        return stored if stored in DRAFTING_ENTRY else None


class _DraftingLayer(HFFolder):
    def name_of(self, stored: str) -> str | None:
        if stored in DRAFTING_ENTRY or not stored.startswith(_MORE_TOKENS):
            return None
        own = stored.removeprefix(_MORE_TOKENS)
        return FINAL_NORM if own == "norm.weight" else f"model.{own}" if own.startswith("layers.") else stored


def _text_name(stored: str) -> str:
    """Hugging Face's name of a tensor in a model that reads text alone."""
    if not (prefix := _TEXT.match(stored)):
        return stored
    rest = stored[prefix.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def _unstacked(name: str, held: Held) -> Iterator[tuple[str, tuple[int, slice] | None, Held]]:
    """A tensor; of all experts' projections in one, each: its name, where it lies and what is held of it."""
    match = _STACKED.fullmatch(name)
    if match is None or len(held.shape) != 3:
        yield name, None, held
        return
    experts, rows, columns = held.shape
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    if rows % len(parts) or not experts:
        yield name, None, held
        return
    count = rows // len(parts)
    one = replace(held, shape=(count, columns), nbytes=held.nbytes // experts // len(parts))
    for expert in range(experts):
        for number, part in enumerate(parts):
            yield f"{match[1]}.{expert}.{part}.weight", (expert, slice(number * count, (number + 1) * count)), one


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def _text(token: object) -> str | None:
    """A special token's text; older files wrap it in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Texts of named special tokens, as transformers takes them together."""
    # Older files name them beside the settings, which then say nothing of added tokens.
    named = settings if "added_tokens_decoder" in settings else settings | _optional_json(folder / "special_tokens_map.json")
    tokens = {key: token for key, token in named.items() if key.endswith("_token")}
    for more in (named.get("model_specific_special_tokens"), named.get("extra_special_tokens")):
        tokens |= more if isinstance(more, dict) else {}
    # An absent one stays undefined, which a template prints as nothing; None would be printed as a word.
    return {key: text for key, token in tokens.items() if (text := _text(token)) is not None}


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates of files of their own, else of `tokenizer_config.json`, else of an older processor's file."""
    more = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    sources: dict[str, str] = {}
    for name, path in ({"default": folder / "chat_template.jinja"} | more).items():
        if path.exists():
            try:
                sources[name] = read_file(path, MOST_TEMPLATE).removeprefix(MARK).decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{path}: the chat template cannot be read: {error}") from None
    older = folder / "chat_template.json"
    if not sources.get("default", "x").strip():
        del sources["default"]  # an empty file says nothing
    return checked_templates(sources or settings.get("chat_template") or _optional_json(older).get("chat_template"), folder)
