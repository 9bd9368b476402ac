"""The tokenizer of a folder that has no `tokenizer.json`, from the files that older ones are kept in.

Each is told in the entries of a GGUF file, of which `gguf_words` builds tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from haarkv.models.gguf_words import CONTROL, NORMAL, PROBE, TOKENS, UNUSED, USER_DEFINED, words_of
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import MARK, read_file, read_json

_PIECES, _VOCABULARY, _MERGES, _TEKKEN, _ADDED = (
    "tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "added_tokens.json"
)  # fmt: skip
FILES = (_PIECES, _VOCABULARY, _MERGES, _TEKKEN, _ADDED)
"""Names of files that such a tokenizer may be kept in."""
_MOST_TOKENS, _MOST_PIECES = 2**22, 2**26
_CUTS = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
"""llama.cpp's name of the way in which a byte-level BPE cuts text, by transformers' class."""
_TO_JSON = "or write tokenizer.json with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"


def tokenizer_in(folder: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> tuple[Path, Tokenizer]:
    """The tokenizer, and the file that names it in messages.

    Args:
        settings: of `tokenizer_config.json`.
        special: texts of its special tokens, by their names such as `bos_token`.
    Raises:
        InputError: there is none, it is of a kind that is not built, or it is damaged.
    """
    if (path := folder / _PIECES).is_file():
        return path, _of_pieces(path, settings, special)
    if (path := folder / _VOCABULARY).is_file() and (folder / _MERGES).is_file():
        return path, _of_bytes(path, settings, special)
    if (path := folder / _TEKKEN).is_file():
        raise InputError(
            f"{path} is not read; transformers writes tokenizer.json from it: `from transformers.integrations.mistral import "
            f"convert_tekken_tokenizer as c; c('{path}').save_pretrained('{folder}', save_format='hf')`"
        )
    raise InputError(f"{folder} has no tokenizer.json; text cannot be turned into tokens")


def _of_bytes(path: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    """A byte-level BPE of `vocab.json` and `merges.txt`."""
    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if (cut := _CUTS.get(kind)) is None:
        raise InputError(
            f"{path}: tokenizer_config.json names no class whose text is cut in a known way ({', '.join(_CUTS)}); fetch "
            f"tokenizer.json, {_TO_JSON}"
        )
    vocabulary = read_json(path)
    if not isinstance(vocabulary, dict) or not all(map(_is_id, vocabulary.values())):
        raise InputError(f"{path} is no vocabulary: it does not give each token its id")
    try:
        lines = read_file(path.with_name(_MERGES)).removeprefix(MARK).decode().split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{path.with_name(_MERGES)} is not UTF-8") from None
    merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    kinds = dict.fromkeys(vocabulary.values(), NORMAL)
    said = {"model": "gpt2", "pre": cut, "merges": merges, "add_bos_token": False}
    added = _added(path.with_name(_ADDED), settings, special)
    tokenizer = _built(path, {id: token for token, id in vocabulary.items()}, kinds, added, special, said)
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _of_pieces(path: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    """A BPE of SentencePiece's own file, which its library reads; compared with what that makes of a text."""
    try:
        library, form = import_module("sentencepiece"), import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        raise InputError(
            f"{path.parent} has no tokenizer.json, but {path.name}, which `pip install sentencepiece protobuf` makes readable"
        ) from None
    content = read_file(path, _MOST_PIECES)
    try:
        model, theirs = form.ModelProto.FromString(content), library.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # the libraries raise kinds of their own
        raise InputError(f"{path} is no SentencePiece model: {error}") from None
    pieces = dict(enumerate(model.pieces))
    # A user's own tokens are met before a space is anything else.
    tokens = {id: of.piece.replace("▁", " ") if of.type == USER_DEFINED else of.piece for id, of in pieces.items()}
    prefix, spec = bool(model.normalizer_spec.add_dummy_prefix), model.trainer_spec
    said = {
        "model": "llama", "add_space_prefix": prefix, "scores": [float(of.score) for of in pieces.values()],
        "unknown_token_id": spec.unk_id, "add_bos_token": settings.get("add_bos_token", True),
        "add_eos_token": settings.get("add_eos_token", False),
    }  # fmt: skip
    said |= {f"{name}_token_id": id for name, id in (("bos", spec.bos_id), ("eos", spec.eos_id)) if id >= 0}
    added = _added(path.with_name(_ADDED), settings, special)
    tokenizer = _built(path, tokens, {id: of.type for id, of in pieces.items()}, added, special, said)
    ours = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROBE.split("\n")]
    if spec.model_type != spec.BPE or ours != [theirs.encode(text) for text in PROBE.split("\n")]:
        raise InputError(f"{path}: how it cuts text is not built (only BPE is); fetch tokenizer.json, {_TO_JSON}")
    if prefix:  # transformers puts it before a text alone, and not behind each special token as well
        tokenizer.normalizer = None
        scheme = "always" if settings.get("legacy") is True else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    return tokenizer


def _built(
    path: Path, tokens: dict[int, str], kinds: dict[int, int], added: Iterator[tuple[int, str, bool]],
    special: Mapping[str, str], said: dict[str, Any],
) -> Tokenizer:  # fmt: skip
    """A tokenizer of its own tokens by id, their kinds, and those that were added to it."""
    for id, token, is_special in added:
        tokens[id], kinds[id] = token, CONTROL if is_special else USER_DEFINED
    kinds |= {id: CONTROL for id, token in tokens.items() if token in special.values() and kinds[id] == NORMAL}
    count, ids = max(tokens, default=-1) + 1, {token: id for id, token in tokens.items()}
    said |= {f"{key}_id": ids[token] for key, token in special.items() if key in ("bos_token", "eos_token") and token in ids}
    said |= {"tokens": [tokens.get(id, f"[PAD{id}]") for id in range(count)]}
    said |= {"token_type": [kinds.get(id, UNUSED) for id in range(count)]}
    if "scores" in said:
        said["scores"] += [0.0] * (count - len(said["scores"]))
    return words_of(path, {f"{TOKENS}{key}": value for key, value in said.items()}).tokenizer


def _added(path: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> Iterator[tuple[int, str, bool]]:
    """Tokens that were added to a vocabulary: id, text, and whether no text shows it. The newer file's come last."""
    older, newer = read_json(path) if path.is_file() else {}, settings.get("added_tokens_decoder", {})
    try:
        tokens = [(id, token, token in special.values()) for token, id in older.items()]
        tokens += [(int(id), token["content"], bool(token.get("special"))) for id, token in newer.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        tokens = [(-1, "", False)]
    if not all(_is_id(id) and isinstance(token, str) for id, token, _ in tokens):
        raise InputError(f"{path.parent}: its added tokens are no texts with their ids")
    yield from tokens


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKENS
