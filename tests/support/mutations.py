"""Hypothesis strategies of malformed input: JSON with wrong entries, damaged bytes, words of a command line, templates."""

import json
from copy import deepcopy

from hypothesis import strategies as st

NUMBERS = [
    0, -1, 1, 2, 7, 2**15, 10**8, 10**9, 10**11, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.5, 1e-320, 1e308,
    float("inf"), float("nan"),
]  # fmt: skip
WORDS = [
    "", " ", "a", "\0", "\n", "\ud800", "\x1b[31m", "\x1b]0;title\x07", "\u202egnp", "²", "٣", "9" * 400, "9" * 5000, "1e999",
    "-", "--", "--help", "nan", "inf", "-1", "0", "true", "null", "../x", "/", "~", "/dev/zero", "a" * 5000, "k=tq4,v=tq4",
    "k=lr3,v=tq4", "tq4", "{{", "%s", "\\", "😀",
]  # fmt: skip
SCALARS = [None, True, False, *NUMBERS, *WORDS]
CONTAINERS = [[], {}, [[]], {"": {}}, ["x"] * 300, [0] * 300, {"a": None}, [[[[[[]]]]]]]

scalars = st.sampled_from(SCALARS) | st.integers() | st.floats() | st.text(max_size=20)
values = scalars | st.sampled_from(CONTAINERS).map(deepcopy)  # edited where it lies


@st.composite
def wrong_json(draw, document, edits=3):
    """A JSON document with some entries replaced, removed or added, as text."""
    content = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, edits))):
        content = draw(_edits(content))
    return json.dumps(content)


@st.composite
def _edits(draw, content):
    keys = list(content) if isinstance(content, dict) else list(range(len(content))) if isinstance(content, list) else []
    if not keys or draw(st.integers(0, 15)) == 0:
        return draw(values)
    key = draw(st.sampled_from(keys))
    match draw(st.sampled_from(["inside", "inside", "replace", "remove", "add"])):
        case "inside":
            content[key] = draw(_edits(content[key]))
        case "replace":
            content[key] = draw(values)
        case "remove":
            del content[key]
        case "add" if isinstance(content, dict):
            content[draw(st.sampled_from(WORDS))] = draw(values)
    return content


DEEP = [b"[" * 200_000, b'{"a":' * 200_000, b"[" * 500 + b"]" * 500]


@st.composite
def damaged_bytes(draw, content, head=200):
    """Bytes with a few of them changed, most of the time among the first `head`, or another file altogether."""
    if draw(st.integers(0, 20)) == 0:
        return draw(st.sampled_from([b"", b"\0", b"\xff" * 9, b"{}", b"[]", b"null", *DEEP]) | st.binary(max_size=40))
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, min(len(data), head if draw(st.booleans()) else len(data)) - 1)))
        match draw(st.sampled_from(["flip", "flip", "cut", "insert", "remove", "repeat", "length"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "remove":
                del data[at : at + draw(st.integers(1, 40))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
            case "length":
                data[:8] = draw(st.sampled_from([0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])).to_bytes(8, "little")
    return bytes(data)


TEMPLATES = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ " + "-" * 20_000 + "1 }}",
    "{% macro a() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__.__base__.__subclasses__() | map('string') | join }}",
    "{% include '/etc/passwd' %}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ '\\ud800' }}",
    "{{ '\x1b[31m' }}{{ raise_exception('\x1b[31m\n' * 2000) }}",
    "a" * 2**20 + "a",
    "{{ lipsum(n=10 ** 7) }}",
]
"""Each would run for ever, take all memory, leave the sandbox or break the parser, if it were let."""
_PIECES = [
    "{{", "}}", "{%", "%}", "{#", "#}", "for i in messages", "endfor", "if", "endif", "set x = ", "messages", "[0]",
    ".content", "|", "'", '"', "(", ")", "~", "*", "10", "raise_exception", "-", "\n", " ", "range(9)", "x", "macro m()",
    "endmacro", "break", "é", "eos_token", ".",
]  # fmt: skip
templates = st.lists(st.sampled_from(_PIECES), max_size=25).map("".join)
