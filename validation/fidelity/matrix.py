"""Every cache on every model and text: one row each, at equal tails and sinks. `tq matrix` is its command.

The baseline's predictions of a text are computed once, and every cache is scored against them. A row stands in the results
file as soon as it is measured; a row that stands there is not measured again.

Where no token stays in BF16, groups of tokens are quantized as they come in: not even those that wait for their group are seen
in BF16. Bytes count everything, as a cache allocates them for one window.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from haarkv.engine.plans import plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models import balance as balancing
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.text import Tokenizer, load_tokenizer
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.calibration_file import calibration_of
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.table import OpTable
from haarkv.validation.fidelity.entries import OURS, Entry, Side, without_waiting
from haarkv.validation.fidelity.evaluation import (
    KEPT_LOGITS,
    Exact,
    FidelityRow,
    Workload,
    logits_after,
    make_workload,
    row_of,
    score_window,
)
from haarkv.validation.fidelity.scores import join
from haarkv.validation.fidelity.setup import weights_fingerprint
from haarkv.validation.planning.calibrate import learn_model
from haarkv.validation.planning.moments import learn_oscar

BENCHMARK = "fidelity_matrix"
LEARNED_FROM = 10_240
"""Tokens."""
_GROUP = 128
"""Windows are multiples of the longest group that a format quantizes together."""
_KEY = ("weights", "dtype", "text_sha256", "tokens", "window", "tail", "sink", "kv", "learned_sha256")
"""What tells one row from another."""
_FIGURES = tuple(key for key in FidelityRow.__dataclass_fields__ if key not in ("kv", "greedy_match"))

Row = dict[str, Any]
Key = tuple[Any, ...]


def key_of(row: Mapping[str, Any]) -> Key:
    """What two rows have in common only if they measure the same."""
    return tuple(row[name] for name in _KEY)


@dataclass(frozen=True)
class Text:
    """A text to measure by.

    Attributes:
        kind: its name in rows: prose, code, chat.
        content: of its file.
    """

    kind: str
    content: str

    @property
    def digest(self) -> str:
        """Of its UTF-8 bytes."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Beside:
    """What stays in BF16, the same for all: the newest `tail` tokens and the first `sink` ones."""

    tail: int
    sink: int


@dataclass(frozen=True)
class Task:
    """What is measured.

    Attributes:
        entries: caches.
        texts: each of a kind of its own.
        windows: lengths, each a multiple of 128.
        beside: each with every cache.
        tokens: scored of each text at most, in whole windows.
        learn: a text that formats learn from which need it; without it they are left out.
        dtype: of the model.
    """

    entries: Sequence[Entry]
    texts: Sequence[Text]
    windows: Sequence[int] = (1024,)
    beside: Sequence[Beside] = (Beside(0, 0), Beside(128, 4))
    tokens: int = 8192
    learn: Text | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if bad := [size for size in self.windows if size < _GROUP or size % _GROUP]:
            raise InputError(f"windows are multiples of {_GROUP} tokens, which some formats quantize together, not {bad[0]}")


# -- The results file ------------------------------------------------------------------------------------------------------


class Results:
    """Rows of a file, one JSON object a line. A line is written whole, so that several processes may add to one file.

    Raises:
        InputError: what the file holds is no such row.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: list[Row] = []
        try:
            text = file.read_text(encoding="utf-8") if file.exists() else ""
        except (OSError, UnicodeDecodeError):
            raise InputError(f"{file} cannot be read as rows of a matrix; name another file") from None
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = parse_json(line)
                key_of(row), [float(row[name]) for name in _FIGURES], row["label"], row["model"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"line {number} of {file} is no row of a matrix; name another file") from None
            self.rows.append(row)
        self._line_feed = "\n" * (text[-1:] not in ("", "\n"))
        self._keys = {key_of(row) for row in self.rows}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, row: Row) -> None:
        """Write one more row.

        Raises:
            InputError: the system refuses.
        """
        try:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(self._line_feed + json.dumps(row) + "\n")  # in one call of the system: it is shorter than a buffer
        except OSError as error:
            raise InputError(f"{self._file} cannot be written: {error.strerror}") from None
        self._line_feed = ""
        self.rows.append(row)
        self._keys.add(key_of(row))


# -- A model ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A model before its weights are read.

    Attributes:
        name: as the user gives it.
        config, tokenizer: its own.
        workloads: what is run, by kind of text and window.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    workloads: Mapping[tuple[str, int], Workload]

    @property
    def short(self) -> str:
        """Its name in rows: of a file or folder the last part."""
        return Path(self.name).stem if self.name.endswith(".gguf") else Path(self.name).name


def prepare(name: str, task: Task) -> Named:
    """Read what can be read without the weights.

    Raises:
        InputError: no such model, a text that is shorter than a window, or a window that is longer than the model's context.
    """
    config = read_config(name)
    tokenizer = load_tokenizer(name, config)
    workloads = {}
    for text in task.texts:
        ids = tokenizer.encode(text.content)
        for size in task.windows:
            count = min((len(ids) - 1) // size, max(1, task.tokens // size))
            if count < 1:
                raise InputError(f"text {text.kind} has {len(ids):,} tokens in {name}, too few for a window of {size:,}")
            whole = ids[: (len(ids) - 1) // size * size + 1]
            workloads[text.kind, size] = make_workload(
                whole, config.max_position_embeddings, window=size, tokens=count * size, prompts=0
            )
    return Named(name, config, tokenizer, workloads)


class Subject:
    """A model with its weights, and whoever runs it with a cache."""

    def __init__(self, named: Named, task: Task, progress: Progress | None = None) -> None:
        self._named, self._task = named, task
        # Nearly every cache is read by the fastest executor here.
        fastest = catalog.select(catalog.AUTO, named.config, [], device="cpu", dtype=task.dtype).name
        self.model = load_model(named.name, task.dtype, None, progress, keep_blocks=catalog.block_types(fastest))
        self.weights = weights_fingerprint(self.model)
        self._executors: dict[tuple[bool, str], Executor] = {}
        self._learned: dict[str, Calibration] = {}

    @cached_property
    def _balanced(self) -> DecoderModel:
        return balancing.balance(self.model).model

    @cached_property
    def base(self) -> Side:
        """With K and V in bf16."""
        return self._side(plan_for(KVSpec("bf16"), self.model.config), balanced=False)

    def side(self, entry: Entry, beside: Beside) -> Side:
        """An entry's cache on the fastest executor that reads it, else on the reference.

        Raises:
            InputError: it has no layout for this model, or needs a longer tail.
        """
        learned = self._calibration(entry) if entry.learned else None
        spec = KVSpec(entry.kv, beside.tail or None, beside.sink, calibration=learned)
        plan = plan_for(spec, self.model.config)
        return self._side(plan if beside.tail else without_waiting(plan), balanced=entry.balanced)

    def _side(self, plan: KVPlan, balanced: bool) -> Side:
        config = self.model.config
        try:
            name = catalog.select(catalog.AUTO, config, [plan], device="cpu", dtype=self._task.dtype).name
        except InputError:
            name = "reference"
        if (balanced, name) not in self._executors:
            model = self._balanced if balanced else self.model
            self._executors[balanced, name] = catalog.create(name, model, plan)
        return Side(self._named.name, config, self._executors[balanced, name], self._named.tokenizer, plan)

    @property
    def _ops(self) -> OpTable:
        """The fastest table that takes a bf16 cache."""
        return self.base.executor.ops or cast(OpTable, reference)

    def _calibration(self, entry: Entry) -> Calibration:
        """OSCAR's rotations, or the coordinates of learned keys, both from the same tokens."""
        if entry.whose not in self._learned:
            assert self._task.learn is not None
            ids, context = self._named.tokenizer.encode(self._task.learn.content), self.model.config.max_position_embeddings
            plan = make_workload(ids, context, tokens=LEARNED_FROM, prompts=0)
            windows = [plan.fed(window) for window in plan.windows]
            if entry.whose == OURS:
                learning = learn_model(self.model, self._ops, windows, ())
                self._learned[entry.whose] = calibration_of(learning.layers)
            else:
                self._learned[entry.whose] = learn_oscar(self.model, self.base, windows)
        return self._learned[entry.whose]


# -- Measuring -------------------------------------------------------------------------------------------------------------


def entries_for(named: Named, task: Task, beside: Beside) -> list[Entry]:
    """The entries that have a layout for a model, and whose tail is long enough."""
    fitting = []
    for entry in task.entries:
        if entry.learned:
            if task.learn is not None:
                fitting.append(entry)
            continue
        try:
            plan_for(KVSpec(entry.kv, beside.tail or None, beside.sink), named.config)
        except InputError:
            continue
        fitting.append(entry)
    return fitting


def tokens_of(named: Named, task: Task) -> int:
    """How many tokens all rows of a model score."""
    rows = sum(len(entries_for(named, task, beside)) for beside in task.beside)
    return rows * sum(plan.scored for plan in named.workloads.values())


def measure(
    subject: Subject,
    named: Named,
    task: Task,
    results: Results,
    about: Mapping[str, Any],
    on_step: Callable[[str, int], None] = lambda *_: None,
) -> None:
    """Add to the results every row of a model that is not among them.

    Args:
        about: machine and versions, which every row carries.
        on_step: told what has been done, and how many tokens it took.
    """
    for text in task.texts:
        for size in task.windows:
            plan = named.workloads[text.kind, size]
            exact: list[Exact] = []
            for beside in task.beside:
                for entry in entries_for(named, task, beside):
                    what = f"{named.short}, {text.kind}, windows of {size:,}, tail {beside.tail}, {entry.label}"
                    head = _head(subject, named, task, text, plan, beside, entry)
                    if key_of(head) in results:
                        on_step(what, plan.scored)
                        continue
                    exact = exact or _exact(subject, plan)
                    found = _figures(subject, plan, subject.side(entry, beside), exact, partial(on_step, what))
                    results.add({**head, **found, **about})


def _head(subject: Subject, named: Named, task: Task, text: Text, plan: Workload, beside: Beside, entry: Entry) -> Row:
    learned = task.learn.digest if entry.learned and task.learn else None
    return {
        "benchmark": BENCHMARK, "model": named.short, "weights": subject.weights, "dtype": task.dtype, "text": text.kind,
        "text_sha256": text.digest, "tokens": plan.scored, "window": plan.windows[0].length, **asdict(beside),
        "label": entry.label, "kv": entry.kv, "whose": entry.whose, "learned_sha256": learned,
        "balanced": entry.balanced,
    }  # fmt: skip


def _exact(subject: Subject, plan: Workload) -> list[Exact]:
    """The baseline's predictions of every window; as many logits are kept as `KEPT_LOGITS` allows."""
    found: list[Exact] = []
    for window in plan.windows:
        left = KEPT_LOGITS - sum(exact.nbytes for exact in found)
        found.append(Exact(subject.model, subject.base, plan.fed(window), left))
    return found


def _figures(subject: Subject, plan: Workload, side: Side, exact: Sequence[Exact], on_window: Callable[[int], None]) -> Row:
    begin, found = time.perf_counter(), []
    for window, base in zip(plan.windows, exact, strict=True):
        logits = logits_after(subject.model, side, subject.model.embed(plan.fed(window)))
        found.append(score_window(side.plan.describe(), plan, window, base, logits))
        on_window(window.length)
    row = asdict(row_of("", side, plan.windows[0].length, join(found)))
    seconds = round(time.perf_counter() - begin, 1)
    return {name: row[name] for name in _FIGURES} | {"executor": side.executor.name, "seconds": seconds}
