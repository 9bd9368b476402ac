"""Needles: does a model find what was said once, far back, with a packed cache as often as with bf16?

    python -m haarkv.benchmarks.needles --contexts 1024,2048,4096,8192,16384 --kv bf16 tq4

The haystack is held-out text. Into it go needles at even distances, each a line of its own, `NAME = VALUE`, with a random word
and random digits. At the end stands `NAME = ` again: found is one whose digits the model says next, greedily, all of them.
A context beyond the model's positions is reached by YaRN. The prompt is computed once a cache, and each needle asked after it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from haarkv.benchmarks.report import emit, print_rows
from haarkv.engine.session import Session, load
from haarkv.models.catalog import folder_of, read_config
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file
from haarkv.tq_ops.kv.plan import KVSpec

_LETTERS = "bcdfghjklmnpqrstvwxz"


@dataclass(frozen=True)
class Needle:
    """A line of the haystack.

    Attributes:
        depth: where it stands, from 0 to 1.
        cue: its beginning, as it is said again at the end.
        value: what follows.
    """

    depth: float
    cue: str
    value: str


@dataclass(frozen=True)
class Found:
    """What became of the needles of one context and cache.

    Attributes:
        whole: needles whose digits were all said.
        first: needles whose first digit was.
        digits: of all digits, those that were said up to the first wrong one.
    """

    kv: str
    context: int
    needles: int
    whole: int
    first: int
    digits: float


def needles(count: int, digits: int, draw: random.Random) -> list[Needle]:
    """So many needles at even distances, no two alike."""
    made = []
    for i in range(count):
        name = "".join(draw.choice(_LETTERS) + draw.choice("aeiou") for _ in range(4))
        made.append(Needle((i + 0.5) / count, f"{name} = ", "".join(draw.choice("0123456789") for _ in range(digits))))
    return made


def haystack(session: Session, wanted: Sequence[Needle], tokens: int, draw: random.Random) -> list[int]:
    """Held-out text with the needles in it, cut to so many tokens."""
    texts = list(held_out_texts().values())
    draw.shuffle(texts)
    lines = [session.tokenizer.encode("\n" + of.cue + of.value + "\n") for of in wanted]
    text: list[int] = []
    while len(text) < tokens:
        text += session.tokenizer.encode("\n".join(texts))
    text = text[: tokens - sum(map(len, lines))]
    for of, line in sorted(zip(wanted, lines, strict=True), key=lambda pair: -pair[0].depth):
        place = int(of.depth * len(text))
        text[place:place] = line
    return text


def ask(session: Session, kv: str, context: int, count: int, digits: int, seed: int) -> Found:
    """Plant needles in a context, and ask for each."""
    draw = random.Random(f"{seed} {context}")
    wanted = needles(count, digits, draw)
    longest = max(len(session.tokenizer.encode("\n" + of.cue + of.value)) for of in wanted)
    text = haystack(session, wanted, context - longest - 1, draw)
    stored = session.generate([text], keep=True, max_new_tokens=1, max_context=len(text) + 1).stored[0]
    right = []
    for of in wanted:
        # The cue without its last space, which belongs to what follows in no tokenizer with single digits.
        cue = session.tokenizer.encode("\n" + of.cue)
        said = session.generate([text + cue], stored=stored, max_new_tokens=digits).completions[0].token_ids
        told = session.tokenizer.decode(said)
        right.append(next((i for i, digit in enumerate(of.value) if told[i : i + 1] != digit), digits))
    return Found(kv, context, count, right.count(digits), sum(n > 0 for n in right), sum(right) / (count * digits))


def stretched(model: str, positions: int, folder: Path) -> str:
    """A model of so many positions: itself, or a folder that extends it by YaRN."""
    config, source = read_config(model), folder_of(model)
    if positions <= config.max_position_embeddings:
        return model
    if source is None or config.rope_scaling is not None:
        raise InputError(f"{model} is no plain checkpoint, which YaRN could extend")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    trained = config.max_position_embeddings
    scaling = {"rope_type": "yarn", "factor": positions / trained, "original_max_position_embeddings": trained}
    raw["rope_parameters"] = {**scaling, "rope_theta": config.rope_theta}
    for file in source.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return str(folder)


def measure(
    model: str, contexts: Sequence[int], kvs: Sequence[str], calibration: Path | None, count: int, digits: int, seed: int
) -> Iterator[Found]:
    """Every context with every cache."""
    for context in contexts:
        with tempfile.TemporaryDirectory() as folder:
            name = stretched(model, context, Path(folder))
            for kv in kvs:
                spec = calibration_file.load(calibration).spec if calibration else KVSpec()
                session = load(name, kv=replace(spec, kv=kv), allow_collapse=True)
                yield ask(session, kv, context, count, digits, seed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--contexts", default="1024,2048,4096,8192,16384", help="tokens, separated by commas")
    parser.add_argument("--kv", nargs="+", default=["bf16", "tq4"], help="KV formats")
    parser.add_argument("--calibration", type=Path, help="a file of tq calibrate, for learned formats")
    parser.add_argument("--needles", type=int, default=20, help="in each context")
    parser.add_argument("--digits", type=int, default=4, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="append each JSON line to benchmarks/results")
    args = parser.parse_args(argv)
    contexts = [int(part) for part in args.contexts.split(",")]
    found: list[Found] = []
    for row in measure(args.model, contexts, args.kv, args.calibration, args.needles, args.digits, args.seed):
        found.append(row)
        settings = {"model": args.model, "digits_each": args.digits, "seed": args.seed, "time": time.strftime("%H:%M")}
        emit("needles", {**settings, **vars(row)}, save=args.save)
    rows = [(f.kv, f"{f.context:,}", f"{f.whole} of {f.needles}", f"{f.first}", f"{f.digits:.2f}") for f in found]
    print_rows(f"{args.model}, {args.digits} digits", ["cache", "context", "found", "first digit", "digits"], rows)


if __name__ == "__main__":
    main()
