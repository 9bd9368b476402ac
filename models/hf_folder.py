"""A model from a folder in Hugging Face format: `config.json`, memory-mapped weights, `tokenizer.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from haarkv.models.hf_config import eos_token_ids, of_another_form, read_hf_settings
from haarkv.models.source import MOST_TEMPLATE, CheckpointTensor, Part, Words, checked_sampling, checked_templates
from haarkv.models.weights import EMBEDDING, HEAD
from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.input_files import MARK, file_size, read_file, read_json
from haarkv.tq_ops.weight import Empty, empty_tensor

_MOST_TOKENIZER = 2**27
"""Bytes of `tokenizer.json`, several times those of any model's."""
_BESIDE_TEXT = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
"""Tensors that are no part of the text model."""
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
"""Projections of all experts of a layer in one tensor, [experts, out, in]; gate and up one after the other."""
_TEXT = re.compile(r"(model\.)?language_model\.(model\.)?")
"""Prefix of the text model's tensors in a model with other parts."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HFFolder:
    """A folder in Hugging Face format, a `Source`."""

    def __init__(self, folder: Path) -> None:
        self.path, self.settings_path = folder, folder / "config.json"
        self.sampling_path = folder / "generation_config.json"
        self._tensors: dict[str, _FolderTensor] = {}

    def files(self) -> Sequence[Path]:
        tokenizer = self.path / "tokenizer.json"
        paths = {self.settings_path, tokenizer, self.path / _INDEX}
        with suppress(InputError):  # who reads the weights says what is wrong with them
            paths |= set(files_of_tensors(self.path).values())
        return sorted(path for path in paths if path.is_file())

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
            tensors = self.tensors()
        except InputError:  # reading the weights says what is wrong with them
            return False
        ends = [tensors[name] for name in (EMBEDDING, HEAD) if name in tensors]
        if len(ends) < 2 or any(tensor.fault for tensor in ends):
            return False
        if ends[0].shape != ends[1].shape:  # building the model then refuses the one that does not fit, by name
            return True
        return _ends_differ(self.path, *(tensor.file.stat().st_mtime_ns for tensor in ends))

    def tensors(self) -> Mapping[str, CheckpointTensor]:
        if self._tensors:
            return self._tensors
        files = files_of_tensors(self.path)
        by_file = {path: _file_tensors(path) for path in sorted(set(files.values()))}
        for stored_name, path in files.items():
            if (hf_name := _text_name(stored_name)) is None:
                continue
            if (tensor := by_file[path].get(stored_name)) is None:
                raise InputError(f"{path} lacks the tensor {stored_name}, which the index says it holds")
            for name, one in _unstack(hf_name, tensor):
                if name in self._tensors:
                    raise InputError(f"{path} holds {name} twice, also as {self._tensors[name].stored_name}")
                self._tensors[name] = one
        return self._tensors

    def words(self) -> Words:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise InputError(
                f"{self.path} has no tokenizer.json; text cannot be turned into tokens. Fetch it, or write it with "
                "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        settings, older = (_optional_json(self.path / f"{name}.json") for name in ("tokenizer_config", "special_tokens_map"))
        content = read_file(path, _MOST_TOKENIZER).removeprefix(MARK)
        try:
            tokenizer = FastTokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
        templates, special = _chat_templates(self.path, settings), _special_tokens(settings, older)
        return Words(tokenizer, path, templates, special, self._ends(tokenizer, settings, older))

    def _ends(self, tokenizer: FastTokenizer, *files: Mapping[str, Any]) -> tuple[int, ...]:
        """Ends by `generation_config.json` and by both files of the tokenizer."""
        end_tokens = (_text(settings.get("eos_token")) for settings in files)
        ids = [tokenizer.token_to_id(token) for token in end_tokens if token is not None]
        return (*eos_token_ids(_optional_json(self.sampling_path), self.sampling_path), *(id for id in ids if id is not None))

    def sampling(self) -> dict[str, float]:
        """From `generation_config.json`; without `do_sample: true` only a repetition penalty counts, as in transformers."""
        path, content = self.sampling_path, _optional_json(self.sampling_path)
        do_sample = content.get("do_sample")
        if not isinstance(do_sample, bool | None):
            raise InputError(f"{path}: do_sample is neither true nor false: {shown(do_sample)}")
        settings = checked_sampling(content, path, _SAMPLING if do_sample else ("repetition_penalty",))
        return {"temperature": 1.0, **settings} if do_sample else settings

    def kv_choice(self) -> bytes:
        return b""


@dataclass(frozen=True, kw_only=True)
class _FolderTensor(CheckpointTensor):
    """A tensor of an open file; of experts' projections in one tensor, one: `expert_part` is the expert and its rows."""

    opened: Any
    stored_name: str
    expert_part: tuple[int, slice] | None = None

    def read(self, dtype: torch.dtype, part: Part = None, empty: Empty = empty_tensor) -> Tensor:
        if self.expert_part is not None:
            one: Tensor = self.opened.get_tensor(self.stored_name)[self.expert_part]
            return (one if part is None else one[part].contiguous()).to(dtype)
        if part is not None:
            return self.opened.get_slice(self.stored_name)[part].to(dtype).contiguous()  # type: ignore[no-any-return]
        tensor: Tensor = self.opened.get_tensor(self.stored_name)
        return tensor if tensor.dtype == dtype else empty(tensor.shape, dtype).copy_(tensor)


@cache
def _ends_differ(folder: Path, *mtimes: int) -> bool:  # noqa: ARG001 - a file that is written anew is another
    """Whether embedding and head of a folder differ."""
    tensors = HFFolder(folder).tensors()
    embedding, head = tensors[EMBEDDING], tensors[HEAD]
    if embedding.dtype is None or embedding.dtype != head.dtype:
        return True
    return not torch.equal(embedding.read(embedding.dtype), head.read(embedding.dtype))


def _text_name(stored_name: str) -> str | None:
    """Hugging Face's name of a tensor in a model that reads text alone; None of what is not read."""
    if _BESIDE_TEXT.match(stored_name):
        return None
    if not (prefix := _TEXT.match(stored_name)):
        return stored_name
    rest = stored_name[prefix.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def _unstack(name: str, tensor: _FolderTensor) -> Iterator[tuple[str, _FolderTensor]]:
    """A tensor and its name; of all experts' projections in one, each expert's."""
    match = _STACKED_EXPERTS.fullmatch(name)
    parts = ("gate_proj", "up_proj") if match and match[2] == "gate_up_proj" else ("down_proj",)
    if match is None or len(tensor.shape) != 3 or tensor.shape[1] % len(parts) or not tensor.shape[0]:
        yield name, tensor
        return
    experts, count = tensor.shape[0], tensor.shape[1] // len(parts)
    one = replace(tensor, shape=(count, tensor.shape[2]), nbytes=tensor.nbytes // experts // len(parts))
    for expert in range(experts):
        for number, part in enumerate(parts):
            rows = slice(number * count, (number + 1) * count)
            yield f"{match[1]}.{expert}.{part}.weight", replace(one, expert_part=(expert, rows))


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def _text(token: object) -> str | None:
    """A special token's text; older files wrap it in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special_tokens(settings: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """Texts of named special tokens, as transformers takes them together."""
    # Older files name them beside the settings, which then say nothing of added tokens.
    entries = settings if "added_tokens_decoder" in settings else settings | older
    tokens = {key: token for key, token in entries.items() if key.endswith("_token")}
    for more in (entries.get("model_specific_special_tokens"), entries.get("extra_special_tokens")):
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


_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def files_of_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the index of a sharded checkpoint or the header of a single file."""
    if (folder / _INDEX).is_file():
        return _indexed(folder, folder / _INDEX)
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_open_tensors(folder / _SINGLE).keys(), folder / _SINGLE)
    raise InputError(f"{folder} has a config but no weights: neither {_SINGLE} nor {_INDEX} is there{of_another_form(folder)}")


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{index} is not an index of shards: it has no weight_map of names")
    for name, file in names.items():
        if not _stays_within(file):
            raise InputError(f"{index} says that {shown(file)} holds {shown(name)}; a shard lies in the model's own folder")
    files = {name: folder / file for name, file in names.items()}
    for path in sorted(set(files.values())):
        if not path.is_file():
            first = next(name for name, file in files.items() if file == path)
            raise InputError(f"{path} is missing; {index.name} says that it holds {first}")
    return files


def _stays_within(file: str) -> bool:
    """Whether a shard's name leads into the model's folder and nowhere else, whatever links lie there."""
    path = Path(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


def _open_tensors(path: Path) -> Any:
    """An open safetensors file."""
    file_size(path)  # a pipe or a device is refused
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}; fetch it again") from None


def _file_tensors(path: Path) -> dict[str, _FolderTensor]:
    """Every tensor of a file by its name there."""
    file, tensors = _open_tensors(path), {}
    for name in file.keys():  # noqa: SIM118 - safetensors' file is no mapping
        view = file.get_slice(name)
        shape, dtype = tuple(view.get_shape()), _DTYPES.get(view.get_dtype())
        fault = None if dtype else f"is stored as {shown(view.get_dtype())}; BF16, F16 or F32 can be read"
        nbytes = math.prod(shape) * (dtype.itemsize if dtype else 0)
        tensors[name] = _FolderTensor(shape, dtype, nbytes, path, fault, opened=file, stored_name=name)
    return tensors
