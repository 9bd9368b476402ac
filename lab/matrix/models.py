"""What a matrix measures: texts, windows, what stays in BF16, models, and their executors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from torch import Tensor

from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models import balance as balancing
from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.text import Tokenizer, load_tokenizer
from haarkv.models.weights import fingerprint
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.calibration_file import make_calibration
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.table import OpTable
from haarkv.validation.fidelity.evaluation import CHUNK, Workload, make_workload
from haarkv.validation.planning import auto, calibrate
from haarkv.validation.planning.search import choices_within
from lab.matrix.entries import DEFAULT, Entry, without_waiting
from lab.rivals import oscar

LEARNED_FROM = 10_240
"""Tokens of the text that formats learn from."""
_GROUP = 128
"""Windows are multiples of the longest group that a format quantizes together."""


class _LargeChunks(Session):
    """A session whose caches take larger chunks: the same results, with fewer restorations of what is stored."""

    def new_cache(self, sequences: int, max_context: int) -> tuple[PagedKVCache, PagedSequences]:
        self.plan.require_context(max_context)
        return new_cache(
            self.config, self.plan, sequences=sequences, tokens=max_context, device=self.executor.device, chunk=CHUNK
        )


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
class ResidualSizes:
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
        residuals: each with every cache.
        tokens: scored of each text at most, in whole windows.
        learn: a text that formats learn from which need it; without it they are left out.
        dtype: of the model.
    """

    entries: Sequence[Entry]
    texts: Sequence[Text]
    windows: Sequence[int] = (1024,)
    residuals: Sequence[ResidualSizes] = (ResidualSizes(0, 0), ResidualSizes(128, 4))
    tokens: int = 8192
    learn: Text | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if bad := [size for size in self.windows if size < _GROUP or size % _GROUP]:
            raise InputError(f"windows are multiples of {_GROUP} tokens, which some formats quantize together, not {bad[0]}")


# -- A model ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
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


def prepare(name: str, task: Task) -> ModelInfo:
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
            workloads[text.kind, size] = make_workload(whole, config.max_position_embeddings, window=size, tokens=count * size)
    return ModelInfo(name, config, tokenizer, workloads)


class Subject:
    """A model with its weights, and what runs it with a cache."""

    def __init__(self, model_info: ModelInfo, task: Task, progress: Progress | None = None) -> None:
        self._model_info, self._task = model_info, task
        # Nearly every cache is read by the fastest executor here.
        fastest = catalog.select(catalog.AUTO, model_info.config, [], device="cpu", dtype=task.dtype).name
        self.model = load_model(model_info.name, task.dtype, None, progress, keep_blocks=catalog.info(fastest).block_types())
        self.weights = fingerprint(self.model.weights.named_tensors())
        self._executors: dict[tuple[bool, str], Executor] = {}

    @cached_property
    def _balanced_model(self) -> DecoderModel:
        return balancing.balance(self.model)[0]

    @cached_property
    def base(self) -> Session:
        """With K and V in bf16."""
        return self._side(plan_for(KVSpec("bf16"), self.model.config), balanced=False)

    def side(self, entry: Entry, residual: ResidualSizes) -> Session:
        """An entry's cache on the fastest executor that reads it, else on the reference.

        Raises:
            InputError: it has no layout for this model, or needs a longer tail.
        """
        if entry.kv == DEFAULT:
            return self._side(plan_for(self._choice.spec, self.model.config), balanced=False)
        if entry.budget is not None:
            plan = replace(self._by_layer(entry.budget), recent=residual.tail or None, sink=residual.sink)
        else:
            if entry.kv == oscar.NAME:
                formats.BY_NAME[oscar.NAME] = self._oscar
            calibration = self._coordinates if formats.needs_calibration(entry.kv) else None
            spec = KVSpec(entry.kv, residual.tail or None, residual.sink, calibration=calibration)
            plan = plan_for(spec, self.model.config)
        return self._side(plan if residual.tail else without_waiting(plan), balanced=entry.balanced)

    def _side(self, plan: KVPlan, balanced: bool) -> Session:
        config = self.model.config
        try:
            name = catalog.select(catalog.AUTO, config, [plan], device="cpu", dtype=self._task.dtype).name
        except InputError:
            name = "reference"
        if (balanced, name) not in self._executors:
            model = self._balanced_model if balanced else self.model
            self._executors[balanced, name] = catalog.create(name, model, plan)
        executor = self._executors[balanced, name]
        return _LargeChunks(self._model_info.name, config, executor, self._model_info.tokenizer, plan)

    @property
    def _ops(self) -> OpTable:
        """The fastest table that takes a bf16 cache."""
        return self.base.executor.ops or cast(OpTable, reference)

    @cached_property
    def _choice(self) -> auto.CacheChoice:
        """The cache that the model gets where none is named."""
        base, info = self.base, self._model_info
        return auto.choose(calibrate.Subject(info.name, self.model, base.executor, self._ops, info.tokenizer, self.weights))

    @cached_property
    def _learned_from(self) -> Sequence[Tensor]:
        """Windows of the text that formats learn from."""
        assert self._task.learn is not None
        ids, context = self._model_info.tokenizer.encode(self._task.learn.content), self.model.config.max_position_embeddings
        plan = make_workload(ids, context, tokens=LEARNED_FROM)
        return [plan.fed(window) for window in plan.windows]

    @cached_property
    def _coordinates(self) -> Calibration:
        """Coordinates of learned keys."""
        return make_calibration(calibrate.learn_model(self.model, self._ops, self._learned_from, ()).layers)

    @cached_property
    def _oscar(self) -> tuple[oscar.Oscar, oscar.Oscar]:
        return oscar.learn_oscar(self.model, self.base, self._learned_from)

    def _by_layer(self, budget: float) -> KVPlan:
        """The formats of each layer that lose least within a budget of bits a value, without what stays in BF16.

        Raises:
            InputError: a budget that no formats meet.
        """
        config, file = self.model.config, self._choice.file
        (allocation,) = choices_within(
            self._choice.costs, config, budget=budget, tails=(0,), context=min(auto.CONTEXT, config.max_position_embeddings),
            calibration=file.calibration if file else None,
        )  # fmt: skip
        return allocation.plan
