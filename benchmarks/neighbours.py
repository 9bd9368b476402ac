"""How much longer a decode step takes beside other work: a busy process on each core, or a second decode.

`python -m haarkv.benchmarks.neighbours --model tiny --context 1024`

A step that gets its fair share of the cores takes twice as long beside as much work as its own. The companies take turns;
figures are wall time of a step with sampling, its mean over a turn, and the ratio to the mean alone in the same round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import torch

from haarkv.benchmarks.report import emit, print_rows
from haarkv.executors.base import verify
from haarkv.engine.generation import prefill_in_chunks
from haarkv.engine.sampling import BatchSampler, Sampling
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.catalog import load_model
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KVSpec

_PROCESSES = multiprocessing.get_context("spawn")
COMPANIES = ("alone", "busy", "decode")


def decoder(model_name: str, layers: int | None, kv: str, context: int, threads: int) -> Callable[[], None]:
    """A function that runs one greedy decode step, always at the same context."""
    torch.set_num_threads(threads)
    model = load_model(model_name, "bfloat16", layers)
    config, executor = model.config, CpuExecutor(model)
    cache = PagedKVCache(
        KVSpec(kv).plan(config.num_layers), config.kv_shapes,
        num_blocks=blocks_for(context + 1),
    )  # fmt: skip
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    sequence, prompt = paging.add(), [i % config.vocab_size for i in range(context)]
    prefill_in_chunks(executor, [prompt], [sequence], paging, cache)
    batch, sampler = paging.batch([sequence], [1]), BatchSampler(Sampling(), [prompt])
    token = torch.tensor([1])

    def step() -> None:
        sampler.next(verify(executor, token, batch, cache), [0])

    return step


def _spin(core: int, ready: Event) -> None:
    os.sched_setaffinity(0, {core})
    ready.set()
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(10_000):
            pass


def _decode(model: str, layers: int | None, kv: str, context: int, threads: int, ready: Event) -> None:
    step, parent = decoder(model, layers, kv, context, threads), os.getppid()
    step()
    ready.set()
    while os.getppid() == parent:
        step()


@contextmanager
def beside(company: str, args: argparse.Namespace) -> Iterator[None]:
    """Neighbours of a kind while it is open; they are at work when it opens, and gone after it or with their parent."""
    started: list[BaseProcess] = []

    def start(run: Callable[..., None], *given: object) -> None:
        ready = _PROCESSES.Event()
        process = _PROCESSES.Process(target=run, args=(*given, ready), daemon=True)
        process.start()
        started.append(process)
        if not ready.wait(300):
            raise SystemExit(f"the neighbour ({company}) did not start")

    try:
        for core in sorted(os.sched_getaffinity(0)) if company == "busy" else ():
            start(_spin, core)
        if company == "decode":
            start(_decode, args.model, args.layers, args.kv, args.context, args.threads)
        yield
    finally:
        for process in started:
            process.terminate()
            process.join()


def mean_ms(step: Callable[[], None], seconds: float) -> float:
    """Mean wall time of a step over so many seconds, at least three steps; the first does not count."""
    step()
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds or count < 3:
        step()
        count += 1
    return 1e3 * taken / count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--layers", type=int, help="of random:SIZE, how many")
    parser.add_argument("--kv", default="tq4")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--save", action="store_true", help="append the JSON line to benchmarks/results")
    args = parser.parse_args(argv)
    step = decoder(args.model, args.layers, args.kv, args.context, args.threads)
    times: dict[str, list[float]] = {company: [] for company in COMPANIES}
    for _ in range(args.rounds):
        for company in COMPANIES:
            with beside(company, args):
                times[company].append(mean_ms(step, args.seconds))
    ratios = {c: statistics.median(a / b for a, b in zip(times[c], times["alone"], strict=True)) for c in COMPANIES}
    rows = [
        (company, f"{statistics.median(ms):.2f}", f"{min(ms):.2f} … {max(ms):.2f}", f"{ratios[company]:.2f}")
        for company, ms in times.items()
    ]
    title = f"{args.model}, {args.kv}, {args.context} tokens, {args.threads} threads, {args.rounds} rounds"
    print_rows(title, ["beside", "ms a step", "min … max", "ratio"], rows)
    settings = {name: getattr(args, name) for name in ("model", "layers", "kv", "context", "threads", "rounds", "seconds")}
    emit(
        "neighbours",
        {**settings, "ms": {c: statistics.median(ms) for c, ms in times.items()}, "ratio": ratios},
        save=args.save,
    )


if __name__ == "__main__":
    main()
