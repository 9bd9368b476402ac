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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from haarkv.benchmarks.filled_cache import Case, Request, loaded
from haarkv.benchmarks.report import machine
from haarkv.engine.plans import needed, plan_for
from haarkv.executors.base import Executor
from haarkv.models.catalog import DTYPES
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.memory import hand_back

_STATUS = Path("/proc/self/status")
_FORGET_PEAK = Path("/proc/self/clear_refs"), "5"


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
        heads = request.config.num_layers * request.config.heads.num_kv_heads
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
        `predicted_bytes` of `engine.plans.needed`; `resident_bytes` after the steps, less those before the model was loaded,
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
