"""Long contexts: what a decode step costs as the cache fills, a chunked prefill at the far end, and the memory of it all.

    python -m haarkv.benchmarks.long_context --model random:14b --layers 2 --kv tq4 bf16 --out FILE

The history is random K and V of a normed head's scale, quantized as any other: computing it would take hours. All that comes
after it is really run. A model with fewer positions is extended by YaRN. JSON lines come out, two for each KV format:

    steps    a step at each of the contexts, in turns in one process: attention, paging, and all else
    memory   at the longest context, in a process of its own: a prefill of its last tokens in chunks, some steps, and the
             resident memory beside what `tq info --context` says

With `--out`, lines go to a file as well; a line that is there already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.benchmarks.report import machine
from haarkv.engine.generation import prefill_in_chunks
from haarkv.engine.memory import needed
from haarkv.engine.plans import plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderConfig
from haarkv.models.catalog import DTYPES, load_model, read_config
from haarkv.models.rope import RopeTable, extended
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, blocks_for
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.memory import hand_back
from haarkv.tq_ops.table import OpTable, with_ops

_FILL = 4096
_STATUS = Path("/proc/self/status")
_FORGET_PEAK = Path("/proc/self/clear_refs"), "5"


@dataclass(frozen=True)
class Request:
    """What is measured; a line of the results says it again.

    Attributes:
        model, dtype, layers, executor: as in `engine.loading.load`.
        kv: one KV format, or `k=NAME,v=NAME`.
        contexts: tokens that are stored before the steps.
        prefill: of the longest context, so many last tokens are computed.
        steps: decode steps that count, at each context.
        threads: 1 measures the CPU time of the one thread, more measure wall time.
    """

    model: str
    layers: int | None
    dtype: str
    executor: str
    kv: str
    contexts: tuple[int, ...]
    prefill: int
    steps: int
    threads: int

    @property
    def longest(self) -> int:
        """The longest context."""
        return max(self.contexts)

    @property
    def config(self) -> DecoderConfig:
        """Of the model, extended if its positions are too few."""
        return extended(read_config(self.model, self.layers), self.longest + self.steps + 1)

    def clock(self) -> Callable[[], float]:
        """What tells the time, in seconds."""
        return time.thread_time if self.threads == 1 else time.perf_counter


class Case:
    """One sequence in a cache of its own.

    Args:
        context: tokens that are to be stored before the steps.
        computed: the last ones of them, which are left to compute.
    """

    def __init__(self, request: Request, executor: Executor, context: int, computed: int = 0) -> None:
        config = request.config
        blocks = blocks_for(context + request.steps + 1)
        self.request, self.executor, self.clock = request, executor, request.clock()
        self.cache = PagedKVCache(
            plan_for(KVSpec(request.kv), config), num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            num_blocks=blocks, num_rows=1,
        )  # fmt: skip
        self.paging = PagedSequences(blocks, self.cache.block_size, num_rows=1)
        self.sequence, self.context = self.paging.add(), context
        self._fill(context - computed)

    @torch.inference_mode()
    def _fill(self, tokens: int) -> None:
        """Store random K and V, the same in every layer."""
        ops, config, draw = self.executor.ops, self.executor.config, torch.Generator().manual_seed(0)
        assert ops is not None, "`loaded` takes executors that run op by op"
        most = self.cache.most_new_tokens or _FILL
        for begin in range(0, tokens, most):
            batch = self.paging.batch([self.sequence], [min(most, tokens - begin)])
            shape = (len(batch.positions), config.num_kv_heads, config.head_dim)
            k, v = (torch.empty(shape, dtype=torch.bfloat16).normal_(generator=draw) for _ in "kv")
            for layer in range(config.num_layers):
                ops.store_kv(k, v, self.cache, layer, batch)

    def prefill(self, tokens: int) -> float:
        """Seconds that the next tokens take, in chunks."""
        ids = [i % self.executor.config.vocab_size for i in range(tokens)]
        began = self.clock()
        prefill_in_chunks(self.executor, [ids], [self.sequence], self.paging, self.cache)
        return self.clock() - began

    def step(self) -> dict[str, float]:
        """Milliseconds of a decode step, and of its parts."""
        spent, clock = {"attention": 0.0}, self.clock

        def timed(ops: OpTable) -> OpTable:
            def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Any, softmax_scale: float) -> Tensor:
                began = clock()
                out = ops.paged_attention(q, cache, layer, batch, softmax_scale)
                spent["attention"] += clock() - began
                return out

            return with_ops(ops, {"paged_attention": paged_attention})

        executor = self.executor.over(timed)
        assert executor is not None, "`loaded` takes executors that run op by op"
        token, began = torch.tensor([1]), clock()
        batch = self.paging.batch([self.sequence], [1])
        paged = clock()
        executor.decode(token, batch, self.cache).argmax(-1).tolist()
        ended = clock()
        found = {"step": ended - began, "attention": spent["attention"], "paging": paged - began}
        found["rest"] = ended - paged - spent["attention"]
        return {name: 1e3 * seconds for name, seconds in found.items()}


def loaded(request: Request) -> Executor:
    """The executor of a request.

    Raises:
        InputError: what it names is not there, does not fit together, or does not run op by op on the host.
    """
    torch.set_num_threads(request.threads)
    config = request.config
    plan = plan_for(KVSpec(request.kv), config)
    model = load_model(request.model, request.dtype, request.layers)
    model = replace(model, config=config, rope=RopeTable(config))
    executor = catalog.create(request.executor, model, plan, None)
    if executor.ops is None or executor.device.type != "cpu":
        raise InputError(f"executor {request.executor} does not run op by op on the host; choose cpu or reference")
    if reason := executor.supports(config, plan):
        raise InputError(f"executor {request.executor} cannot run {request.kv}: {reason}")
    return executor


# -- The two lines ---------------------------------------------------------------------------------------------------------


def steps_line(request: Request, executor: Executor, on_turn: Callable[[str], object] = lambda _: None) -> dict[str, Any]:
    """Steps at every context, in turns; each part is a median over them.

    Returns:
        `at`: for each context its parts in ms, and the ns that attention takes a token, layer and KV head;
        `attention_ratio`: the most of those ns over the least; `rest_ratio`, `paging_ms_apart`: of the longest context against
        the shortest.
    """
    cases = []
    for context in request.contexts:
        on_turn(f"filling {context:,} tokens, {request.kv}")
        cases.append(Case(request, executor, context))
    times: dict[int, list[dict[str, float]]] = {case.context: [] for case in cases}
    for turn in range(request.steps + 1):
        on_turn(f"step {turn} of {request.steps}, {request.kv}")
        for case in cases:
            found = case.step()
            if turn:  # the first call of a cache prepares it
                times[case.context].append(found)
    rows = []
    for context, taken in times.items():
        row = {f"{name}_ms": statistics.median(step[name] for step in taken) for name in taken[0]}
        heads = request.config.num_layers * request.config.num_kv_heads
        rows.append({"context": context, **row, "attention_ns_per_vector": 1e6 * row["attention_ms"] / context / heads})
    each = [row["attention_ns_per_vector"] for row in rows]
    first, last = (pick(rows, key=lambda row: row["context"]) for pick in (min, max))
    return {
        "at": rows, "attention_ratio": max(each) / min(each), "rest_ratio": last["rest_ms"] / first["rest_ms"],
        "paging_ms_apart": last["paging_ms"] - first["paging_ms"],
    }  # fmt: skip


def memory_line(request: Request) -> dict[str, Any]:
    """The longest context in this process: prefill at its end, steps, and memory. The process must be new.

    Returns:
        `predicted_bytes` of `engine.memory.needed`; `resident_bytes` after the steps, less those before the model was loaded,
        and their `memory_ratio`; `untrimmed_bytes` with what malloc keeps for later; `prompt_bytes`, the most that the process
        grew by while the prompt was computed, after a first token; and `peak_bytes`, the most of all, with code and loading.
    """
    torch.set_num_threads(request.threads)
    before, with_code, context = _memory("RssAnon"), _memory("VmRSS"), request.longest
    executor = loaded(request)
    case = Case(request, executor, context, request.prefill)
    Case(request, executor, 1, 1).prefill(1)  # weights are mapped now, and tables are made
    loading, held = _memory("VmHWM"), _memory("VmRSS")
    path, text = _FORGET_PEAK
    path.write_text(text, encoding="ascii")
    prefill_s = case.prefill(request.prefill)
    prompt = _memory("VmHWM") - held
    step_ms = [case.step()["step"] for _ in range(request.steps + 1)][1:]
    peak = max(loading, _memory("VmHWM")) - with_code
    untrimmed = _memory("RssAnon") - before
    hand_back()
    resident = _memory("RssAnon") - before
    weights = DTYPES[request.dtype].itemsize
    predicted = needed(request.config, case.cache.plan, context + request.steps + 1, number_bytes=weights)
    return {
        "context": context, "prefill_s": prefill_s, "step_ms": statistics.median(step_ms),
        "predicted_bytes": predicted.total, "weight_bytes": predicted.weights, "kv_bytes": predicted.kv,
        "cache_bytes": case.cache.nbytes, "resident_bytes": resident, "memory_ratio": resident / predicted.total,
        "untrimmed_bytes": untrimmed, "prompt_bytes": prompt, "peak_bytes": peak,
    }  # fmt: skip


def _memory(name: str) -> int:
    """Bytes of this process, as Linux calls them: RssAnon are those that no file backs."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(
    requests: Sequence[Request], known: Sequence[dict[str, Any]] = (), on_turn: Callable[[str], object] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Every line that is not known yet.

    Args:
        requests: of one model.
        known: lines of earlier runs.
    Raises:
        InputError: as `loaded`; or this machine does not tell a process's memory.
    """
    if not _STATUS.exists():
        raise InputError(f"{_STATUS} is not there: the memory of a process is measured on Linux alone")
    for request in requests:
        plan_for(KVSpec(request.kv), request.config)
    executor: Executor | None = None
    for request in requests:
        if (begun := _begun("steps", request, known)) is not None:
            executor = executor or loaded(request)
            yield begun | steps_line(request, executor, on_turn)
    executor = None  # what follows needs the memory
    for request in requests:
        if (begun := _begun("memory", request, known)) is not None:
            on_turn(f"{request.longest:,} tokens, {request.kv}, in a process of its own")
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                yield begun | process.submit(memory_line, request).result()


def _begun(line: str, request: Request, known: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """A line with what it will measure; None if it is known."""
    begun = {"line": line, **json.loads(json.dumps(asdict(request)))}
    return None if any(begun.items() <= found.items() for found in known) else begun


# -- The command -----------------------------------------------------------------------------------------------------------


def _known(path: Path | None) -> list[dict[str, Any]]:
    """Lines of a results file; the end of one that was cut off is none."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def _append(path: Path, text: str) -> None:
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + text + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:14b")
    parser.add_argument("--layers", type=int, help="of random:SIZE, how many")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--executor", default="cpu")
    parser.add_argument("--kv", nargs="+", default=["tq4"], help="KV formats")
    parser.add_argument("--contexts", default="16384,65536,200000", help="tokens stored, separated by commas")
    parser.add_argument("--prefill", type=int, default=4096, help="last tokens of the longest context that are computed")
    parser.add_argument("--steps", type=int, default=7, help="decode steps that count, at each context")
    parser.add_argument("--threads", type=int, default=1, help="1 measures CPU time, more wall time")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, to go on with if it is there")
    args = parser.parse_args(argv)
    try:
        contexts = tuple(int(part) for part in args.contexts.split(","))
    except ValueError:
        parser.error("--contexts takes numbers separated by commas")
    if min(args.prefill, args.steps, args.threads, *contexts) < 1 or args.prefill >= max(contexts):
        parser.error("--contexts, --steps, --threads and --prefill count from 1, and a part of the context is computed")
    requests = [
        Request(args.model, args.layers, args.dtype, args.executor, kv, contexts, args.prefill, args.steps, args.threads)
        for kv in args.kv
    ]

    def on_turn(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        for line in measure(requests, _known(args.out), on_turn):
            text = json.dumps(line | {"machine": machine()})
            print(text, flush=True)
            if args.out:
                _append(args.out, text)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
