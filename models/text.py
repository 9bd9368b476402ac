"""Text to token ids and back: a checkpoint's own tokenizer and chat template, or bytes for a random model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from haarkv.models.catalog import folder_of, tokenizer_folder_of
from haarkv.models.chat_template import render
from haarkv.models.config import ModelConfig
from haarkv.models.hf_config import eos_token_ids
from haarkv.models.limited import TooMuchError, answer
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_file, read_json, size_of

_MOST_TOKENIZER = 2**27
_MOST_TEMPLATE = 2**20
"""Bytes of `tokenizer.json` and of a chat template: several times those of the largest that models come with."""


_LINEAR = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)
"""Regular expressions that need no watching, of Qwen and Llama 3: they look at each character a few times at most."""


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """Text that is certain now; "" while a character is still incomplete."""


class Tokenizer(Protocol):
    """What generation needs of a tokenizer.

    Attributes:
        has_chat_template: whether `encode_chat` can be called.
        eos_token_ids: tokens that end a text.
    """

    has_chat_template: bool
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""

    def encode_chat(self, texts: Sequence[str], system: str | None = None) -> list[list[int]]:
        """Token ids of conversations: the system message if there is one, the user's text, and the start of an answer.

        Raises:
            InputError: there is no chat template, or it cannot be used on one of them.
        """

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of one conversation of any messages, each a `role` and a `content`, up to where the answer begins.

        Raises:
            InputError: as `encode_chat`.
        """

    def vocabulary(self) -> Mapping[str, int]:
        """Id of every token that it knows, by its name; of two tokenizers alike, the ids of one mean the same to the other."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""

    def stream(self) -> TextStream:
        """A decoder for one text, fed token by token."""


class HFTokenizer:
    """`tokenizer.json` of a checkpoint folder, with its chat template where it has one."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json; text cannot be turned into tokens")
        if size_of(path) > _MOST_TOKENIZER:
            raise InputError(f"{path} is larger than any model's: it has {size_of(path):,} bytes")
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path} cannot be read: {error}") from None
        self._path, self._patterns = path, _patterns(self._tokenizer)
        if _has_pattern(self._tokenizer.decoder):
            raise InputError(f"{path}: its decoder has a regular expression, which might run for ever; none is built")
        # What training may have left switched on would shorten prompts in silence, or lengthen them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        largest = max(self._tokenizer.get_vocab().values(), default=0)
        if largest >= config.vocab_size:
            raise InputError(f"{path} has a token {largest}, the model has only {config.vocab_size} of them")
        settings = _optional_json(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, settings)
        # An absent one stays undefined, which a template prints as nothing; None would be printed as a word.
        texts = {key: _text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
        self._special = {key: text for key, text in texts.items() if text is not None}
        self.has_chat_template = self._template is not None
        generation = folder / "generation_config.json"
        self.eos_token_ids = eos_token_ids(_optional_json(generation), generation) or config.eos_token_ids

    def encode(self, text: str) -> list[int]:
        return self._encode([text], special_tokens=True)[0]

    def encode_chat(self, texts: Sequence[str], system: str | None = None) -> list[list[int]]:
        first = [] if system is None else [{"role": "system", "content": system}]
        rendered = self._render([[*first, {"role": "user", "content": text}] for text in texts])
        if system is not None and not all(system.strip() in text for text in rendered):
            raise InputError("this model's chat template ignores system messages; drop --system, or say it in the prompt")
        return self._encode(rendered, special_tokens=False)

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._encode(self._render([messages]), special_tokens=False)[0]

    def _render(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
        if self._template is None:
            raise InputError("this model has no chat template; drop --chat")
        return render(self._template, conversations, self._special)

    def _encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Token ids, in a process of its own where a regular expression could run for ever.

        Raises:
            InputError: it does, or the tokenizer refuses the text.
        """
        if not self._patterns:
            return [list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids) for text in texts]
        request = {"tokenizer": str(self._path.absolute()), "texts": list(texts), "special_tokens": special_tokens}
        try:
            said = answer(request)
        except TooMuchError as error:
            raise InputError(f"{self._path} cannot be used: its regular expression fails on this text, or {error}") from None
        if "error" in said:
            raise InputError(f"{self._path} cannot be used: {said['error']}")
        return [[int(token) for token in ids] for ids in said["ids"]]

    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def stream(self) -> TextStream:
        return _HFStream(self._tokenizer)


def _patterns(tokenizer: FastTokenizer) -> bool:
    """Whether a tokenizer cuts or changes text by a regular expression that is none of `_LINEAR`."""
    return any(map(_has_pattern, (tokenizer.normalizer, tokenizer.pre_tokenizer)))


def _has_pattern(part: Any) -> bool:
    if part is None:
        return False
    state = part.__getstate__().decode()
    return '"Regex"' in state and any(pattern not in _LINEAR for pattern in _regular_expressions(json.loads(state)))


def _regular_expressions(state: Any) -> Iterator[object]:
    """Every `Regex` in a part of `tokenizer.json`."""
    if isinstance(state, dict):
        if "Regex" in state:
            yield state["Regex"]
        state = list(state.values())
    if isinstance(state, list):
        for value in state:
            yield from _regular_expressions(value)


class _HFStream:
    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""


class ByteTokenizer:
    """For random models: one token a UTF-8 byte; output tokens are shown as numbers, since they say nothing."""

    has_chat_template = False
    eos_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, texts: Sequence[str], system: str | None = None) -> list[list[int]]:
        raise InputError("a random model has no chat template; drop --chat")

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise InputError("a random model has no chat template; drop --chat")

    def vocabulary(self) -> Mapping[str, int]:
        return {f"<{byte}>": byte for byte in range(256)}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.push(i) for i in ids)

    def stream(self) -> TextStream:
        return self

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"


def load_tokenizer(name: str | Path, config: ModelConfig) -> Tokenizer:
    """Tokenizer of a model by name.

    Raises:
        InputError: the folder has none, or it does not fit the model.
    """
    folder = tokenizer_folder_of(name)
    return ByteTokenizer() if folder is None else HFTokenizer(folder, config)


def generation_settings(name: str) -> dict[str, float]:
    """What a model's `generation_config.json` says of sampling, by the names of `engine.sampling.Sampling`.

    Without `do_sample: true` the model is meant to be greedy: only a repetition penalty counts then, as in transformers. With
    it the temperature is 1 unless the file names another.

    Raises:
        InputError: no such model, or a setting of the wrong kind.
    """
    folder = folder_of(name)
    path = None if folder is None else folder / "generation_config.json"
    content = {} if path is None else _optional_json(path)
    sampled = content.get("do_sample")
    if not isinstance(sampled, bool | None):
        raise InputError(f"{path}: do_sample is neither true nor false: {shown(sampled)}")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if sampled else ("repetition_penalty",)
    found: dict[str, float] = {"temperature": 1.0} if sampled else {}
    for key in names:
        value = content.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if key == "top_k" else int | float):
            raise InputError(f"{path}: {key} is not a{' whole' * (key == 'top_k')} number: {shown(value)}")
        found[key] = value
    return found


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def _text(token: object) -> str | None:
    """A special token's text; older files wrap it in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The source of the template of `chat_template.jinja` or `tokenizer_config.json`, or None."""
    path = folder / "chat_template.jinja"
    try:
        source = read_file(path, _MOST_TEMPLATE).decode() if path.exists() else settings.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
    except (UnicodeDecodeError, AttributeError, KeyError) as error:
        raise InputError(f"{path if path.exists() else folder}: the chat template cannot be read: {error}") from None
    if not source:
        return None
    if not isinstance(source, str):
        raise InputError(f"{folder}: the chat template is not text: {shown(source)}")
    if len(source) > _MOST_TEMPLATE:
        raise InputError(f"{folder}: the chat template has {len(source):,} characters, and at most {_MOST_TEMPLATE:,} can be")
    return source
