"""What multiplying with a GGUF file's blocks changes, ours and llama.cpp's.

    python -m lab.bench weights --model FILE.gguf --text TEXT

The yardstick is the reference with every block restored to FP32 and K and V in FP32. Each side is fed the same tokens of a
text, and its next-token distributions are compared with the yardstick's: KL(yardstick || side) in nats. A side rounds
activations where it multiplies with blocks, and K and V where it stores them. So that the two can be told apart, the restored
weights are also measured with K and V in BF16, and the blocks with K and V in FP32. llama.cpp is fed token by token, as it
decodes.

With `--other` it is told what quantising costs: other files of the same model are measured by this one, restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import OnTurn
from haarkv.executors.base import Executor, verify
from haarkv.executors.catalog import create, info
from haarkv.models.base import new_cache
from haarkv.models.catalog import load_model
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from lab.bench import gguf_file
from lab.bench.llama_process import LlamaProcess, parse_kinds, require

_CHUNK, _ROWS = 128, 16
"""Tokens that a side is fed at a time, and rows of logits that are compared at a time."""
YARDSTICK = "restored, kv fp32"
Logits = Iterator[Tensor]
"""[n, vocab] fp32 after each token, piece by piece."""


@dataclass(frozen=True)
class WeightsRow:
    """One side beside the yardstick.

    Attributes:
        side: whose products, and what K and V are kept in.
        kl_mean, kl_median, kl_largest: nats.
        top1: share of positions at which both like the same token best.
    nbytes: of the file that the side multiplies with, where the yardstick is another.
    """

    side: str
    kl_mean: float
    kl_median: float
    kl_largest: float
    top1: float
    nbytes: int | None = None


def measure(
    model: str,
    text: str,
    tokens: int,
    peer: bool,
    threads: int,
    progress: Progress | None = None,
    on_turn: OnTurn = lambda _: None,
) -> list[WeightsRow]:
    """Every side's row.

    Args:
        model: a GGUF file.
        text: of which the first tokens are fed.
        peer: llama.cpp as well.
    Raises:
        InputError: no GGUF file, one without blocks that are multiplied as they are, or a text that is too short.
    """
    if (file := gguf_file.source_file(model)) is None:
        raise InputError(f"{model} is no GGUF file, and only these hold quantised blocks; give --model FILE.gguf")
    if peer:
        require()
    block_types = info("cpu").block_types()
    blocks, rounded_model = (
        load_model(model, "float32", progress=progress, keep_blocks=block_types, activation_bits=bits) for bits in (16, 8)
    )
    dense_model = load_model(model, "float32", progress=progress)
    if blocks.weights.nbytes == dense_model.weights.nbytes:
        raise InputError(f"{model} holds no blocks that cpu multiplies with as they are: {', '.join(block_types)}")
    ids = _tokens(model, dense_model.config, text, tokens)
    layers = dense_model.config.num_layers
    plans = {kv: KVSpec(kv).plan(layers) for kv in ("fp32", "bf16")}
    reference = create("reference", dense_model, plans["fp32"])
    fast = create("cpu", blocks, plans["fp32"])

    def ours(executor: Executor, kv: str) -> Callable[[], Logits]:
        return lambda: _ours(executor, kv, ids)

    sides = {
        "restored, kv bf16": ours(reference, "bf16"), "ours, blocks, kv fp32": ours(fast, "fp32"),
        "ours, blocks, kv bf16": ours(fast, "bf16"),
        "ours, blocks, 8-bit activations, kv fp32": ours(create("cpu", rounded_model, plans["fp32"]), "fp32"),
    }  # fmt: skip
    with ExitStack() as stack:
        if peer:
            sides |= _llama_logits(file, ids, threads, stack)
        on_turn(YARDSTICK)
        right = list(_ours(reference, "fp32", ids))
        rows = []
        for name, run in sides.items():
            on_turn(name)
            rows.append(_row(name, right, run()))
    return rows


def measure_beside(
    model: str, others: Sequence[str], text: str, tokens: int, progress: Progress | None = None,
    on_turn: OnTurn = lambda _: None,
) -> list[WeightsRow]:  # fmt: skip
    """A row of each of other files of a model: what their weights change, by this one's, with K and V in FP32.

    Args:
        model: as a rule its full weights. They are restored, as are those of `others` that `cpu` does not multiply with.
        text, tokens: as of `measure`; the tokens are `model`'s.
    Raises:
        InputError: a file that is none, or of another shape; a text that is too short.
    """
    files = [gguf_file.source_file(other) for other in others]
    if missing := next((other for other, file in zip(others, files, strict=True) if file is None), None):
        raise InputError(f"{missing} is no GGUF file, and --other takes these")
    dense_model = load_model(model, "float32", progress=progress)
    ids = _tokens(model, dense_model.config, text, tokens)
    plan = KVSpec("fp32").plan(dense_model.config.num_layers)
    on_turn(model)
    right = list(_ours(create("reference", dense_model, plan), "fp32", ids))
    rows = []
    for file in filter(None, files):
        on_turn(file.name)
        other = load_model(file, "float32", progress=progress, keep_blocks=info("cpu").block_types())
        if (other.config.layers, other.config.vocab_size) != (dense_model.config.layers, dense_model.config.vocab_size):
            raise InputError(f"{file} is another model than {model}: their shapes differ")
        row = _row(file.name, right, _ours(create("cpu", other, plan), "fp32", ids))
        rows.append(replace(row, nbytes=file.stat().st_size))
    return rows


def _tokens(model: str, config: ModelConfig, text: str, tokens: int) -> list[int]:
    ids = load_tokenizer(model, config).encode(text)[:tokens]
    if len(ids) < tokens:
        raise InputError(f"the text has {len(ids):,} tokens, fewer than {tokens:,}; give a longer one, or lower --tokens")
    return ids


def _ours(executor: Executor, kv: str, ids: Sequence[int]) -> Logits:
    plan = KVSpec(kv).plan(executor.config.num_layers)
    cache, paging = new_cache(executor.config, plan, sequences=1, tokens=len(ids))
    sequence = paging.add()
    for begin in range(0, len(ids), _CHUNK):
        piece = torch.tensor(ids[begin : begin + _CHUNK])
        yield verify(executor, piece, paging.batch([sequence], [len(piece)]), cache)


def _llama_logits(file: Path, ids: Sequence[int], threads: int, stack: ExitStack) -> dict[str, Callable[[], Logits]]:
    process = LlamaProcess(file, threads)
    stack.callback(process.close)

    def run(kind: Any) -> Logits:
        process.call("open", kind, len(ids))
        for begin in range(0, len(ids), _CHUNK):
            yield torch.from_numpy(process.call("logits", kind, ids[begin : begin + _CHUNK], not begin))
        process.call("shut", kind)

    kinds = [next(iter(parse_kinds(name))) for name in ("f32:plain", "f16:flash")]
    return {f"llama.cpp, blocks, kv {kind.type}": partial(run, kind) for kind in kinds}


def _row(name: str, right: Sequence[Tensor], logits: Logits) -> WeightsRow:
    divergences: list[Tensor] = []
    same = 0
    for ours, theirs in zip(_by_rows(iter(right)), _by_rows(logits), strict=True):
        a, b = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        divergences.append((a.exp() * (a - b)).sum(-1))
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
    kl = torch.cat(divergences).clamp(min=0.0).sort().values
    if not torch.isfinite(kl).all():
        raise InputError(f"{name} gives logits that are not finite")
    return WeightsRow(name, math.fsum(kl.tolist()) / len(kl), float(kl.median()), float(kl[-1]), same / len(kl))


def _by_rows(pieces: Logits) -> Logits:
    for piece in pieces:
        yield from torch.split(piece, _ROWS)


def report(model: str, text: str, tokens: int, rows: Sequence[WeightsRow], *, several_files: bool = False) -> Report:
    """What was measured; `several_files`: others beside the model."""
    cells = [
        (
            row.side, f"{row.kl_mean:.3g}", f"{row.kl_median:.3g}", f"{row.kl_largest:.3g}", f"{row.top1:.2%}",
            *([f"{row.nbytes / 1e6:,.1f}"] if row.nbytes else []),
        )
        for row in rows
    ]  # fmt: skip
    title = f"{model}: {tokens:,} tokens of {text}, KL from the restored FP32 weights with K and V in FP32"
    values = {"text": text, "rows": [asdict(row) for row in rows]}
    columns = ("file" if several_files else "side", "KL mean", "median", "largest", "same top", *["MB"] * several_files)
    kv = ["fp32"] if several_files else ["fp32", "bf16", "f16"]
    return Report("weights", model, [tokens], kv, values, [Table(title, columns, cells)], packages=("llama-cpp-python",))
