"""The smallest cache whose loss on a model stays under a bound: `--kv auto`.

    text         what the model writes itself, from its start token
    coordinates  of its keys, learned from two thirds of that text
    choice       by halving the list of caches, each measured on the rest of the text beside the model's own bf16 cache

Every cache keeps the first 4 and the newest 124 tokens in BF16. Values keep a fixed rotation: they have nothing to learn, and
lose less than keys do.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from haarkv.engine.plans import plan_for
from haarkv.models.catalog import read_config
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity.evaluation import FidelityRow, Setup, evaluate, make_workload
from haarkv.validation.planning.calibrate import Subject, load_subject
from haarkv.validation.planning.own_text import write

LOSS = 0.01
"""Mean KL in nats a token that a cache may lose unless asked otherwise."""
TAIL, SINKS = 124, 4
CHOICES = (
    "k=lr2,v=tq2", "k=lr3,v=tq2", "k=lr3,v=tq3", "k=lr4,v=tq3", "k=lr4,v=tq4", "k=lr5,v=tq4", "k=lr5,v=tq5", "k=tq8,v=tq6",
    "k=tq8,v=tq8", "bf16",
)  # fmt: skip
"""From the smallest on. A bit more for keys saves more than a bit more for values."""
LEARNED_FROM, JUDGED_BY, WINDOW = 4096, 2048, 1024


@dataclass(frozen=True)
class Chosen:
    """A cache that was chosen for a model.

    Attributes:
        spec: the cache, with what was learned.
        config: of the model.
        file: the same as a calibration file keeps it.
        rows: of every cache that was measured, by size.
        row: of the chosen one.
        loss: the bound.
        seconds: of writing the text, of learning, and of measuring.
    """

    spec: KVSpec
    config: ModelConfig
    file: CalibrationFile
    rows: tuple[FidelityRow, ...]
    row: FidelityRow
    loss: float
    seconds: tuple[float, float, float]

    def __str__(self) -> str:
        row = self.row
        wrote, learned, measured = self.seconds
        return (
            f"--kv auto takes {self.spec.kv} with {TAIL} recent and {SINKS} first tokens in BF16: mean KL {row.kl_mean:.2g} "
            f"on {JUDGED_BY:,} tokens that the model wrote itself, under {self.loss:g} ({wrote:.0f} s to write, "
            f"{learned:.0f} to learn, {measured:.0f} to measure)"
        )


def choose(subject: Subject, loss: float = LOSS, on_step: Callable[[str, int], None] = lambda *_: None) -> Chosen:
    """Choose a cache for a model.

    Args:
        subject: the model.
        loss: mean KL in nats a token that it may lose.
        on_step: told what has been done, and how many tokens it took.
    Raises:
        InputError: a bound that is none.
    """
    if not loss > 0:
        raise InputError(f"--kv-loss is a mean KL in nats a token, above 0, not {loss:g}")
    times = [time.monotonic()]
    base = subject.session(KVSpec("bf16"))
    ids = write(base, LEARNED_FROM + JUDGED_BY + 1, on_step=on_step)  # the last one is only predicted
    times.append(time.monotonic())
    context = subject.config.max_position_embeddings
    windows = list(torch.split(ids[:LEARNED_FROM], min(WINDOW, context)))
    learning = subject.learn(windows, (), on_step=on_step)
    file = subject.file_of(learning, {})
    times.append(time.monotonic())
    judged = make_workload(
        ids[LEARNED_FROM:].tolist(), context, window=min(JUDGED_BY, context),
        tokens=JUDGED_BY, prompts=0,
    )  # fmt: skip
    specs, rows = [spec_of(kv, file.calibration, subject.config) for kv in CHOICES], dict[int, FidelityRow]()

    def holds(place: int) -> bool:
        spec = specs[place]
        (rows[place],) = evaluate(
            Setup(subject.model, base, {spec.kv: subject.session(spec)}, subject.fingerprint), judged, on_step=on_step
        )
        return rows[place].kl_mean <= loss

    # A larger cache loses less, and the last one nothing.
    taken = bisect_left(range(len(specs) - 1), True, key=holds)
    if taken not in rows:
        holds(taken)
    spec = specs[taken]
    times.append(time.monotonic())
    wrote, learned, measured = (b - a for a, b in pairwise(times))
    whole = replace(spec, made_for=file.shape, weights=file.fingerprint)
    return Chosen(
        whole, subject.config, file, (*(rows[place] for place in sorted(rows)),), rows[taken], loss, (wrote, learned, measured)
    )


def steps(model: str, layers: int | None = None) -> int:
    """Tokens that `on_step` is told of, at most, as a bar counts them.

    Raises:
        InputError: no such model.
    """
    written = LEARNED_FROM + JUDGED_BY
    measured = math.ceil(math.log2(len(CHOICES))) + 1
    return written + read_config(model, layers).num_layers * LEARNED_FROM + measured * JUDGED_BY


def spec_of(kv: str, calibration: Calibration, config: ModelConfig) -> KVSpec:
    """A cache of `CHOICES` as a spec: tail and sinks as the model's context has room for them."""
    tail = min(TAIL, config.max_position_embeddings)
    spec = KVSpec(kv, tail, SINKS, calibration=calibration if "lr" in kv else None)
    plan_for(spec, config)
    return spec


def choose_for(model: str, *, loss: float = LOSS, on_step: Callable[[str, int], None] = lambda *_: None, **how: Any) -> Chosen:
    """Load a model and choose its cache.

    Args:
        model, how: as `calibrate.load_subject` takes them.
        loss, on_step: as in `choose`.
    """
    return choose(load_subject(model, **how), loss, on_step)
