"""Needles: does a model know again what was said once, far back, with a packed cache as often as with bf16?

    python -m haarkv.benchmarks.needles --contexts 1024,2048,4096,8192,16384 --kv bf16 tq4 --save

The haystack is held-out text. Into it go needles at even distances, each a line of three words, `KEY KEY VALUE`, drawn
from words that the text has not. At the end stands `KEY KEY` again, for each needle in turn. A needle is found if, of all
the values that were planted, the model then raises its own the most: the logits of a value are compared with those that it has
after the other keys, so that words that are likely anyhow gain nothing. Of 16 needles, chance finds one. `said` counts those
whose value is the likeliest of the whole vocabulary, which is more than a small model can.

A context beyond the model's positions is reached by YaRN. The prompt is computed once a cache, and each needle asked after it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from haarkv.benchmarks.report import emit, print_rows
from haarkv.engine.generation import prefill_in_chunks
from haarkv.engine.loading import load
from haarkv.engine.session import Session
from haarkv.models.catalog import DTYPES, path_of, read_config
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import put

_KEY_WORDS = 2


@dataclass(frozen=True)
class Needle:
    """A line of the haystack, as tokens.

    Attributes:
        key: the beginning, said again at the end.
        value: the one token that follows.
    """

    key: tuple[int, ...]
    value: int


@dataclass(frozen=True)
class Found:
    """What became of the needles of one cache.

    Attributes:
        found: needles whose value was raised the most of all that were planted.
        said: needles whose value was the likeliest token.
    """

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
    picked = draw.sample(keys, _KEY_WORDS * count)
    return [
        Needle(tuple(picked[_KEY_WORDS * i : _KEY_WORDS * (i + 1)]), value)
        for i, value in enumerate(draw.sample(values, count))
    ]


def planted(text: Sequence[int], wanted: Sequence[Needle], newline: Sequence[int]) -> list[int]:
    """A text with needles at even distances, each on a line of its own."""
    result = list(text)
    for number in reversed(range(len(wanted))):
        place = int((number + 0.5) / len(wanted) * len(text))
        result[place:place] = [*newline, *wanted[number].key, wanted[number].value, *newline]
    return result


def judged(logits: Tensor, values: Sequence[int]) -> tuple[int, int]:
    """Needles found, and needles said.

    Args:
        logits: [needles, vocab], after each key.
        values: of each needle.
    """
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
    for of in wanted:
        cache, paging = session.new_cache(1, context)
        sequence = put(stored, cache, paging, len(prompt) - 1)
        rest = [prompt[-1], *newline, *of.key]
        rows.append(prefill_in_chunks(session.executor, [rest], [sequence], paging, cache)[0].cpu())
    found, said = judged(torch.stack(rows), [of.value for of in wanted])
    return Found(kv, context, count, found, said)


def stretched(model: str, positions: int, folder: Path) -> str:
    """A model of so many positions: itself, or a folder that extends it by YaRN.

    Raises:
        InputError: it is no plain checkpoint.
    """
    config, source = read_config(model), path_of(model)
    trained = config.max_position_embeddings
    if positions <= trained:
        return model
    if source is None or not source.is_dir() or config.rope_scaling is not None:
        raise InputError(f"{model} is no plain checkpoint, which YaRN could extend")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    scaling = {"rope_type": "yarn", "factor": positions / trained, "original_max_position_embeddings": trained}
    raw["rope_parameters"] = {**scaling, "rope_theta": config.rope_theta}
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return str(folder)


def measure(
    model: str,
    contexts: Sequence[int],
    kvs: Sequence[str],
    calibration: Path | None,
    count: int,
    seeds: Sequence[int],
    dtype: str = "bfloat16",
) -> Iterator[Found]:
    """Every context with every cache, a line for each haystack."""
    learned = calibration_file.load(calibration).spec if calibration else KVSpec()
    for context in contexts:
        with tempfile.TemporaryDirectory() as folder:
            name = stretched(model, context, Path(folder) / "stretched")
            for kv in kvs:
                session = load(name, kv=replace(learned, kv=kv), dtype=dtype, allow_collapse=True)
                for seed in seeds:
                    yield ask(session, kv, context, count, seed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--contexts", default="1024,2048,4096,8192,16384", help="tokens, separated by commas")
    parser.add_argument("--kv", nargs="+", default=["bf16", "tq4"], help="KV formats")
    parser.add_argument("--calibration", type=Path, help="a file of tq calibrate, for learned formats")
    parser.add_argument("--needles", type=int, default=16, help="in each haystack")
    parser.add_argument("--haystacks", type=int, default=2, help="of each context")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--stretch", type=Path, metavar="FOLDER",
                        help="only write the model of the longest context to this folder, for tq calibrate")  # fmt: skip
    parser.add_argument("--save", action="store_true", help="append each JSON line to benchmarks/results")
    args = parser.parse_args(argv)
    try:
        contexts = [int(part) for part in args.contexts.split(",")]
    except ValueError:
        parser.error("--contexts takes numbers separated by commas")
    found: dict[tuple[str, int], list[Found]] = {}
    try:
        if args.stretch:
            print(stretched(args.model, max(contexts), args.stretch))
            return
        for row in measure(args.model, contexts, args.kv, args.calibration, args.needles, range(args.haystacks), args.dtype):
            found.setdefault((row.kv, row.context), []).append(row)
            emit("needles", {"model": args.model, "dtype": args.dtype, **vars(row)}, save=args.save)
    except InputError as error:
        parser.error(str(error))
    rows = [
        (kv, f"{context:,}", f"{sum(r.found for r in of)} of {sum(r.needles for r in of)}", f"{sum(r.said for r in of)}")
        for (kv, context), of in found.items()
    ]
    print_rows(f"{args.model}: needles, of which chance finds {args.haystacks}", ["cache", "context", "found", "said"], rows)


if __name__ == "__main__":
    main()
