"""KL against bytes: this project's KV formats and those of others, on the same text, in one table and one figure.

python -m haarkv.validation.fidelity.peers --out FILE.jsonl --resume STEM

Two comparisons on held-out text of `tiny`:

- *alone*: windows of 1,024 tokens, and no token in BF16, not even those that wait for their group: each group is quantized as
  it comes in, and every query sees it so.
- *window*: windows of 4,096, and the same tail of 128 tokens and 4 sinks in BF16 for all; OSCAR and KVarN once more with the
  tail and the sinks of their authors.

Bytes count everything: scales, and of *window* the tokens in BF16 as a cache allocates them.

What others published was written here after their papers and code: each format's docstring says what was assumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.engine.session import Session
from haarkv.models.catalog import load_model
from haarkv.models.tiny_qwen3.corpus import held_out_texts, train_texts
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Field, KVFormat
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.calibration_file import calibration_of
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.validation.fidelity.evaluation import CHUNK, FidelityRow, Setup, evaluate, make_workload
from haarkv.validation.fidelity.partial import Partial
from haarkv.validation.fidelity.setup import load_setup, run_fingerprint
from haarkv.validation.layers.parts import new_cache
from haarkv.validation.planning.calibrate import learn_model
from haarkv.validation.planning.moments import learn_oscar


# -- Groups that are full when they come -------------------------------------------------------------------------------
class AsItComes(KVFormat):
    """A format of groups whose groups are all full when they come: what comes out of it is kept, its bytes are counted.

    So no query sees a token in BF16, and even a group's first token is read as its last one lets it be stored.
    """

    def __init__(self, of: KVFormat) -> None:
        self.of, self.name, self.purpose = of, of.name, of.purpose

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"restored": Field(torch.float32, (head_dim,))}

    def bytes_per_vector(self, head_dim: int) -> float:
        return self.of.bytes_per_vector(head_dim)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """x: [..., n, D], whole groups."""
        groups = x.bfloat16().float().reshape(*x.shape[:-2], -1, self.of.group_tokens, x.shape[-1])
        return {"restored": self.of.dequantize(self.of.quantize(groups, layer), layer).flatten(-3, -2)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["restored"]

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError("only what comes out of it is kept")


def without_waiting(plan: KVPlan) -> KVPlan:
    """The same, but for groups that are stored as they come."""

    def as_it_comes(kv_format: KVFormat) -> KVFormat:
        return kv_format if kv_format.group_tokens == 1 else AsItComes(kv_format)

    return replace(plan, layers=tuple((as_it_comes(k), as_it_comes(v)) for k, v in plan.layers), recent=None)


MODEL = "tiny"
TOKENS = 20_480
LEARNED_FROM = 10_240
SEPARATOR = "<|endoftext|>"
OURS, THEIRS = "ours", "others"


@dataclass(frozen=True)
class Entry:
    """One point of a figure.

    Attributes:
        label: in tables and in the figure.
        spec: formats, tail and sinks.
        whose: `OURS` or `THEIRS`.
        learned: whether its formats need a calibration.
    """

    label: str
    spec: KVSpec
    whose: str
    learned: bool = False


@dataclass(frozen=True)
class Comparison:
    """Caches that are compared on the same windows.

    Attributes:
        name: as in the module's text.
        window: tokens of a window.
        entries: what is compared.
    """

    name: str
    window: int
    entries: tuple[Entry, ...]


_THEIRS = {
    "KVarN k2v2": "kvarn2", "KVarN k4v2": "k=kvarn4,v=kvarn2", "KVarN k4v3": "k=kvarn4,v=kvarn3", "KVarN k4v4": "kvarn4",
    "q4_0": "q4_0", "q4_0 rotated": "q4_0_rot", "KIVI 2": "kivi2", "KIVI 4": "kivi4", "tbq4_0": "tbq4_0",
}  # fmt: skip
_ALONE = {"q8_0": "q8_0", "tq3_0": "tq3_0", "manthan3": "manthan3", "KIVI 2, groups of 128": "kivi2_g128"}
_LEARNED = {
    "lr 80/48": "k=lr80,v=lr48", "lr 96/48": "k=lr96,v=lr48", "lr 112/48": "k=lr112,v=lr48", "lr 112/64": "k=lr112,v=lr64",
    "lr 128/64": "k=lr128,v=lr64", "lr 160/96": "k=lr160,v=lr96", "lr 192/128": "k=lr192,v=lr128",
}  # fmt: skip


def comparisons() -> list[Comparison]:
    """Both, and what each compares."""

    def entries(tail: int | None, sink: int, ours: Sequence[str], theirs: Mapping[str, str]) -> list[Entry]:
        found = [Entry(kv, KVSpec(kv, tail, sink), OURS) for kv in ours]
        found += [Entry(label, KVSpec(kv, tail, sink), OURS, learned=True) for label, kv in _LEARNED.items()]
        found += [Entry(label, KVSpec(kv, tail, sink), THEIRS) for label, kv in theirs.items()]
        return [*found, Entry("OSCAR", KVSpec("oscar2", tail, sink), THEIRS, learned=True)]

    alone = entries(None, 0, ("tq2", "tq3", "tq4", "tq5", "tq6", "tq8"), _THEIRS | _ALONE)
    window = entries(128, 4, ("tq2", "tq3", "tq4", "tq5"), {k: v for k, v in _THEIRS.items() if k != "tbq4_0"})
    window += [
        Entry("OSCAR, its own window", KVSpec("oscar2", 256, 64), THEIRS, learned=True),
        Entry("KVarN k4v2, its own window", KVSpec("k=kvarn4,v=kvarn2", 127, 128), THEIRS),
    ]
    return [Comparison("alone", 1024, tuple(alone)), Comparison("window", 4096, tuple(window))]


# -- Measuring -------------------------------------------------------------------------------------------------------------


class _Side(Session):
    """A session whose caches take larger chunks: results do not depend on it, and what is stored is restored less often."""

    def new_cache(self, sequences: int, max_context: int) -> tuple[PagedKVCache, PagedSequences]:
        blocks = sequences * blocks_for(max_context)
        cache = new_cache(self.plan, self.config, blocks, num_rows=sequences, chunk=CHUNK)
        return cache, PagedSequences(cache.num_blocks, cache.block_size, num_rows=sequences)


def measure(setup: Setup, text: Sequence[int], comparison: Comparison, tokens: int, partial: Path | None) -> list[FidelityRow]:
    """One row an entry, by its label, its bytes those of the product's own cache."""
    base, config = setup.base, setup.base.config
    plan = make_workload(text, config.max_position_embeddings, window=comparison.window, tokens=tokens, prompts=0)
    sides = {}
    for entry in comparison.entries:
        kv_plan = entry.spec.plan(config.num_layers)
        kv_plan = without_waiting(kv_plan) if entry.spec.tail is None else kv_plan
        sides[entry.label] = _Side(base.name, config, base.executor, base.tokenizer, kv_plan)
    of_this, done = replace(setup, caches=sides), Partial()
    if partial:
        text_of = partial.read_text(encoding="utf-8") if partial.exists() else None
        what = {entry.label: _fingerprint(entry, sides[entry.label].plan) for entry in comparison.entries}
        done = Partial(text_of, run_fingerprint(of_this, plan), what, lambda content: _write(partial, content))
    rows = evaluate(of_this, plan, partial=done, on_step=lambda what, _: print(what, flush=True))
    return [_counted(row, sides[row.kv], comparison.window) for row in rows]


def _fingerprint(entry: Entry, plan: KVPlan) -> str:
    """What tells one cache from another of the same label."""
    return f"{plan.describe()}; {entry.spec.calibration.digest if entry.spec.calibration else ''}"


def _write(file: Path, content: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(content, encoding="utf-8")
    part.replace(file)


def _counted(row: FidelityRow, side: Session, window: int) -> FidelityRow:
    """The row with the bytes of a cache as the product allocates it for a window."""
    shapes, plan = side.config.kv_shapes, side.plan
    blocks, exact = blocks_for(window), KVSpec("bf16").plan(len(plan.layers))
    kept, exact_rings = plan.ring_bytes(shapes, blocks) + plan.kept_bytes(shapes), exact.ring_bytes(shapes, blocks)
    size, exact_size = plan.bytes_per_token(shapes) + kept / window, exact.bytes_per_token(shapes) + exact_rings / window
    return replace(row, bytes_per_token=size, bits_per_value=16 * size / exact_size)


def with_calibrations(setup: Setup, entries: Sequence[Entry], context: int) -> list[Entry]:
    """The same entries, with OSCAR's rotations or the coordinates of learned nibbles where they need them.

    Both are learned from the same part of the text that `tiny` was trained on; learned nibbles for sequences of `context`.
    """
    if not any(entry.learned for entry in entries):
        return list(entries)
    base, model = setup.base, load_model(MODEL)
    text = base.tokenizer.encode(SEPARATOR.join(train_texts()[::9]))
    plan = make_workload(text, base.config.max_position_embeddings, tokens=LEARNED_FROM, prompts=0)
    windows = [plan.fed(window) for window in plan.windows]
    k, v = zip(*learn_model(model, reference, windows, (), context=context).layers, strict=True)
    calibrations = {OURS: calibration_of(k, v, context), THEIRS: learn_oscar(model, base, windows)}
    return [replace(e, spec=replace(e.spec, calibration=calibrations[e.whose])) if e.learned else e for e in entries]


# -- What is shown ---------------------------------------------------------------------------------------------------------


_COLUMNS = {
    "bits": ("bits_per_value", ".3f"), "KL": ("kl_mean", ".3g"), "99.9 %": ("kl_p999", ".3g"), "same top": ("top1", ".2%"),
    "ΔPPL": ("ppl_delta", "+.4f"),
}  # fmt: skip


def recorded(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The latest row of every entry, by comparison."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["comparison"], {})[row["kv"]] = row
    return {name: sorted(rows.values(), key=lambda row: row["bits_per_value"]) for name, rows in found.items()}


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    print(title)
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """One table a comparison."""
    for name, of_one in rows.items():
        cells = [[row["kv"], *(f"{row[key]:{form}}" for key, form in _COLUMNS.values())] for row in of_one]
        _print_table(f"{name}: windows of {of_one[0]['window']:,}", ["cache", *_COLUMNS], cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", type=Path, metavar="STEM", help="keep partial results in STEM.alone and STEM.window")
    parser.add_argument("--only", choices=("alone", "window"), help="one comparison")
    parser.add_argument("--entries", metavar="LIST", help="labels, separated by semicolons; all unless given")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="score so many")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line for each row, or draw what it holds")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="add the rows of `tq eval --json` to --out: plans, say")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what --out holds, as SVG, and measure nothing")
    given = parser.parse_args(arguments)
    if given.plot:
        from haarkv.validation.fidelity.plot import peers_svg

        if given.out is None or not given.out.exists():
            parser.error("--plot draws what --out FILE holds, and there is no such file")
        rows_by_name = recorded(given.out)
        show(rows_by_name)
        _write(given.plot, peers_svg(rows_by_name))
        return
    if given.rows:
        if given.out is None:
            parser.error("--rows adds to --out FILE, which is not given")
        _append(given.out, evaluated(given.rows, given.tokens))
        return
    torch.set_num_threads(1)
    setup = load_setup(MODEL, ["bf16"], executor="reference")
    text = setup.base.tokenizer.encode(SEPARATOR.join(held_out_texts().values()))
    labels = given.entries.split(";") if given.entries else None
    for comparison in comparisons():
        entries = [entry for entry in comparison.entries if labels is None or entry.label in labels]
        if given.only in (None, comparison.name) and entries:
            entries = with_calibrations(setup, entries, comparison.window)
            partial = given.resume.with_name(f"{given.resume.name}.{comparison.name}") if given.resume else None
            rows = measure(setup, text, replace(comparison, entries=tuple(entries)), given.tokens, partial)
            if given.out:
                _append(given.out, [_line(comparison, e, asdict(r), given.tokens) for e, r in zip(entries, rows, strict=True)])
            show({comparison.name: [asdict(row) | {"window": comparison.window} for row in rows]})


def _line(comparison: Comparison, entry: Entry, row: Mapping[str, Any], tokens: int) -> str:
    about = {
        "benchmark": "fidelity_peers",
        "date": datetime.now(UTC).date().isoformat(),
        "model": MODEL,
        "torch": torch.__version__,
        "tokens": tokens,
    }
    return json.dumps(about | {"comparison": comparison.name, "window": comparison.window, "whose": entry.whose} | dict(row))


def _append(file: Path, lines: Sequence[str]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.writelines(line + "\n" for line in lines)


def evaluated(file: Path, tokens: int) -> list[str]:
    """Lines of what `tq eval --json` has measured, as ours.

    Raises:
        InputError: other windows than those of a comparison, another model or another number of tokens.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        same = [c for c in comparisons() if c.window == found["window"]]
        if not same or (found["model"], found["tokens"]) != (MODEL, tokens):
            raise InputError(f"{file} is not of {tokens:,} tokens of {MODEL} in windows of 1,024 or 4,096")
        return [
            _line(same[0], Entry(f"lr {row['kv']}", KVSpec(), OURS), row | {"kv": f"lr {row['kv']}"}, tokens)
            for row in found["rows"]
        ]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} holds no rows of `tq eval --json`: {error}") from None


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
