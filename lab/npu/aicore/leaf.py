"""One emitted kernel function as text, under a name that says what it does and not when it was emitted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from haarkv.tq_ops.errors import InputError
from lab.npu.aicore.toolchain import KINDS, digest

_FUNCTION = re.compile(r'extern "C" \[aicore\] void (\w+)\(')
_HASH = re.compile(r"^// funcHash: (\d+)$", re.MULTILINE)
_SCOPE = re.compile(r"TENSOR_(\w+?)_Unroll")
_COMMENT = re.compile(r"//.*")
_PREPROCESSOR = re.compile(r"^#.*\n", re.MULTILINE)
_NUMBERED_NAME = re.compile(r"\b([a-z]\w*?Tensor|sym|[A-Z]\w*TileTensor\w+?Dim\d)_(\d+)")
_TENSOR = re.compile(r"^([A-Z]\w*TileTensor\w+) (\w+)\(")
_USING = re.compile(r"^using (\w+) =")
# Of a body, what declares and does nothing.
_DECLARES = re.compile(r"^(uint64_t sym_\w+ = |using \w+ = |[A-Z]\w*TileTensor\w+ \w+\(|SUBKERNEL_PHASE\d+$)")


@dataclass(frozen=True)
class Leaf:
    """A kernel function.

    Attributes:
        file: name of its source.
        scope: the loop of the program it belongs to.
        kind: of core, `aiv` or `aic`.
        hash: PyPTO's, by which the scheduler's tasks name it.
        symbol: its name in a library.
        text: canonical; equal for equal functions of different compilations.
    """

    file: str
    scope: str
    kind: str
    hash: int
    symbol: str
    text: str

    @property
    def idle(self) -> bool:
        """Whether its body only declares: PyPTO gives a view that needs no copy a kernel function all the same."""
        body = self.text.partition("{")[2].rpartition("}")[0]
        return all(_DECLARES.match(line) for line in map(str.strip, body.splitlines()) if line)


def read_leaf(path: str, source: str) -> Leaf:
    """A leaf from an emitted source.

    Raises:
        InputError: it is no kernel function as PyPTO 0.2.0 writes them.
    """
    function, hash_match, scope = _FUNCTION.search(source), _HASH.search(source), _SCOPE.search(source)
    kind = path.removesuffix(".cpp").rpartition("_")[2]
    if not function or not hash_match or not scope or kind not in KINDS:
        raise InputError(f"{path} is no kernel function as PyPTO 0.2.0 writes them; this pypto is not supported")
    text = _canonical(source.replace(function[0], 'extern "C" void LEAF(').replace("[aicore]", ""))
    return Leaf(path.rpartition("/")[2], scope[1], kind, int(hash_match[1]), f"leaf_{digest(kind, text)}", text)


def read_leaves(sources: dict[str, str]) -> list[Leaf]:
    """All leaves among a program's sources, in the order of their names.

    Args:
        sources: path -> text, as a compilation gives them.
    """
    return [read_leaf(path, text) for path, text in sorted(sources.items()) if path.endswith(("_aiv.cpp", "_aic.cpp"))]


def distinct(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    """Symbol -> the first of the leaves that share it."""
    by_symbol: dict[str, Leaf] = {}
    for leaf in leaves:
        by_symbol.setdefault(leaf.symbol, leaf)
    return by_symbol


def _canonical(source: str) -> str:
    """Without comments and includes; names numbered, and declarations ordered, as the operations use them."""
    text = _PREPROCESSOR.sub("", _COMMENT.sub("", source))
    lines = text.splitlines(keepends=True)
    end = max((i for i, line in enumerate(lines, 1) if _TENSOR.match(line)), default=0)
    head, body = lines[:end], "".join(lines[end:])
    first_use = {name: i for i, name in enumerate(dict.fromkeys(m[0] for m in _NUMBERED_NAME.finditer(body)))}
    tensors = {match[2]: line for line in head if (match := _TENSOR.match(line))}
    usings = {match[1]: line for line in head if (match := _USING.match(line))}
    in_order = sorted(tensors, key=lambda name: first_use.get(name, len(first_use)))
    types = dict.fromkeys(match[1] for name in in_order if (match := _TENSOR.match(tensors[name])))
    rest = [line for line in head if not _TENSOR.match(line) and not _USING.match(line)]
    return _renumber("".join((*rest, *(usings[name] for name in types), *(tensors[name] for name in in_order), body)))


def _renumber(text: str) -> str:
    numbers: dict[tuple[str, str], int] = {}
    return _NUMBERED_NAME.sub(lambda m: f"{m[1]}_{numbers.setdefault((m[1], m[2]), len(numbers))}", text)
