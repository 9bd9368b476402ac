"""A GGUF file as its parts, each of which can be made to lie; and a strategy of files that do.

The parser trusts what it reads: it is given good files alone. It shares nothing with the loader.
"""

import struct
from dataclasses import dataclass, field, replace

from hypothesis import assume
from hypothesis import strategies as st

BIG = [2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = 4, 5, 6, 7, 8, 9, 10, 11, 12
_NOT_UTF8 = [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a\xc0\xafb"]
_WORDS = [b"", b"\0", b"\n", b"\x1b[31m", "‮".encode(), b"a" * 70_000, b"blk." + b"9" * 5000 + b".attn_q.weight", b"blk.-1.x"]


class Content(bytes):
    """Of a file; too long to be shown."""

    def __repr__(self):
        return f"<{len(self):,} bytes>"


@dataclass(frozen=True)
class Entry:
    """What a file says under a key; `key_length` is what it says of the key's length, where that is a lie."""

    key: bytes
    kind: int
    value: bytes
    key_length: int | None = None

    def dump(self):
        length = len(self.key) if self.key_length is None else self.key_length
        return struct.pack("<Q", length) + self.key + struct.pack("<I", self.kind) + self.value


@dataclass(frozen=True)
class Info:
    """Where a tensor lies; `axes` and `name_length` are what the file says of them, where that is a lie."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int
    axes: int | None = None
    name_length: int | None = None

    def dump(self):
        length = len(self.name) if self.name_length is None else self.name_length
        axes = len(self.shape) if self.axes is None else self.axes
        return (
            struct.pack("<Q", length) + self.name + struct.pack("<I", axes)
            + struct.pack(f"<{len(self.shape)}Q", *self.shape) + struct.pack("<IQ", self.kind, self.offset)
        )  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """A file. `counts` are those of tensors and entries that it says, where they are lies."""

    entries: tuple[Entry, ...]
    tensors: tuple[Info, ...]
    data: bytes
    counts: tuple[int, int] | None = None
    magic: bytes = b"GGUF"
    version: int = 3

    def dump(self):
        counts = self.counts or (len(self.tensors), len(self.entries))
        begin = self.magic + struct.pack("<IQQ", self.version, *counts)
        begin += b"".join(part.dump() for part in (*self.entries, *self.tensors))
        return begin + bytes(-len(begin) % 32) + self.data

    def entry(self, key):
        """The index of the entry under a key that ends so."""
        return next(index for index, entry in enumerate(self.entries) if entry.key.endswith(key))


def parse(content):
    """The parts of a good file."""
    tensors, entries = struct.unpack_from("<QQ", content, 8)
    reader = _Reader(content, 24)
    said = tuple(reader.entry() for _ in range(entries))
    infos = tuple(reader.info() for _ in range(tensors))
    return Parts(said, infos, content[-(-reader.at // 32) * 32 :])


@dataclass
class _Reader:
    content: bytes
    at: int
    spans: list = field(default_factory=list)

    def take(self, count):
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, kind):
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0]

    def entry(self):
        key, kind = self.take(self.number("Q")), self.number("I")
        begin = self.at
        self.skip(kind)
        return Entry(key, kind, self.content[begin : self.at])

    def skip(self, kind):
        if kind == STRING:
            self.take(self.number("Q"))
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            for _ in range(count if inner in (STRING, ARRAY) else 0):
                self.skip(inner)
            self.take(_SIZES.get(inner, 0) * count)
        else:
            self.take(_SIZES[kind])

    def info(self):
        name = self.take(self.number("Q"))
        shape = tuple(self.number("Q") for _ in range(self.number("I")))
        return Info(name, shape, self.number("I"), self.number("Q"))


# -- Lies -----------------------------------------------------------------------------------------------------------------


def _changed(sequence, index, **fields):
    return (*sequence[:index], replace(sequence[index], **fields), *sequence[index + 1 :])


def _packed(value):
    """A number, text or list as a kind and its bytes."""
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
            return STRING, struct.pack("<Q", len(value)) + value
        case list():
            kinds = [_packed(item) for item in value] or [(U32, b"")]
            return ARRAY, struct.pack("<IQ", kinds[0][0], len(value)) + b"".join(packed for _, packed in kinds)
    raise TypeError(value)


def said(parts, key, value):
    """The same file with another value under a key that is there."""
    kind, packed = _packed(value)
    return replace(parts, entries=_changed(parts.entries, parts.entry(key), kind=kind, value=packed))


def _cut(draw, parts):
    content = parts.dump()
    # All but the padding behind the last tensor is needed.
    return content[: draw(st.integers(0, len(content) - 33))]


def _counts(draw, parts):
    true = (len(parts.tensors), len(parts.entries))
    which, by = draw(st.integers(0, 1)), draw(st.sampled_from([-2, -1, 1, 2, *BIG]))
    counts = list(true)
    counts[which] = min(true[which] + by, 2**64 - 1)
    return replace(parts, counts=tuple(counts))


def _beginning(draw, parts):
    if draw(st.booleans()):
        return replace(parts, magic=draw(st.sampled_from([b"GGML", b"FUGG", b"\0\0\0\0", b"gguf", b"GGUE"])))
    return replace(parts, version=draw(st.sampled_from([0, 1, 4, 3 << 24, 2**32 - 1])))


def _key(draw, parts):
    index = draw(st.integers(0, len(parts.entries) - 1))
    if draw(st.booleans()):
        return replace(parts, entries=_changed(parts.entries, index, key_length=draw(st.sampled_from(BIG))))
    if draw(st.booleans()):
        return replace(parts, entries=_changed(parts.entries, index, key=draw(st.sampled_from(_NOT_UTF8))))
    return replace(parts, entries=(*parts.entries, parts.entries[index]))


def _value_length(draw, parts):
    """Of a text, or of a list, more than there is."""
    index = draw(st.sampled_from([i for i, entry in enumerate(parts.entries) if entry.kind in (STRING, ARRAY)]))
    entry, big = parts.entries[index], struct.pack("<Q", draw(st.sampled_from(BIG)))
    if entry.kind == STRING:
        return replace(parts, entries=_changed(parts.entries, index, value=big + entry.value[8:]))
    inner = draw(st.sampled_from([None, *_SIZES, STRING, ARRAY]))
    kind = entry.value[:4] if inner is None else struct.pack("<I", inner)
    return replace(parts, entries=_changed(parts.entries, index, value=kind + big + entry.value[12:]))


def _value_kind(draw, parts):
    index, kind = draw(st.integers(0, len(parts.entries) - 1)), draw(st.sampled_from([13, 14, 255, 2**31, 2**32 - 1]))
    if parts.entries[index].kind == ARRAY and draw(st.booleans()):
        value = struct.pack("<I", kind) + parts.entries[index].value[4:]
        return replace(parts, entries=_changed(parts.entries, index, value=value))
    return replace(parts, entries=_changed(parts.entries, index, kind=kind))


def _nested(draw, parts):
    depth = draw(st.sampled_from([5, 6, 64, 1000, 20_000]))
    value = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)
    return replace(parts, entries=(*parts.entries, Entry(b"deep", ARRAY, value)))


def _not_text(draw, parts):
    wrong = draw(st.sampled_from(_NOT_UTF8))
    if draw(st.booleans()):
        return replace(parts, entries=(*parts.entries, Entry(b"general.name", *_packed(wrong))))
    return said(parts, b"ggml.tokens", [b"a", wrong])


def _name(draw, parts):
    index = draw(st.integers(0, len(parts.tensors) - 1))
    match draw(st.sampled_from(["length", "utf-8", "twice", "missing", "another", "other's"])):
        case "length":
            return replace(parts, tensors=_changed(parts.tensors, index, name_length=draw(st.sampled_from(BIG))))
        case "utf-8":
            return replace(parts, tensors=_changed(parts.tensors, index, name=draw(st.sampled_from(_NOT_UTF8))))
        case "twice":
            return replace(parts, tensors=(*parts.tensors, parts.tensors[index]))
        case "missing":
            assume(parts.tensors[index].name != b"output.weight")  # the head of such a file is its embedding
            return replace(parts, tensors=parts.tensors[:index] + parts.tensors[index + 1 :])
        case "another":
            return replace(parts, tensors=_changed(parts.tensors, index, name=draw(st.sampled_from(_WORDS))))
    names = [b"blk.0.ffn_gate_exps.weight", b"blk.7.attn_q.weight", b"rope_freqs.weight", b"blk.0.ssm_a", b"blk.0.attn_q.bias"]
    return replace(parts, tensors=_changed(parts.tensors, index, name=draw(st.sampled_from(names))))


def _shape(draw, parts):
    index = draw(st.integers(0, len(parts.tensors) - 1))
    shape = list(parts.tensors[index].shape)
    match draw(st.sampled_from(["axes", "zero", "huge", "overflows", "experts"])):
        case "axes":
            return replace(
                parts, tensors=_changed(parts.tensors, index, axes=draw(st.sampled_from([0, 5, 9, 2**31, 2**32 - 1])))
            )
        case "zero":
            shape[draw(st.integers(0, len(shape) - 1))] = 0
        case "huge":
            shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from(BIG))
        case "overflows":
            shape = draw(
                st.sampled_from([[2**32] * 2, [2**33, 2**31], [2**22] * 3, [2**16] * 4, [2**63, 2], [2**24, 2**24 - 1]])
            )
        case "experts":
            shape = [1, 1, draw(st.sampled_from([2**24, 2**40, 2**47]))]
            name = draw(st.sampled_from([b"blk.0.ffn_gate_exps.weight", b"blk.1.ffn_down_exps.weight"]))
            kind = draw(st.sampled_from([0, 8, 99]))
            return replace(parts, tensors=(*parts.tensors, Info(name, tuple(shape), kind, 0)))
    return replace(parts, tensors=_changed(parts.tensors, index, shape=tuple(shape)))


def _place(draw, parts):
    """Where a tensor lies: on another, between two alignments, or beyond the end."""
    index = draw(st.integers(0, len(parts.tensors) - 1))
    other = parts.tensors[draw(st.integers(1, len(parts.tensors) - 1)) - len(parts.tensors) + index]
    wrong = [
        other.offset,
        other.offset + 32 if other.offset else 2**40,
        *BIG,
        *(parts.tensors[index].offset + by for by in (1, 4, 31)),
    ]
    if draw(st.booleans()):
        return replace(parts, tensors=_changed(parts.tensors, index, offset=draw(st.sampled_from(wrong[2:]))))
    return replace(parts, tensors=_changed(parts.tensors, index, offset=other.offset))


def _kind(draw, parts):
    index = draw(st.integers(0, len(parts.tensors) - 1))
    kind = draw(st.sampled_from([4, 5, 24, 25, 26, 27, 28, 31, 36, 99, 2**16, 2**31, 2**32 - 1]))
    return replace(parts, tensors=_changed(parts.tensors, index, kind=kind))


def _alignment(draw, parts):
    value = draw(st.sampled_from([0, 3, 33, -1, 2**31, 2**63, 0.5, float("nan"), b"32", [32], 2**21]))
    return replace(parts, entries=(*parts.entries, Entry(b"general.alignment", *_packed(value))))


def _vocabulary(draw, parts):
    index = parts.entry(b"ggml.tokens")
    count = struct.unpack_from("<Q", parts.entries[index].value, 4)[0]
    tokens = [b"t%d" % number for number in range(count)]
    match draw(st.sampled_from(["few", "many", "none", "numbers", "kinds", "id", "long", "same"])):
        case "few":
            return said(parts, b"ggml.tokens", tokens[: draw(st.integers(1, count - 1))])
        case "many":
            return said(parts, b"ggml.tokens", [*tokens, *tokens[: draw(st.integers(1, 9))]])
        case "none":
            return said(parts, b"ggml.tokens", [])
        case "numbers":
            return said(parts, b"ggml.tokens", [0] * count)
        case "kinds":
            return said(parts, b"ggml.token_type", [1] * draw(st.sampled_from([0, 1, count - 1, count + 1])))
        case "id":
            wrong = draw(st.sampled_from([count, -1, 2**31 - 1, 2**32 - 1, 0.5, float("nan"), b"0", [0]]))
            kind, value = _packed(wrong)
            return replace(parts, entries=_changed(parts.entries, parts.entry(b"eos_token_id"), kind=kind, value=value))
        case "long":
            return said(parts, b"ggml.tokens", [b"x" * 2**20, *tokens[1:]])
    return said(parts, b"ggml.tokens", [b"same"] * count)


_NEEDED = (
    b".embedding_length", b".block_count", b".feed_forward_length", b".attention.head_count", b".attention.head_count_kv",
    b".attention.key_length", b".context_length", b".layer_norm_rms_epsilon", b".rope.freq_base",
)  # fmt: skip
_REAL = (b".layer_norm_rms_epsilon", b".rope.freq_base")
_NO_NUMBERS = [
    float("nan"),
    float("inf"),
    float("-inf"),
    -1,
    -(2**31),
    0,
    2**31 - 1,
    2**32 - 1,
    2**63,
    2**64 - 1,
    b"7",
    [7],
    [],
]


def _hyperparameter(draw, parts):
    there = [key for key in _NEEDED if any(entry.key.endswith(key) for entry in parts.entries)]
    key, wrong = draw(st.sampled_from(there)), draw(st.sampled_from(_NO_NUMBERS))
    # Of a real number, one that is far too large is a number all the same.
    assume(not (key in _REAL and isinstance(wrong, int) and wrong > 0))
    return said(parts, key, wrong)


MUST_BE_REFUSED = (
    _cut, _counts, _beginning, _key, _value_length, _value_kind, _nested, _not_text, _name, _shape, _place, _kind, _alignment,
    _vocabulary, _hyperparameter,
)  # fmt: skip


@st.composite
def lying(draw, parts, among=MUST_BE_REFUSED):
    """A file with one lie in it that no reader can take: (which, its bytes)."""
    lie = draw(st.sampled_from(among))
    wrong = lie(draw, parts)
    return lie.__name__.strip("_"), Content(wrong if isinstance(wrong, bytes) else wrong.dump())


@st.composite
def odd(draw, parts):
    """A file that may be taken or refused: entries of any value, numbers of tensors of any bits."""
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.sampled_from(["entry", "data", "remove", "add"])):
            case "entry":
                index = draw(st.integers(0, len(parts.entries) - 1))
                value = draw(
                    st.sampled_from([*_NO_NUMBERS, 1, 2, 4, 0.5, True, b"", b"llama", *_WORDS, [1] * 300, [b"a"] * 300])
                )
                kind, packed = _packed(value)
                parts = replace(parts, entries=_changed(parts.entries, index, kind=kind, value=packed))
            case "data":
                at = draw(st.integers(0, len(parts.data) - 5))
                bits = draw(st.sampled_from([b"\xff" * 4, b"\0\0\xc0\x7f", b"\0\x7c\0\xfc", bytes(4), b"\0\0\x80\x7f"]))
                parts = replace(parts, data=parts.data[:at] + bits + parts.data[at + 4 :])
            case "remove" if len(parts.entries) > 1:
                index = draw(st.integers(0, len(parts.entries) - 1))
                parts = replace(parts, entries=parts.entries[:index] + parts.entries[index + 1 :])
            case "add":
                key = draw(st.sampled_from([
                    b"qwen3.rope.scaling.type", b"qwen3.rope.scaling.factor", b"qwen3.attention.sliding_window",
                    b"qwen3.expert_count", b"qwen3.attention.value_length", b"qwen3.rope.dimension_count", b"split.count",
                    b"general.sampling.temp", b"general.sampling.top_k", b"tokenizer.ggml.add_bos_token", b"x",
                    b"tokenizer.chat_template",
                ]))  # fmt: skip
                value = draw(st.sampled_from([*_NO_NUMBERS, 1, 2, 0.5, True, b"linear", b"yarn", b"{{", *_WORDS]))
                parts = replace(parts, entries=(*parts.entries, Entry(key, *_packed(value))))
    return Content(parts.dump())
