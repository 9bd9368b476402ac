"""Long contexts: the memory of a process that holds one, a chunked prefill at its far end, and the steps behind it.

    python -m lab.bench long-context --model random:14b --layers 2 --kv tq4 --contexts 200000 --threads 1

The history is random K and V of a normed head's scale, quantized as any other: computing it would take hours. All that comes
after it is really run. A model with fewer positions is extended by YaRN. Each format and context has a process of its own:
the last tokens as a prompt in chunks, some steps, and the resident memory beside what `tq info --context` says.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from haarkv.benchmarks.cases import CPU, Case, as_rows, new_cache, random_kv
from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import OnTurn
from haarkv.engine.generation import prefill_in_chunks
from haarkv.engine.plans import needed, plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor, verify
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, read_config, weights_of
from haarkv.models.config import Attention, Layer, ModelConfig
from haarkv.models.rope import YarnScaling, yarn_attention_factor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.memory import hand_back
from haarkv.tq_ops.table import OpTable

_STATUS = Path("/proc/self/status")
_FORGET_PEAK = Path("/proc/self/clear_refs"), "5"
_FILL = 4096
_COLUMNS = ("KV", "context", "prefill s", "step ms", "predicted MiB", "resident MiB", "ratio", "prompt MiB", "peak MiB")


@dataclass(frozen=True)
class Request:
    """What is measured.

    Attributes:
        model, dtype, layers, executor: as in `engine.loading.load`.
        kv: one KV format, or `k=NAME,v=NAME`.
        context: tokens that are stored before the steps; the last `prefill` of them are computed.
        steps: decode steps that count.
        threads: 1 measures the CPU time of the one thread, more measure wall time.
    """

    model: str
    layers: int | None
    dtype: str
    executor: str
    kv: str
    context: int
    prefill: int
    steps: int
    threads: int

    @property
    def config(self) -> ModelConfig:
        """Of the model, extended if its positions are too few."""
        return extended(read_config(self.model, self.layers), self.context + self.steps + 1)

    @property
    def plan(self) -> KVPlan:
        """Of the cache."""
        return plan_for(KVSpec(self.kv), self.config)


def extended(config: ModelConfig, positions: int) -> ModelConfig:
    """The same model with room for so many positions, by YaRN from those it has; itself if it has them.

    Layers with a sliding window never look further than that, and stay as they are.

    Raises:
        InputError: a layer is scaled already.
    """
    trained = config.max_position_embeddings
    if positions <= trained:
        return config
    factor = positions / trained
    scaling = YarnScaling(factor, trained, yarn_attention_factor(factor))

    def stretched(layer: Layer) -> Layer:
        mixer = layer.mixer
        if not isinstance(mixer, Attention) or mixer.window is not None:
            return layer
        if mixer.rope.scaling is not None:
            raise InputError(f"the model's {trained:,} positions are scaled already, and {positions:,} are asked for")
        return replace(layer, mixer=replace(mixer, rope=replace(mixer.rope, scaling=scaling)))

    return replace(config, layers=tuple(map(stretched, config.layers)), max_position_embeddings=positions)


class Held:
    """One sequence in a cache of its own: tokens of a context are random, but for the last, which are left to compute."""

    def __init__(self, request: Request, executor: Executor, context: int, computed: int) -> None:
        self.executor, self.clock = executor, time.thread_time if request.threads == 1 else time.perf_counter
        self.cache, self.paging = new_cache(request.plan, request.config, context + request.steps + 1)
        self.sequence = self.paging.add()
        self._fill(context - computed)

    @torch.inference_mode()
    def _fill(self, tokens: int) -> None:
        ops, most = cast(OpTable, self.executor.ops), self.cache.most_new_tokens or _FILL
        for begin in range(0, tokens, most):
            count = min(most, tokens - begin)
            batch = self.paging.batch([self.sequence], [count])
            k, v = map(as_rows, random_kv(self.executor.config, Case(1, count), CPU))
            for layer in range(self.executor.config.num_layers):
                ops.store_kv(k, v, self.cache, layer, batch)

    def prefill(self, tokens: int) -> float:
        """Seconds that the next tokens take, in chunks."""
        ids = [i % self.executor.config.vocab_size for i in range(tokens)]
        began = self.clock()
        prefill_in_chunks(self.executor, [ids], [self.sequence], self.paging, self.cache)
        return self.clock() - began

    def step(self) -> float:
        """Milliseconds of a decode step."""
        began = self.clock()
        batch = self.paging.batch([self.sequence], [1])
        verify(self.executor, torch.tensor([1]), batch, self.cache).argmax(-1).tolist()
        return 1e3 * (self.clock() - began)


def loaded(request: Request) -> Executor:
    """The executor of a request; one that is not there, does not fit, or does not run op by op on the host is refused."""
    config, plan = request.config, request.plan
    model = DecoderModel.of(config, load_model(request.model, request.dtype, request.layers).weights)
    name = catalog.select(request.executor, config, [plan], dtype=request.dtype).name
    executor = catalog.create(name, model, plan, None)
    if executor.ops is None or executor.device.type != "cpu":
        raise InputError(f"executor {request.executor} does not run op by op on the host; choose cpu or reference")
    if reason := executor.supports(config, plan):
        raise InputError(f"executor {request.executor} cannot run {request.kv}: {reason}")
    return executor


def memory_row(request: Request) -> dict[str, Any]:
    """A context in this process: prefill at its end, steps, and memory. The process must be new.

    Returns:
        `predicted_bytes` of `engine.plans.needed`; `resident_bytes` after the steps, less those before the model was loaded,
        and their `memory_ratio`; `untrimmed_bytes` with what malloc keeps for later; `prompt_bytes`, the most that the process
        grew by while the prompt was computed, after a first token; and `peak_bytes`, the most of all, with code and loading.
    """
    torch.set_num_threads(request.threads)
    before, with_code = _memory("RssAnon"), _memory("VmRSS")
    executor = loaded(request)
    held = Held(request, executor, request.context, request.prefill)
    Held(request, executor, 1, 1).prefill(1)  # weights are mapped now, and tables are made
    loading, resident_before = _memory("VmHWM"), _memory("VmRSS")
    path, text = _FORGET_PEAK
    path.write_text(text, encoding="ascii")
    prefill_s = held.prefill(request.prefill)
    prompt = _memory("VmHWM") - resident_before
    step_ms = statistics.median([held.step() for _ in range(request.steps + 1)][1:])
    peak = max(loading, _memory("VmHWM")) - with_code
    untrimmed = _memory("RssAnon") - before
    hand_back()
    resident = _memory("RssAnon") - before
    room, weights = request.context + request.steps + 1, weights_of(request.model, request.config, request.dtype)
    predicted = needed(request.config, held.cache.plan, room, weights)
    return {
        "kv": request.kv, "context": request.context, "prefill_s": prefill_s, "step_ms": step_ms,
        "predicted_bytes": weights.own + predicted.kv, "weight_bytes": weights.own, "kv_bytes": predicted.kv,
        "cache_bytes": held.cache.nbytes, "resident_bytes": resident, "memory_ratio": resident / (weights.own + predicted.kv),
        "untrimmed_bytes": untrimmed, "prompt_bytes": prompt, "peak_bytes": peak,
    }  # fmt: skip


def _memory(name: str) -> int:
    """Bytes of this process, as Linux calls them: RssAnon are those that no file backs."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(requests: Sequence[Request], on_turn: OnTurn = lambda _: None) -> Iterator[dict[str, Any]]:
    """A row of each request, each in a process of its own; refused as `loaded`, and before any work what cannot be."""
    if not _STATUS.exists():
        raise InputError(f"{_STATUS} is not there: the memory of a process is measured on Linux alone")
    for request in requests:
        if request.prefill >= request.context:
            raise InputError(f"of {request.context} tokens not {request.prefill} can be computed; lower --prefill")
        _ = request.plan  # a format that is none is refused before any work
    for request in requests:
        on_turn(f"{request.context:,} tokens, {request.kv}, in a process of its own")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            yield process.submit(memory_row, request).result()


def report(requests: Sequence[Request], rows: Sequence[dict[str, Any]]) -> Report:
    """What was measured of requests that differ in format and context alone."""
    first, cells = requests[0], []
    for r in rows:
        mib = [f"{r[f'{name}_bytes'] / 2**20:,.0f}" for name in ("predicted", "resident", "prompt", "peak")]
        times = (f"{r['prefill_s']:.1f}", f"{r['step_ms']:.1f}")
        cells.append((r["kv"], f"{r['context']:,}", *times, *mib[:2], f"{r['memory_ratio']:.2f}", *mib[2:]))
    clock = "CPU time" if first.threads == 1 else "wall time"
    title = f"{first.model}, {first.config.num_layers} layers, {first.dtype}: a prompt of {first.prefill:,} tokens, {clock}"
    values = {name: getattr(first, name) for name in ("dtype", "layers", "executor", "prefill", "steps")} | {"rows": rows}
    contexts, kvs = ([*dict.fromkeys(r[name] for r in rows)] for name in ("context", "kv"))
    return Report("long_context", first.model, contexts, kvs, values, [Table(title, _COLUMNS, cells)])
