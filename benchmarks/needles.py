"""Needles: does a model know again what was said once, far back, with a packed cache as often as with bf16?

    tq bench needles --contexts 1024,2048,4096,8192,16384 --kv bf16,tq4 --save

The haystack is held-out text. Into it go needles at even distances, each a line of three words, `KEY KEY VALUE`, drawn
from words that the text has not. At the end stands `KEY KEY` again, for each needle in turn. A needle is found if, of all
the values that were planted, the model then raises its own the most: the logits of a value are compared with those that it has
after the other keys, so that words that are likely anyhow gain nothing. Of 16 needles, chance finds one. `said` counts those
whose value is the likeliest of the whole vocabulary, which is more than a small model can.

A context beyond the model's positions is reached by YaRN. The prompt is computed once a cache, and each needle asked after it.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.benchmarks.cases import prefill
from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import OnTurn
from haarkv.engine.loading import load
from haarkv.engine.session import Session
from haarkv.models.catalog import path_of, read_config
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import put

_KEY_WORDS = 2


class Needle(NamedTuple):
    """A line of the haystack, as tokens: the beginning, said again at the end, and the one token that follows."""

    key: tuple[int, ...]
    value: int


class Found(NamedTuple):
    """What became of the needles of one cache: how many were found, and how many said."""

    kv: str
    context: int
    needles: int
    found: int
    said: int


def needles(session: Session, text: Sequence[int], count: int, draw: random.Random) -> list[Needle]:
    """So many needles of words that a text has not, no value twice."""
    absent = sorted(set(range(session.config.vocab_size)) - set(text))
    words = [(token, session.tokenizer.decode([token])) for token in absent]
    words = [(token, word) for token, word in words if len(word.strip()) > 2 and word.strip().isalpha()]
    keys, values = ([token for token, word in words if word.startswith(" ") == apart] for apart in (False, True))
    if len(values) < count or len(keys) < _KEY_WORDS * count:
        raise InputError(f"the tokenizer has too few words that the text has not for {count} needles")
    picked = iter(draw.sample(keys, _KEY_WORDS * count))
    return [Needle(tuple(islice(picked, _KEY_WORDS)), value) for value in draw.sample(values, count)]


def planted(text: Sequence[int], wanted: Sequence[Needle], newline: Sequence[int]) -> list[int]:
    """A text with needles at even distances, each on a line of its own."""
    result = list(text)
    for number in reversed(range(len(wanted))):
        place = int((number + 0.5) / len(wanted) * len(text))
        result[place:place] = [*newline, *wanted[number].key, wanted[number].value, *newline]
    return result


def judged(logits: Tensor, values: Sequence[int]) -> tuple[int, int]:
    """Needles found, and needles said, from logits [needles, vocab] after each key and the value of each."""
    of_values = logits[:, list(values)].double()
    raised = of_values - of_values.mean(0, keepdim=True)
    own = torch.arange(len(values))
    return int((raised.argmax(1) == own).sum()), int((logits.argmax(1) == torch.tensor(values)).sum())


def ask(session: Session, kv: str, context: int, count: int, seed: int) -> Found:
    """Plant needles in a context, and ask for each."""
    draw, newline = random.Random(f"{seed} {context}"), session.tokenizer.encode("\n")
    texts = [token for text in held_out_texts().values() for token in session.tokenizer.encode(text)]
    line = len(newline) * 2 + _KEY_WORDS + 1
    room = context - (count + 1) * line
    if not 0 < room < len(texts):
        raise InputError(f"a context of {context} tokens cannot be filled; take one of {(count + 1) * line} … {len(texts)}")
    begin = draw.randrange(len(texts) - room)
    text = texts[begin : begin + room]
    wanted = needles(session, text, count, draw)
    prompt = planted(text, wanted, newline)
    stored = session.generate([prompt], keep=True, max_new_tokens=1, max_context=context).stored[0]
    rows = []
    for needle in wanted:
        cache, paging = session.new_cache(1, context)
        sequence = put(stored, cache, paging, len(prompt) - 1)
        rest = [prompt[-1], *newline, *needle.key]
        rows.append(prefill(session.executor, [rest], [sequence], paging, cache)[0].cpu())
    found, said = judged(torch.stack(rows), [needle.value for needle in wanted])
    return Found(kv, context, count, found, said)


def stretched(model: str, positions: int, folder: Path) -> str:
    """A model of so many positions: itself, or a folder that extends a plain checkpoint by YaRN; others are refused."""
    config, source = read_config(model), path_of(model)
    trained = config.max_position_embeddings
    if positions <= trained:
        return model
    ropes = {mixer.rope for mixer in config.attentions}
    rope = ropes.pop()
    if source is None or not source.is_dir() or ropes or rope.scaling is not None:
        raise InputError(f"{model} is no plain checkpoint, which YaRN could extend")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    scaling = {"rope_type": "yarn", "factor": positions / trained, "original_max_position_embeddings": trained}
    raw["rope_parameters"] = {**scaling, "rope_theta": rope.theta}
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return str(folder)


@dataclass(frozen=True)
class Request:
    """What is asked: needles in each haystack, haystacks of each context; a file of `tq calibrate` for learned formats."""

    model: str
    contexts: Sequence[int]
    kvs: Sequence[str]
    calibration: Path | None = None
    needles: int = 16
    haystacks: int = 2
    dtype: str = "bfloat16"


def measure(request: Request, on_turn: OnTurn = lambda _: None) -> Iterator[Found]:
    """Every context with every cache, one for each haystack."""
    learned = calibration_file.load(request.calibration).spec if request.calibration else KVSpec()
    for context in request.contexts:
        with tempfile.TemporaryDirectory() as folder:
            name = stretched(request.model, context, Path(folder) / "stretched")
            for kv in request.kvs:
                session = load(name, kv=replace(learned, kv=kv), dtype=request.dtype, allow_collapse=True)
                for seed in range(request.haystacks):
                    on_turn(f"{request.needles} needles in {context:,} tokens, {kv}")
                    yield ask(session, kv, context, request.needles, seed)


def report(request: Request, rows: Sequence[Found]) -> Report:
    """What was found, all haystacks of a context together."""
    cells = []
    for kv, context in dict.fromkeys((row.kv, row.context) for row in rows):
        mine = [row for row in rows if (row.kv, row.context) == (kv, context)]
        found = f"{sum(row.found for row in mine)} of {sum(row.needles for row in mine)}"
        cells.append((kv, f"{context:,}", found, str(sum(row.said for row in mine))))
    title = f"{request.model}: needles, of which chance finds {request.haystacks}"
    table = Table(title, ("cache", "context", "found", "said"), cells)
    values = {"dtype": request.dtype, "needles": request.needles, "rows": [row._asdict() for row in rows]}
    return Report("needles", request.model, request.contexts, request.kvs, values, [table])
