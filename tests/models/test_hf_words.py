"""Tokenizers of folders without `tokenizer.json`: the tokens that transformers makes by the same files, or one line."""

import io
import json

import pytest
import transformers
from checkpoints import write_checkpoint
from refusals import assert_refused
from transformers.convert_slow_tokenizer import bytes_to_unicode

from haarkv.models import words
from haarkv.models.catalog import read_config
from haarkv.models.hf_folder import HFFolder
from haarkv.models.text import load_tokenizer
from tq.cli import main

TEXTS = (
    "Hello world", "  a  b", "a b\n\n c", "cafe\u0301 café 北京 😀", "1234 5", "<|end|>hi", "x<sep>y <sep> z", "",
    "def f(a_b):\n\treturn 1", "x<s>y", " ", "</s> hi",
)  # fmt: skip
CORPUS = ["the quick brown fox jumps over the lazy dog", "Hello world", "Grüße, café naïve 123 456", "def f(a, b):", "  two"]


def slow_folder(path, tokenizer_config=None, **files):
    folder = write_checkpoint(path, config={"vocab_size": 700}, tokenizer_config=tokenizer_config)
    (folder / "tokenizer.json").unlink()
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def assert_as_transformers(folder):
    ours, theirs = HFFolder(folder).words().tokenizer, transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True), text
    assert load_tokenizer(folder, read_config(folder)).encode("Hello") == theirs("Hello")["input_ids"]


# -- Byte-level BPE -------------------------------------------------------------------------------------------------------

MERGES = ("H e", "l l", "He ll", "o Ġ", "Ġ a", "c a", "ca f", "Ã ©")


def bytes_files(special=(), first="#version: 0.2\n", end="\n"):
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES), *special]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    return {"vocab__json": json.dumps(vocabulary), "merges__txt": first + "".join(merge + end for merge in MERGES)}


def added_entries(**tokens):
    """Entries of `added_tokens_decoder`: texts by id, those in angles with a bar special."""
    plain = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {id.removeprefix("of_"): plain | {"content": text, "special": "|" in text} for id, text in tokens.items()}


@pytest.mark.parametrize("where", ["added_tokens_decoder", "added_tokens.json"])
@pytest.mark.parametrize(("kind", "end"), [("Qwen2Tokenizer", "\n"), ("Qwen2TokenizerFast", "\r\n"), ("GPT2Tokenizer", "\n")])
def test_a_vocabulary_and_merges_make_transformers_tokens(tmp_path, kind, end, where):
    settings = {"tokenizer_class": kind, "bos_token": None} | dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|end|>")
    files = bytes_files(end=end)
    if where == "added_tokens.json":
        files["added_tokens__json"] = json.dumps({"<|end|>": 264, "<sep>": 265})
    else:
        settings[where] = added_entries(of_264="<|end|>", of_265="<sep>")
    folder = slow_folder(tmp_path / "m", settings, **files)
    assert_as_transformers(folder)
    assert {path.name for path in HFFolder(folder).files()} >= {"vocab.json", "merges.txt"}


def test_an_added_token_has_its_own_id_wherever_the_others_end(tmp_path):
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|end|>",
        "added_tokens_decoder": added_entries(of_290="<|end|>"),
    }
    tokenizer = HFFolder(slow_folder(tmp_path / "m", settings, **bytes_files())).words().tokenizer
    assert tokenizer.encode("<|end|>").ids == [290]
    assert tokenizer.decode([290]) == ""


# -- SentencePiece --------------------------------------------------------------------------------------------------------


def pieces_file(prefix=True, **more):
    library = pytest.importorskip("sentencepiece")
    options = {
        "vocab_size": 380, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "add_dummy_prefix": prefix, "remove_extra_whitespaces": False, "split_digits": True, "minloglevel": 2,
        "user_defined_symbols": ["<sep>"] if prefix else ["<sep>", "▁▁", "<x▁y>"],
    }  # fmt: skip
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=(out := io.BytesIO()), **options | more
    )
    return out.getvalue()


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize(("kind", "prefix"), [("LlamaTokenizer", True), ("GemmaTokenizer", False)])
def test_pieces_make_transformers_tokens(tmp_path, kind, prefix, legacy):
    settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    settings |= {} if legacy is None else {"legacy": legacy}
    settings["added_tokens_decoder"] = added_entries(of_380="<|end|>")
    assert_as_transformers(slow_folder(tmp_path / "m", settings, tokenizer__model=pieces_file(prefix)))


def test_pieces_without_settings_begin_with_their_own_bos(tmp_path):
    folder = slow_folder(tmp_path / "m", tokenizer__model=pieces_file(False, pad_id=0, eos_id=1, bos_id=2, unk_id=3))
    words, theirs = HFFolder(folder).words(), pytest.importorskip("sentencepiece").SentencePieceProcessor()
    theirs.load(str(folder / "tokenizer.model"))
    for text in ("Hello", "q<x y>r", "   two  spaces", "123 ä\n"):
        assert words.tokenizer.encode(text).ids == [2, *theirs.encode(text)], text
    assert words.tokenizer.decode(words.tokenizer.encode("Hello  world ä").ids) == "Hello  world ä"


# -- What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "settings", "words"),
    [
        (
            {"tekken__json": "{}"},
            {},
            ["tekken.json is not read; transformers writes tokenizer.json", "convert_tekken_tokenizer"],
        ),
        ({}, {}, ["has no tokenizer.json; text cannot"]),
        (bytes_files(), {}, ["vocab.json: tokenizer_config.json names no class", "Qwen2Tokenizer, GPT2Tokenizer"]),
        (bytes_files(), {"tokenizer_class": "BartTokenizer"}, ["names no class", "fetch tokenizer.json, or write"]),
        (bytes_files() | {"vocab__json": '{"a": -1}'}, {"tokenizer_class": "GPT2Tokenizer"}, ["vocab.json is no vocabulary"]),
        (bytes_files() | {"merges__txt": b"\xff"}, {"tokenizer_class": "GPT2Tokenizer"}, ["merges.txt is not UTF-8"]),
        (bytes_files() | {"merges__txt": "a"}, {"tokenizer_class": "GPT2Tokenizer"}, ["merges is no list of pairs"]),
        (bytes_files() | {"added_tokens__json": '{"a": "b"}'}, {"tokenizer_class": "GPT2Tokenizer"}, ["added tokens are no"]),
    ],
)
def test_a_folder_without_a_tokenizer_that_is_built_is_refused_by_what_is_there(tmp_path, capsys, files, settings, words):
    folder = slow_folder(tmp_path / "m", settings, **files)
    assert_refused((main(["generate", "-m", str(folder), "--prompt", "a", "--kv", "tq4"]), *capsys.readouterr()), *words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": "unigram", "vocab_size": 305}, ["how it cuts text is not built (only BPE is)", "AutoTokenizer"]),
        ({"normalization_rule_name": "nmt_nfkc"}, ["how it cuts text is not built"]),
        ({"remove_extra_whitespaces": True}, ["how it cuts text is not built"]),
        (None, ["is no SentencePiece model"]),
    ],
)
def test_other_pieces_are_refused(tmp_path, capsys, more, words):
    content = pieces_file(**more) if more is not None else pieces_file()[:-7]
    folder = slow_folder(tmp_path / "m", tokenizer__model=content)
    assert_refused((main(["generate", "-m", str(folder), "--prompt", "a", "--kv", "tq4"]), *capsys.readouterr()), *words)


def test_without_the_library_it_is_said_what_to_install(tmp_path, capsys, monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(words, "import_module", absent)
    folder = slow_folder(tmp_path / "m", tokenizer__model=b"")
    code = main(["generate", "-m", str(folder), "--prompt", "a", "--kv", "tq4"])
    assert_refused((code, *capsys.readouterr()), "tokenizer.model, which `pip install sentencepiece protobuf`")
