"""What a model is read from, in any file format: settings, tensors, tokenizer and sampling."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.weight import Blocks, Empty, empty_tensor

KeptBlocks = bool | Collection[str]
"""Quantized blocks that are not restored: all, none, or those of these types."""

DRAFTING = "mtp."
"""Prefix of the drafting layer's tensors (`models.mtp`)."""

Part = tuple[slice, ...] | None
"""A slice of each axis; None for all."""

MOST_TEMPLATE = 2**20
"""Characters of a chat template, several times those of any model's."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a source, which a subclass reads.

    Attributes:
        dtype: of its numbers in the file; None for quantized blocks and drawn numbers.
        nbytes: in the file; 0 if drawn.
        fault: why it cannot be read, to follow its name; None if it can.
        blocks: type of its quantized blocks, where they can be kept.
        in_place: unconverted, it stays in the file's pages; else it is copied into another order.
        block: numbers of a row in one block; 1 without blocks.
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
        """Whether these columns begin or end within a block."""
        begin, end, _ = columns.indices(self.shape[-1])
        return bool(begin % self.block or end % self.block)

    def read(self, dtype: torch.dtype, part: Part = None, empty: Empty = empty_tensor) -> Tensor:
        """Its numbers converted to `dtype`; unconverted and whole, they stay in the file's pages where they can.

        Args:
            part: a slice of each axis.
            empty: allocates what is converted.
        """
        raise NotImplementedError

    def read_blocks(self, dtype: torch.dtype, part: Part = None) -> Blocks | None:
        """Its quantized blocks; None if it has none, or if the part begins or ends within one."""
        return None


@dataclass(frozen=True)
class Words:
    """A tokenizer with its chat templates.

    Attributes:
        path: for messages.
        templates: sources of chat templates by name: the usual one is `default`, that for tools `tool_use`.
        special: texts of special tokens by the names in templates, such as `eos_token`.
        ends: tokens that end a text, beside the settings' own.
    """

    tokenizer: FastTokenizer
    path: Path
    templates: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()

    @property
    def template(self) -> str | None:
        """The default chat template, or the only one."""
        only = next(iter(self.templates.values())) if len(self.templates) == 1 else None
        return self.templates.get("default", only)


class Source(Protocol):
    """A model's files; methods raise InputError for what is missing or damaged.

    `settings_path` and `sampling_path` name the settings and the sampling in messages.
    """

    path: Path
    settings_path: Path
    sampling_path: Path

    def tensors(self) -> Mapping[str, CheckpointTensor]:
        """Every tensor of the text model and its drafting layer by Hugging Face name; none is read."""

    def files(self) -> Sequence[Path]:
        """Existing files of settings, weights and tokenizer."""

    def settings(self) -> Mapping[str, Any]:
        """The entries of a Hugging Face `config.json`."""

    def words(self) -> Words:
        """The tokenizer and its chat templates."""

    def sampling(self) -> dict[str, float]:
        """Fields of `engine.sampling.Sampling` that the model sets; {} is greedy."""

    def kv_choice(self) -> bytes:
        """A plan file that stands in the model's own, not checked; or nothing."""


def checked_templates(content: object, where: Path) -> dict[str, str]:
    """Chat templates by name, from one text, a mapping, or a list of {`name`, `template`}."""
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
    """Settings of sampling by name; numbers, `top_k` an integer."""
    settings: dict[str, float] = {}
    for key in names:
        value = content.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if key == "top_k" else int | float):
            raise InputError(f"{path}: {key} is not a{' whole' * (key == 'top_k')} number: {shown(value)}")
        settings[key] = value
    return settings
