"""Tokenizers of GGUF files: the tokens of llama.cpp, whose merging is written here as it reads, and of transformers."""

import random
from itertools import pairwise

import gguf
import pytest
import transformers
from gguf_files import add, byte_vocabulary, close, pieces
from refusals import assert_refused

from haarkv.models.catalog import open_source
from haarkv.tq_ops.errors import InputError

GRAMS = ("Ġ t", "h e", "Ġt he", "1 2", "12 3", "' s", "Ġ Ġ", "Ċ Ċ", "! !", "a b", "ab c", "Ġ a", "Ġa b", "Ã ¤", "Ġ 1")
TEXTS = [
    "", " ", "   ", "the theory", "abc ab  a", "a\n\n\nb", "12 123 1234567", "it's we'RE the's", "!!! ?!", "ä ß €😀", "日本語",
    "<|end|>", "a<|end|> b<|end|>", "\t the\r\n", "½²Ⅷ ٣", "x = 1+2**3 # the\n    return\n", "'''\"\"\"", "e\u0301\u200d",
]  # fmt: skip
CHARACTERS = "abthe  '\n1239!?.äß日😀٣½\t<|>"


def random_texts(count=60):
    generator = random.Random(0)
    return ["".join(generator.choices(CHARACTERS, k=generator.randint(1, 40))) for _ in range(count)]


def words(path, entries):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        add(writer, key, value)
    return open_source(close(writer)).words()


def ids(tokenizer, text, special=True):
    return tokenizer.encode(text, add_special_tokens=special).ids


# -- Byte-level BPE -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2"])
def test_byte_level_words_are_transformers_own(tmp_path, pre):
    """Of those that transformers knows by the same rule."""
    ours = words(tmp_path / "m.gguf", byte_vocabulary(pre, GRAMS, add_bos_token=False)).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS + random_texts():
        assert ids(ours, text) == theirs(text)["input_ids"], text
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "123 12", ["123", "Ġ", "12"]),
        ("qwen2", "123 12", ["1", "2", "3", "Ġ", "1", "2"]),
        ("llama-bpe", "123 12", ["123", "Ġ", "12"]),
        ("smollm", "123 12", ["1", "2", "3", "Ġ", "1", "2"]),
        ("smollm", "½ ²", ["Â", "½", "Ġ", "Â", "²"]),
        ("default", "a!!b 1234", ["a", "!!", "b", "Ġ", "123", "4"]),
        ("qwen2", "\n\nthe", ["ĊĊ", "t", "he"]),
        ("gpt-2", " the", ["Ġthe"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path, pre, text, expected):
    tokenizer = words(tmp_path / "m.gguf", byte_vocabulary(pre, GRAMS, add_bos_token=False)).tokenizer
    assert tokenizer.encode(text).tokens == expected


def test_a_file_without_a_rule_is_cut_by_llama_cpps_default(tmp_path):
    entries = byte_vocabulary("default", GRAMS)
    one = words(tmp_path / "one.gguf", entries).tokenizer
    del entries["tokenizer.ggml.pre"]
    other = words(tmp_path / "other.gguf", entries).tokenizer
    assert [ids(one, text) for text in TEXTS] == [ids(other, text) for text in TEXTS]


def test_a_llama_3_takes_whole_words_and_begins_with_bos(tmp_path):
    """Its tokens come before its merges: "theb" is one though nothing merges to it."""
    entries = byte_vocabulary("llama-bpe", GRAMS, ("<|begin|>", "<|end|>"), bos_token_id=0)
    tokens, kinds = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"]
    entries |= {"tokenizer.ggml.tokens": [*tokens, "theb"], "tokenizer.ggml.token_type": [*kinds, 1]}
    entries["tokenizer.ggml.bos_token_id"] = tokens.index("<|begin|>")
    tokenizer = words(tmp_path / "m.gguf", entries).tokenizer
    assert tokenizer.encode("theb").tokens == ["<|begin|>", "theb"]
    assert tokenizer.encode("theb", add_special_tokens=False).tokens == ["theb"]
    del entries["tokenizer.ggml.bos_token_id"]
    with pytest.raises(InputError, match="asks for BOS around each text"):
        words(tmp_path / "n.gguf", entries)


def test_the_users_own_tokens_are_whole_and_shown_and_control_tokens_are_not(tmp_path):
    entries = byte_vocabulary("qwen2", GRAMS, ("<|end|>", "<think>"), add_eos_token=True)
    entries["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = words(tmp_path / "m.gguf", entries).tokenizer
    assert tokenizer.encode("a<think>b<|end|>").tokens == ["a", "<think>", "b", "<|end|>", "<|end|>"]
    assert tokenizer.decode(ids(tokenizer, "a<think>b<|end|>")) == "a<think>b"


# -- SentencePiece --------------------------------------------------------------------------------------------------------


def slow_pieces(text, entries, prefix):
    """llama.cpp's way: specials first, then of all neighbours that make a token the best, the leftmost of equals."""
    tokens, scores, kinds = (entries[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    ids_by_token = {token: id for id, token in enumerate(tokens)}
    parts = [text]
    for token in sorted((t for t, k in zip(tokens, kinds, strict=True) if k in (2, 3, 4)), key=len, reverse=True):
        cut = []
        for part in parts:
            pieces = part.split(token) if isinstance(part, str) else [part]
            for index, piece in enumerate(pieces):
                cut += ([ids_by_token[token]] if index else []) + ([piece] if piece != "" else [])
        parts = cut
    token_ids, after_special = [1], True
    for part in parts:
        if not isinstance(part, str):
            token_ids, after_special = [*token_ids, part], True
            continue
        symbols = list(((" " if prefix and after_special else "") + part).replace(" ", "▁"))
        after_special = False
        while True:
            pairs = [(-scores[ids_by_token[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids_by_token]
            if not pairs:
                break
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            token_ids += (
                [ids_by_token[symbol]]
                if symbol in ids_by_token
                else [ids_by_token[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            )
    return token_ids


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_llama_cpps(tmp_path, prefix):
    entries = pieces(add_space_prefix=prefix)
    tokenizer = words(tmp_path / "m.gguf", entries).tokenizer
    texts = ["abc", "</s>abc</s> a", "<unk>a", "日本 ä", "<0x41>", "<s>"]
    generator = random.Random(1)
    texts += ["".join(generator.choices("abc  \nä<s/>", k=generator.randint(1, 30))) for _ in range(200)]
    for text in texts:
        assert ids(tokenizer, text) == slow_pieces(text, entries, prefix), text
        if not any(piece in text for piece in ("<", "  ", "\n\n")):  # behind a whole token llama.cpp puts a space
            assert tokenizer.decode(ids(tokenizer, text)) == text


# -- What is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "words_said"),
    [
        (byte_vocabulary("tekken"), "the pre-tokenizer 'tekken'; built are qwen2"),
        (byte_vocabulary(model="bert"), "its tokenizer is 'bert'"),
        (byte_vocabulary(model="no_vocab"), "has no tokenizer"),
        (byte_vocabulary(tokens=[1, 2, 3]), "no list of at most"),
        (byte_vocabulary(token_type=[1, 2]), "token_type has no kind for each"),
        (byte_vocabulary(merges=("a b", "ab c"), eos_token_id=10**6), "eos_token_id 1000000 is none of"),
        (byte_vocabulary() | {"tokenizer.ggml.merges": ["ab"]}, "no list of pairs"),
        (byte_vocabulary() | {"tokenizer.ggml.merges": [1, 2]}, "is no list of pairs"),
        (byte_vocabulary() | {"tokenizer.ggml.merges": ["zz qq"]}, "cannot be built"),
        (pieces(scores=[0.0]), "scores has no number for each"),
        (pieces(unknown_token_id=-1), "unknown_token_id"),
        (byte_vocabulary() | {"tokenizer.chat_template": 3}, "chat template is not text"),
        (byte_vocabulary() | {"tokenizer.chat_template": "x" * (2**20 + 1)}, "at most 1,048,576"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path, entries, words_said):
    entries = {key: 2**32 - 1 if value == -1 else value for key, value in entries.items()}
    with pytest.raises(InputError, match=r"m\.gguf") as refusal:
        words(tmp_path / "m.gguf", entries)
    assert_refused((2, "", f"tq: {refusal.value}\n"), words_said)
