"""PTX text to instructions: entries, their registers by width, their parameters and arrays, and where each label stands."""

from __future__ import annotations

import re

from lab.ptx.syntax import (
    Address,
    Array,
    Entry,
    Instruction,
    Label,
    Module,
    Nowhere,
    Number,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Unknown,
    Vector,
)

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_ARRAY_DECLARATION = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(?P<space>shared|global|const|local|param)\s*(?:\.align\s+(?P<align>\d+)\s*)?"
    r"\.[busf](?P<bits>8|16|32|64)\s+(?:\.ptr\s*(?:\.\w+\s*)?(?:\.align\s+\d+\s*)?)?(?P<name>[\w$%.]+)\s*"
    r"(?P<dims>(?:\[\s*\d*\s*\])*)\s*(?:=\s*(?P<values>.*))?$",
    re.S,
)
_LABEL = re.compile(r"[A-Za-z_$%][\w$]*\s*:(?!:)")


def parse_array(text: str) -> Array | None:
    """An array or a parameter, or None for anything else."""
    if not (match := _ARRAY_DECLARATION.match(text)):
        return None
    width, count = BYTES[match["bits"]], 1
    for size in re.findall(r"\[\s*(\d*)\s*\]", match["dims"]):
        count *= int(size or 0)
    values = b""
    if match["values"]:
        for number in match["values"].strip(" \n{}").split(","):
            values += (_integer(number.strip()) % (1 << 8 * width)).to_bytes(width, "little")
    return Array(match["name"], match["space"], int(match["align"] or width), count * width, values)


def _integer(text: str) -> int:
    text = text.rstrip("U")
    if text[:2].lower() in ("0f", "0d"):  # the bits of a float
        return int(text[2:], 16)
    if re.match(r"-?0\d+$", text):
        return int(text, 8)
    return int(text, 0)


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def statements(text: str) -> list[tuple[str, int]]:
    """What ends at `;`, `:`, or is a brace of a block, with its line; sections of debug data are left out."""
    result, line, start, depth, current = [], 1, 1, 0, ""
    skipping = 0  # braces of a section that is left out
    for raw in _without_comments(text).splitlines():
        text_line = raw.strip()
        if skipping or text_line.startswith(".section"):
            brace_balance = text_line.count("{") - text_line.count("}")
            skipping = max(0, skipping - 1 + brace_balance) + 1 if skipping else 1
            # 1: before the opening brace or at depth 0.
            if skipping == 1 and "}" in text_line:
                skipping = 0
            line += 1
            continue
        if depth == 0 and not current.strip() and re.match(r"\.(loc|file|version|target|address_size|pragma)\b", text_line):
            result.append((text_line.rstrip(";"), line))
            line += 1
            continue
        for char in raw + "\n":
            if not current.strip():
                current, start = "", line
                if char in "{}":
                    result.append((char, line))
                    continue
            if char == "{":
                if depth == 0 and _opens_block(current):
                    result += [(current.strip(), start), ("{", line)]
                    current = ""
                    continue
                depth += 1
            elif char == "}":
                depth -= 1
            elif char == ";" and depth == 0:
                if current.strip():
                    result.append((current.strip(), start))
                current = ""
                continue
            current += char
            if char == ":" and depth == 0 and _LABEL.fullmatch(current.strip()):
                result.append((current.strip(), start))
                current = ""
        line += 1
    if current.strip():
        raise Unknown(f"line {start}: the text ends within {current.strip()[:60]!r}")
    return result


def _opens_block(before: str) -> bool:
    return bool(re.match(r"\s*(\.(visible|weak|extern)\s+)*\.(entry|func)\b", before))


class _Reader:
    """Reads one entry's statements."""

    def __init__(self, entry: Entry, symbols: set[str]) -> None:
        self.entry, self.symbols = entry, symbols
        self.scopes: list[dict[str, int]] = [{}]
        self.ranges: list[dict[str, tuple[int, int, int]]] = [{}]
        self.source = ""

    def declare(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()
        bits = 1 if kind == "pred" else int(re.sub(r"\D", "", kind.split("x")[0])) * (2 if kind.endswith("x2") else 1)
        for name in (part.strip() for part in names.split(",")):
            many = re.match(r"(.*)<(\d+)>$", name)
            for each in (f"{many[1]}{i}" for i in range(int(many[2]))) if many else (name,):
                self.scopes[-1][each] = len(self.entry.bits)
                self.entry.bits.append(bits)

    def register(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return Register(scope[name], self.entry.bits[scope[name]])
        return None

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text == "_":
            return Nowhere()
        if text.startswith("{"):
            return Vector(tuple(self.operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            return self.address(text[1:-1])
        if "|" in text:
            return Pair(*(self.operand(part) for part in text.split("|")))
        if register := self.register(text):
            return register
        if text == "WARP_SZ":
            return Number(32)
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return Number(int(match[1], 16), is_float=True)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Number(_integer(text))
        if text.startswith("%"):
            return Special(text)
        if text in self.symbols:
            return Symbol(text)
        if re.fullmatch(r"[\w$]+", text):
            return Label(text)
        raise Unknown(f"the operand {text!r}")

    def address(self, text: str) -> Address:
        if not (match := re.fullmatch(r"\s*([\w$%.]+)\s*(?:\+\s*(-?\w+)\s*)?", text)):
            raise Unknown(f"the address [{text}]")
        return Address(self.operand(match[1]), _integer(match[2]) if match[2] else 0)

    def instruction(self, text: str, line: int) -> None:
        guard = None
        if match := re.match(r"@(!?)([\w$%]+)\s+(.*)", text, re.S):
            register = self.register(match[2])
            if register is None:
                raise Unknown(f"line {line}: the predicate {match[2]}")
            guard, text = (register.index, match[1] == "!"), match[3]
        head, _, tail = re.sub(r"\s+", " ", text).partition(" ")
        opcode, *modifiers = head.replace("::", "__").split(".")
        operands = tuple(self.operand(part) for part in _split(tail)) if tail.strip() else ()
        instruction = Instruction(opcode, tuple(modifiers), operands, guard, line, self.source)
        self.entry.code.append(instruction)

    def read(self, body: list[tuple[str, int]]) -> None:
        for text, line in body:
            try:
                self.statement(text, line)
            except Unknown as error:
                raise Unknown(f"{self.entry.name}, line {line}: {error}") from None

    def statement(self, text: str, line: int) -> None:
        if text == "{":
            self.scopes.append({})
        elif text == "}":
            self.scopes.pop()
        elif text.endswith(":"):
            self.entry.labels[text[:-1].strip()] = len(self.entry.code)
        elif re.match(r"\.loc\s", text):
            number = text.split()
            self.source = f"{number[1]}:{number[2]}"
        elif text.startswith(".reg"):
            self.declare(text)
        elif text.startswith((".pragma", ".file")):
            pass
        elif text.startswith("."):
            array = parse_array(text)
            if array is None:
                raise Unknown(f"the directive {text[:60]!r}")
            self.entry.arrays.append(array)
            self.symbols.add(array.name)
        else:
            self.instruction(text, line)


def _split(text: str) -> list[str]:
    """At commas outside braces and brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)*\.entry\s+([\w$]+)\s*(?:\((.*?)\))?(.*)$", re.S)


def parse(text: str) -> Module:
    """The module of a PTX text.

    Raises:
        Unknown: a directive or an operand that is not known here.
    """
    module, lines = Module(), statements(text)
    place = 0
    while place < len(lines):
        statement, line = lines[place]
        place += 1
        if re.match(r"\.(target|version|address_size|file|loc|pragma)\b", statement):
            continue
        if head := _ENTRY.match(statement):
            end = _end_of_block(lines, place)
            module.entries[head[1]] = _entry(head[1], head[2] or "", module, lines[place + 1 : end])
            place = end + 1
        elif array := parse_array(statement):
            module.arrays.append(array)
        else:
            raise Unknown(f"line {line}: {statement[:60]!r}")
    return module


def _end_of_block(lines: list[tuple[str, int]], place: int) -> int:
    depth = 0
    while True:
        depth += (lines[place][0] == "{") - (lines[place][0] == "}")
        if depth == 0:
            return place
        place += 1


def _entry(name: str, params: str, module: Module, body: list[tuple[str, int]]) -> Entry:
    entry = Entry(name)
    for text in (part.strip() for part in params.split(",") if part.strip()):
        param = parse_array(text)
        if param is None:
            raise Unknown(f"the parameter {text!r} of {name}")
        entry.params.append(param)
    symbols = {array.name for array in (*module.arrays, *entry.params)}
    _Reader(entry, symbols).read(body)
    return entry
