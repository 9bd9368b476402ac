"""Where a model comes from: its settings, its tensors, its words and what it says of sampling, whatever file holds them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks

KeptBlocks = bool | Collection[str]
"""Which quantised blocks stay as they are: all, none, or those of some types, by name."""

DRAFTING = "mtp."
"""How names begin of the layer by which a model drafts its own tokens (`models.mtp`)."""

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes room for a tensor of a shape and dtype."""

MOST_TEMPLATE = 2**20
"""Characters of a chat template: several times those of the largest that models come with."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor as a source holds it.

    Attributes:
        dtype: of its numbers; None where they are restored from blocks of a few bits each.
        nbytes: as it is stored.
        file: that holds it.
        fault: what is wrong with it, to stand behind its name; None if it can be read.
        blocks: name of their type, where there are such and they can be kept as they are.
        in_place: what is kept as it is stays in the file's pages; else it is copied, into another order.
        block: numbers of one block, which lie in a row; 1 where there are none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    nbytes: int
    file: Path
    fault: str | None = None
    blocks: str | None = None
    in_place: bool = True
    block: int = 1

    def cuts(self, columns: slice) -> bool:
        """Whether some columns of a matrix begin or end within a block: such a part is restored."""
        begin, end, _ = columns.indices(self.shape[-1])
        return bool(begin % self.block or end % self.block)


@dataclass(frozen=True)
class Words:
    """What turns text into tokens and back.

    Attributes:
        path: for messages.
        file: the `tokenizer.json` that the tokenizer was read from; None if it was built here.
        templates: sources of chat templates by their names: the usual one is `default`, that for tools `tool_use`.
        special: texts of special tokens by the names that templates use, such as `eos_token`.
        ends: tokens that end a text by what stands beside the settings.
    """

    tokenizer: FastTokenizer
    path: Path
    file: Path | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()

    @property
    def template(self) -> str | None:
        """The usual chat template, or the only one; None if there is none, or no telling which."""
        only = next(iter(self.templates.values())) if len(self.templates) == 1 else None
        return self.templates.get("default", only)


class TensorSource(Protocol):
    """What tensors are read from; what is missing, damaged or of the wrong kind is an InputError of the method asked for it.

    Attributes:
        path: names it in messages, and stands for it wherever a model is named.
    """

    path: Path

    def tensors(self) -> Mapping[str, CheckpointTensor]:
        """Every tensor of the text model by its Hugging Face name, and of its drafting layer; none is read."""

    def read(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None, empty: Empty | None = None) -> Tensor:
        """One of `tensors()` that has no fault.

        What is stored as `dtype` and wanted whole stays in the file's pages where it can.

        Args:
            part: of each axis, what is wanted; all unless given.
            empty: makes room for what is converted; torch unless given.
        """

    def blocks(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None) -> Blocks | None:
        """One of `tensors()` that is stored in quantised blocks, as it is stored; None if it is not, or if the part that is
        wanted does not begin and end with whole blocks.
        """


class Source(TensorSource, Protocol):
    """What a model is read from.

    Attributes:
        settings_path: names its settings in messages.
        sampling_path: names in messages what says something of sampling.
    """

    settings_path: Path
    sampling_path: Path

    def files(self) -> Sequence[Path]:
        """Those that decide what the model makes of a text, as far as they are there: settings, weights and tokenizer."""

    def settings(self) -> Mapping[str, Any]:
        """The entries of a Hugging Face `config.json`, for the family to judge."""

    def words(self) -> Words:
        """The tokenizer and chat template."""

    def sampling(self) -> dict[str, float]:
        """What it says of sampling, by the names of `engine.sampling.Sampling`; {}: greedy."""


def checked_templates(content: object, where: Path) -> dict[str, str]:
    """Sources of chat templates by name: of one text, of several by name, or of a list of {`name`, `template`}."""
    if isinstance(content, list):
        try:
            content = {each["name"]: each["template"] for each in content}
        except (TypeError, KeyError):
            raise InputError(f"{where}: a chat template of several has no name or no text: {shown(content)}") from None
    templates: dict[Any, Any] = content if isinstance(content, dict) else {"default": content} if content else {}
    for name, source in templates.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise InputError(f"{where}: the chat template is not text: {shown(source)}")
        if len(source) > MOST_TEMPLATE:
            size = f"{len(source):,} characters, and at most {MOST_TEMPLATE:,} can be"
            raise InputError(f"{where}: the chat template has {size}")
    return templates


def checked_sampling(content: Mapping[str, Any], path: Path, names: tuple[str, ...]) -> dict[str, float]:
    """Those settings of sampling that there are: numbers, and of `top_k` a whole one; others are refused."""
    settings: dict[str, float] = {}
    for key in names:
        value = content.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if key == "top_k" else int | float):
            raise InputError(f"{path}: {key} is not a{' whole' * (key == 'top_k')} number: {shown(value)}")
        settings[key] = value
    return settings
