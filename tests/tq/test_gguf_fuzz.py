"""Malformed GGUF files: one line and exit code 2, no hang, and no more memory than a few times the file.

A few hundred among the ordinary tests and thousands with `make fuzz`. Where the parts of a good file lie is said by gguf's
own reader.
"""

import struct
from dataclasses import dataclass

import gguf
import pytest
from checkpoints import write_checkpoint
from fuzzing import TEMPLATE, Place, run_examples, taking_at_most
from gguf_files import convert, plain_bytes
from hypothesis import strategies as st
from mutations import damaged_bytes

from tq.cli import main

ROOM = 2**26
"""Bytes beside a few times the file: what a command takes for a good file of this size, and what malloc keeps."""
TIMES = 8
BIG = [2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
U32, I32, BOOL, STRING, ARRAY, U64, I64, F64 = 4, 5, 7, 8, 9, 10, 11, 12
NO_KINDS = [13, 14, 255, 2**31, 2**32 - 1]
NOT_UTF8 = [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a\xc0\xafb"]
WORDS = [b"", b"\0", b"\n", b"\x1b[31m", "‮".encode(), b"a" * 70_000, b"blk." + b"9" * 5000 + b".attn_q.weight", b"blk.-1.x"]
NO_NUMBERS = [
    float("nan"), float("inf"), float("-inf"), -1, -(2**31), 0, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1, b"7", [7], [],
]  # fmt: skip


class Content(bytes):
    """Of a file; too long to be shown."""

    def __repr__(self):
        return f"<{len(self):,} bytes>"


def text(value):
    return struct.pack("<Q", len(value)) + value


def packed(value):
    """A number, text or list as its kind and its bytes."""
    kind, content = bare(value)
    return struct.pack("<I", kind) + content


def bare(value):
    match value:
        case bool():
            return BOOL, struct.pack("<?", value)
        case int() if -(2**31) <= value < 2**32:
            return (I32, struct.pack("<i", value)) if value < 2**31 else (U32, struct.pack("<I", value))
        case int():
            return (I64, struct.pack("<q", value)) if value < 2**63 else (U64, struct.pack("<Q", value))
        case float():
            return F64, struct.pack("<d", value)
        case bytes():
            return STRING, text(value)
        case _:
            kinds = [bare(item) for item in value] or [(U32, b"")]
            return ARRAY, struct.pack("<IQ", kinds[0][0], len(value)) + b"".join(content for _, content in kinds)


@dataclass(frozen=True)
class File:
    """A good file.

    Attributes:
        header: all that stands before the numbers of the tensors and the padding there.
        entries: by key where its length, itself, the kind of its value and the value lie.
        tensors: where the length of a name, the name, the number of axes, their sizes, the kind and the offset lie.
    """

    header: bytes
    data: bytes
    entries: dict[str, tuple[slice, ...]]
    tensors: tuple[tuple[slice, ...], ...]

    @classmethod
    def at(cls, path):
        reader = gguf.GGUFReader(path)
        base = reader.data.ctypes.data

        def spans(field, count):
            """Of a list of tokens the many parts are one."""
            begins = [part.ctypes.data - base for part in field.parts[: count + 1]]
            ends = [*begins[1 : count + 1], 0][:count]
            ends[-1] = field.parts[-1].ctypes.data - base + field.parts[-1].nbytes
            return tuple(map(slice, begins[:count], ends))

        entries = {key: spans(field, 4) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors = tuple(spans(tensor.field, 6) for tensor in reader.tensors)
        return cls(bytes(reader.data[: tensors[-1][-1].stop]), bytes(reader.data[reader.data_offset :]), entries, tensors)

    def number(self, span):
        return int.from_bytes(self.header[span], "little")

    def values_of_kind(self, *kinds):
        return [value for *_, kind, value in self.entries.values() if self.number(kind) in kinds]

    def with_edits(self, *edits, entries=(), tensors=b"", fewer=(0, 0)):
        """With other bytes in some places, and with entries and one tensor more than it had; `fewer` were taken out."""
        counts = [self.number(slice(8, 16)) + bool(tensors) - fewer[0], self.number(slice(16, 24)) + len(entries) - fewer[1]]
        header_end = self.tensors[0][0].start
        header = self.header[:8] + struct.pack("<QQ", *counts) + self.header[24:] + tensors
        for span, wrong in sorted(
            [*edits, (slice(header_end, header_end), b"".join(entries))], key=lambda edit: -edit[0].start
        ):
            header = header[: span.start] + wrong + header[span.stop :]
        return header + bytes(-len(header) % 32) + self.data


# -- Lies that no reader can take ---------------------------------------------------------------------------------------------


def whole(spans):
    return slice(spans[0].start, spans[-1].stop)


def subspans(spans, begin, size):
    return [slice(span.start + begin, span.start + begin + size) for span in spans]


NUMBERS = {
    "the length of a key": (lambda file: [spans[0] for spans in file.entries.values()], BIG),
    "the kind of a value": (lambda file: [spans[2] for spans in file.entries.values()], NO_KINDS),
    "the length of a text": (lambda file: subspans(file.values_of_kind(STRING), 0, 8), BIG),
    "the kind of a list": (lambda file: subspans(file.values_of_kind(ARRAY), 0, 4), NO_KINDS),
    "the length of a list": (lambda file: subspans(file.values_of_kind(ARRAY), 4, 8), BIG),
    "the length of a name": (lambda file: [spans[0] for spans in file.tensors], BIG),
    "the number of axes": (lambda file: [spans[2] for spans in file.tensors], [0, 5, 9, 2**31, 2**32 - 1]),
    "the size of an axis": (lambda file: subspans([spans[3] for spans in file.tensors], 0, 8), [0, *BIG]),
    "the kind of a tensor": (
        lambda file: [spans[4] for spans in file.tensors], [4, 5, 24, 25, 26, 27, 28, 31, 36, 99, 2**16, 2**31, 2**32 - 1]),
    "the offset of a tensor": (lambda file: [spans[5] for spans in file.tensors], BIG),
    "the version": (lambda _: [slice(4, 8)], [0, 1, 4, 3 << 24, 2**32 - 1]),
    "the first word": (lambda _: [slice(0, 4)], [int.from_bytes(word, "little") for word in (b"GGML", b"FUGG", b"gguf", b"")]),
    "the number of tensors": (lambda _: [slice(8, 16)], BIG),
    "the number of entries": (lambda _: [slice(16, 24)], BIG),
}  # fmt: skip
"""Where a number stands, and what cannot be there."""


def number(draw, file):
    spans, wrong = NUMBERS[draw(st.sampled_from(list(NUMBERS)))]
    header, span = file.header, draw(st.sampled_from(spans(file)))
    value = draw(st.sampled_from(wrong)).to_bytes(span.stop - span.start, "little")
    return header[: span.start] + value + header[span.stop :] + bytes(-len(header) % 32) + file.data


def cut(draw, file):
    content = file.with_edits()
    # All but the padding behind the last tensor is needed.
    return content[: draw(st.integers(0, len(content) - 33))]


def counts(draw, file):
    few = draw(st.sampled_from([(1, 0), (2, 0), (-1, 0), (0, 1), (0, 2), (0, -1)]))
    return file.with_edits(fewer=few)


def twice(draw, file):
    """An entry, or a tensor."""
    if draw(st.booleans()):
        return file.with_edits(entries=[file.header[whole(draw(st.sampled_from(list(file.entries.values()))))]])
    return file.with_edits(tensors=file.header[whole(draw(st.sampled_from(file.tensors)))])


def not_utf8(draw, file):
    spans = draw(st.sampled_from([*file.entries.values(), *file.tensors]))
    return file.with_edits((slice(spans[0].start, spans[1].stop), text(draw(st.sampled_from(NOT_UTF8)))))


def shape(draw, file):
    """More numbers than can be counted."""
    sizes = draw(st.sampled_from([[2**32] * 2, [2**33, 2**31], [2**22] * 3, [2**16] * 4, [2**63, 2], [2**24, 2**24 - 1]]))
    spans = draw(st.sampled_from(file.tensors))
    dims = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return file.with_edits((slice(spans[2].start, spans[3].stop), dims))


def place(draw, file):
    """Where a tensor lies: on another, or between two alignments."""
    one, other = draw(st.permutations(file.tensors))[:2]
    offset = file.number(one[5])
    wrong = draw(st.sampled_from([file.number(other[5]), *(offset + by for by in (1, 4, 31))]))
    return file.with_edits((one[5], struct.pack("<Q", wrong)))


REQUIRED_KEYS = (
    ".embedding_length", ".block_count", ".feed_forward_length", ".attention.head_count", ".attention.head_count_kv",
    ".attention.key_length", ".context_length", "general.alignment",
)  # fmt: skip


def hyperparameter(draw, file):
    """A size, or the alignment, that cannot be."""
    key, value = draw(st.sampled_from(REQUIRED_KEYS)), packed(draw(st.sampled_from(NO_NUMBERS)))
    spans = [spans for name, spans in file.entries.items() if name.endswith(key)]
    if spans:
        return file.with_edits((slice(spans[0][2].start, spans[0][3].stop), value))
    return file.with_edits(entries=[text(key.encode()) + value])


LIES = (cut, number, number, number, counts, twice, not_utf8, shape, place, hyperparameter)


@st.composite
def lying(draw, file, among=LIES):
    """A file with one lie in it."""
    return Content(draw(st.sampled_from(among))(draw, file))


EXTRA_KEYS = (
    "qwen3.rope.scaling.type", "qwen3.rope.scaling.factor", "qwen3.attention.sliding_window", "qwen3.expert_count",
    "qwen3.rope.dimension_count", "split.count", "general.sampling.top_k", "tokenizer.chat_template",
)  # fmt: skip


@st.composite
def odd(draw, file):
    """A file that may be taken or refused: entries and names of any value, fewer and more of them."""
    values = st.sampled_from([*NO_NUMBERS, 1, 0.5, True, *WORDS, b"llama", b"yarn", b"{{", [1] * 300, [b"a"] * 300, [b"x"]])
    edits, fewer = [], 0
    spans_lists = st.lists(st.sampled_from(list(file.entries.values())), max_size=2, unique_by=lambda spans: spans[0].start)
    for spans in draw(spans_lists):
        take_out = draw(st.booleans())
        fewer += take_out
        change = (whole(spans), b"") if take_out else (slice(spans[2].start, spans[3].stop), packed(draw(values)))
        edits.append(change)
    if draw(st.booleans()):
        spans = draw(st.sampled_from(file.tensors))
        edits.append((slice(spans[0].start, spans[1].stop), text(draw(st.sampled_from(WORDS)))))
    keys = draw(st.lists(st.sampled_from(EXTRA_KEYS), max_size=2, unique=True))
    more = [text(key.encode()) + packed(draw(values)) for key in keys]
    return Content(file.with_edits(*edits, entries=more, fewer=(0, fewer)))


# -- What is done with them ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    place = Place(folder)
    write_checkpoint(folder / "heads", config={"head_dim": 64})  # which the CPU's kernels take
    words = plain_bytes(**{"tokenizer.chat_template": TEMPLATE})
    path = convert(folder / "heads", folder / "whole.gguf", "Q8_0", vocabulary=words)
    place.file = File.at(path)
    assert place.file.with_edits() == path.read_bytes()
    for command in (["info", path], ["generate", "--model", path, "--prompt", "a"]):
        assert main([*map(str, command)]) == 0  # what is loaded once is not the file's
    return place


def read(place, content, *, info_codes=(0, 2), load_codes=(0, 2)):
    """Tell of a file and load it; exit codes that may be. A name of its own: files are remembered by name, size and time."""
    place.number = getattr(place, "number", 0) + 1
    file = place.folder / f"m{place.number}.gguf"
    file.write_bytes(content)
    try:
        with taking_at_most(ROOM + TIMES * len(content)):
            place.run("info", file, code=info_codes)
            # A scale of a block that was changed makes channels uneven, which is a warning beside whatever else is said.
            place.run("generate", "--model", file, "--prompt", "a", "--max-new-tokens", 1, "--no-chat", "--balance", "off",
                      code=load_codes)  # fmt: skip
    finally:
        file.unlink()


def try_lie(place, data):
    read(place, data.draw(lying(place.file)), info_codes=(2,), load_codes=(2,))


def try_odd(place, data):
    read(place, data.draw(odd(place.file)))


def try_damaged(place, data):
    head = data.draw(st.sampled_from([60, 1000, 9000]))
    read(place, data.draw(damaged_bytes(place.file.with_edits(), head=head)))


KINDS = {try_lie: (80, 3500), try_odd: (25, 1000), try_damaged: (15, 1000)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_some_malformed_files_are_refused_in_one_line(gguf_place, kind):
    run_examples(gguf_place, kind, KINDS[kind][0], derandomize=True)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_thousands_of_malformed_files_are_refused_in_one_line(gguf_place, kind):
    run_examples(gguf_place, kind, KINDS[kind][1], derandomize=False)
