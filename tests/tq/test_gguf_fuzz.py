"""Malformed GGUF files: one line and exit code 2, no hang, and no more memory than a few times the file.

Small files, a hundred among the ordinary tests and thousands with `make fuzz`; `tests/models/test_gguf.py` has headers
broken by hand. Where the parts of a good file lie is said by gguf's own reader.
"""

import struct
from dataclasses import dataclass

import gguf
import pytest
from checkpoints import write_checkpoint
from fuzzing import TEMPLATE, Place, example_counts, run_examples, taking_at_most
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

    def with_edit(self, span, content):
        """With other bytes in place of these."""
        header = self.header[: span.start] + content + self.header[span.stop :]
        return header + bytes(-len(header) % 32) + self.data


# -- Lies that no reader can take ---------------------------------------------------------------------------------------------


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


@st.composite
def with_lie(draw, file):
    """A number that cannot be there, or an end before the last tensor's."""
    whole = file.with_edit(slice(0, 0), b"")
    if draw(st.integers(0, 3)) == 0:
        return Content(whole[: draw(st.integers(0, len(whole) - 33))])  # all but the padding behind the last tensor is needed
    spans, wrong = NUMBERS[draw(st.sampled_from(list(NUMBERS)))]
    span = draw(st.sampled_from(spans(file)))
    return Content(file.with_edit(span, draw(st.sampled_from(wrong)).to_bytes(span.stop - span.start, "little")))


VALUES = [
    *(float("nan"), float("inf"), -1, 0, 1, 0.5, True, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1, -(2**31)),
    *(b"", b"7", b"llama", b"{{", b"\xff\xfe", b"a" * 70_000, b"\x1b[31m", [], [7], [1] * 300, [b"a"] * 300, [b"x" * 2**20]),
]


@st.composite
def with_odd_value(draw, file):
    """Another value of any kind under one of its keys."""
    *_, kind, value = draw(st.sampled_from(list(file.entries.values())))
    return Content(file.with_edit(slice(kind.start, value.stop), packed(draw(st.sampled_from(VALUES)))))


# -- What is done with them ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    place = Place(folder)
    write_checkpoint(folder / "heads", config={"head_dim": 64})  # which the CPU's kernels take
    words = plain_bytes(**{"tokenizer.chat_template": TEMPLATE})
    path = convert(folder / "heads", folder / "whole.gguf", "Q8_0", vocabulary=words)
    place.file = File.at(path)
    assert place.file.with_edit(slice(0, 0), b"") == path.read_bytes()
    for command in (["info", path], ["generate", "--model", path, "--prompt", "a"]):
        assert main([*map(str, command)]) == 0  # what is loaded once is not the file's
    return place


def read(place, content, codes=(0, 2)):
    """Tell of a file and load it; exit codes that may be. A name of its own: files are remembered by name, size and time."""
    place.number = getattr(place, "number", 0) + 1
    file = place.folder / f"m{place.number}.gguf"
    file.write_bytes(content)
    try:
        with taking_at_most(ROOM + TIMES * len(content)):
            place.run("info", file, code=codes)
            # A scale of a block that was changed makes channels uneven, which is a warning beside whatever else is said.
            place.run("generate", "--model", file, "--prompt", "a", "--max-new-tokens", 1, "--no-chat", "--balance", "off",
                      code=codes)  # fmt: skip
    finally:
        file.unlink()


def try_lie(place, data):
    read(place, data.draw(with_lie(place.file)), codes=(2,))


def try_value(place, data):
    read(place, data.draw(with_odd_value(place.file)))


def try_damaged(place, data):
    head = data.draw(st.sampled_from([60, 1000, 9000]))
    read(place, data.draw(damaged_bytes(place.file.with_edit(slice(0, 0), b""), head=head)))


KINDS = {try_lie: (50, 2500), try_value: (40, 1500), try_damaged: (15, 1000)}


@pytest.mark.parametrize("examples", example_counts(KINDS))
def test_malformed_files_are_refused_in_one_line(gguf_place, examples):
    run_examples(gguf_place, *examples)
