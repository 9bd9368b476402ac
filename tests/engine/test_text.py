"""Text as its tokens come: what is given out, joined, is the text, for every kind of tokenizer, and ends before a stop."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import byte_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import WordLevel

from haarkv.engine.text import GrowingText, Texts, stop_list
from haarkv.models.source import Words
from haarkv.models.text import Tokenizer as SourceTokenizer
from haarkv.tq_ops.errors import InputError

# -- Tokens -----------------------------------------------------------------------------------------------------------------

SPECIAL, BYTES = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    "▁", "▁a", "a", "b", "é", "日本", "▁▁", "▁.", ".", "x▁y", "\n", " a", "##s", "don't", "n't", "a</w>", "b</w>", "</w>",
    "\ufffd", "<think>",
]  # fmt: skip
KINDS = {
    "bytes": None,
    "pieces": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "pieces without a prefix": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace behind bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "word pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder("</w>"),
    "fused": decoders.Fuse(),
    "no decoder": None,
}
IN_BYTES = ("bytes", "pieces", "pieces without a prefix", "metaspace behind bytes")
"""Kinds of which some tokens are bytes."""


def make_tokenizer(kind):
    if kind == "bytes":
        library = byte_tokenizer()
        library.add_tokens([AddedToken("a b", normalized=False)])
    else:
        library = Tokenizer(WordLevel({token: id for id, token in enumerate([*SPECIAL, *BYTES, *PIECES])}, unk_token="<unk>"))
        if KINDS[kind] is not None:
            library.decoder = KINDS[kind]
        library.add_special_tokens(SPECIAL[1:])
        library.add_tokens([AddedToken("<think>", normalized=False)])
    config = SimpleNamespace(vocab_size=1000, eos_token_ids=())
    return SourceTokenizer(SimpleNamespace(words=lambda: Words(library, Path("m"))), config), library


def byte_ids(kind, content):
    """Ids of tokens that are bytes."""
    return [byte if kind == "bytes" else len(SPECIAL) + byte for byte in content]


def tokens(kind, content):
    """Lists of ids: words, special tokens, and bytes as `content` draws them."""
    words = st.integers(0, 257) if kind == "bytes" else st.sampled_from([0, 1, 2, *range(259, 259 + len(PIECES))])
    if kind not in IN_BYTES:
        return st.lists(words, max_size=8)
    parts = st.one_of(words.map(lambda word: [word]), content.map(lambda data: byte_ids(kind, data)))
    return st.lists(parts, max_size=8).map(lambda found: [id for part in found for id in part])


VALID = st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=3).map(str.encode)
"""Whole characters as bytes. The sign that stands for a space is left out: a vocabulary that has it never spells it so."""


def cases(count):
    return settings(max_examples=count, derandomize=True, deadline=None, database=None)


def test_a_space_that_bytes_spell_is_shown_as_one():
    tokenizer, library = make_tokenizer("metaspace behind bytes")
    a = library.token_to_id("a")
    ids = [a, *byte_ids("pieces", "▁".encode()), a]
    assert tokenizer.decode(ids) == library.decode(ids) == "a a"


@pytest.mark.parametrize("kind", KINDS)
def test_valid_text_is_the_librarys(kind):
    """Bytes that are whole characters, between words of all kinds: as `tokenizers` decodes them."""
    ours, library = make_tokenizer(kind)

    @cases(200)
    @given(tokens(kind, VALID))
    def run(ids):
        if kind == "bytes" or "\ufffd" not in library.decode(ids):
            assert ours.decode(ids) == library.decode(ids)

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_joined_is_the_text(kind):
    """Any bytes, with stops and without: pieces add up to the text, which is the whole one's up to the first stop."""
    ours, _ = make_tokenizer(kind)

    @cases(200)
    @given(
        tokens(kind, st.binary(max_size=4)), st.lists(st.sampled_from(["a", "é", " ", "\ufffd", "\ufffda", "aa"]), max_size=2)
    )
    def run(ids, stops):
        pieces = []
        texts = Texts(ours, 1, stops, None, lambda _, piece: pieces.append(piece))
        for token in ids:
            if texts.push(0, token):
                break
        [text] = texts.finish()
        assert "".join(pieces) == text == up_to_stop(ours.decode(ids), stops)

    run()


@pytest.mark.parametrize("kind", IN_BYTES)
@cases(200)
@given(st.text(max_size=4).map(str.encode), st.binary(max_size=4))
@example("é".encode(), b"\xe2b")
@example(b"b", b"\xf0\x9f\x98")
def test_whole_characters_stay_whole_before_bytes_that_are_none(kind, whole, rest):
    """Of what follows them, pieces show what the library does: a sign for each byte of the run."""
    ours, _ = make_tokenizer(kind)
    text = ours.decode(byte_ids(kind, b"a" + whole + rest))
    if kind == "bytes":
        assert text == (b"a" + whole + rest).decode(errors="replace")
    assert text.startswith("a" + whole.decode().replace("▁", " " if kind == "metaspace behind bytes" else "▁"))


def up_to_stop(text, stops):
    """As if the characters came one by one."""
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, complete))]
    return text


# -- Stop strings -----------------------------------------------------------------------------------------------------------


class Pieces:
    """A stream whose token i is piece i."""

    def __init__(self, pieces):
        self.push, self.end = pieces.__getitem__, str


def fed(pieces, stops):
    """(texts as they were given out, whether it stopped), fed until it stops."""
    growing = GrowingText(Pieces(pieces), stops)
    out = []
    for token in range(len(pieces)):
        out.append(growing.push(token))
        if growing.stopped:
            break
    out.append(growing.end())
    assert "".join(out) == growing.text
    return out, growing.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "out", "at_stop"),
    [
        (["ab", "cd"], [], ["ab", "cd", ""], False),
        (["ab", "cd"], ["bc"], ["a", "", ""], True),
        (["ab", "xd"], ["bc"], ["a", "bxd", ""], False),
        (["ab", "b", "c"], ["bc"], ["a", "b", "", ""], True),
        (["a", "b"], ["bc"], ["a", "", "b"], False),  # the end of the text, and no stop
        (["xENDy"], ["END"], ["x", ""], True),
        (["aab", "aac"], ["aac", "aabaa"], ["", "", ""], True),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""], True),
        (["one two"], ["two", "one"], ["", ""], True),
        (["baa"], ["baa", "a"], ["b", ""], True),  # as if the letters came one by one
        (["xab"], ["b", "ab"], ["x", ""], True),
    ],
)
def test_text_is_given_out_when_no_stop_can_begin_in_it(pieces, stops, out, at_stop):
    assert fed(pieces, stops) == (out, at_stop)


def test_stop_texts_are_one_or_several_and_not_empty():
    assert stop_list("\n\n") == ("\n\n",)
    assert stop_list(["a", "b"]) == ("a", "b")
    with pytest.raises(InputError, match="--stop"):
        stop_list(["a", ""])
