"""Where a decode step's time goes on `cpu`: weights, KV, the ops between them, the head, sampling, and Python around it all.

    python -m haarkv.benchmarks.step_profile --model random:0.6b --contexts 1024,16384 --threads 1

The kernels keep the time of the layers by part; the rest is timed from outside. With one thread, times are its CPU time, so
that other work on the machine counts little; with more they are wall time. Bytes are those of the weights and of the cache.
How fast memory is read is what torch takes to find the largest number of a large tensor, in the same run, on as many threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.benchmarks.caches import filled, random_kv
from haarkv.benchmarks.decode_cost import Case
from haarkv.benchmarks.plans import plan_of
from haarkv.benchmarks.report import emit, print_rows
from haarkv.engine.sampling import BatchSampler, Sampling
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.large_pages import LargePages
from haarkv.tq_ops.cpu.library import PARTS
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.errors import InputError

_AROUND = ("head", "sampling", "between")
_READ_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Profile:
    """One context.

    Attributes:
        step: milliseconds of a whole step, nobody looking on.
        parts: milliseconds of each part of a step: of `PARTS`, all layers together; the head with its norm; sampling; and
            `between`, which is Python, the table of blocks, the embedding and the look for what is not finite.
        bytes: that a step reads in those parts which read much.
    """

    context: int
    step: float
    parts: dict[str, float]
    bytes: dict[str, int]


def clock(threads: int) -> Callable[[], float]:
    """What tells the time, in seconds."""
    return time.thread_time if threads == 1 else time.perf_counter


def profile(executor: CpuExecutor, model: DecoderModel, kv: str, context: int, steps: int) -> Profile:
    """Medians over so many steps, which take turns with as many that nobody looks on at.

    Raises:
        InputError: the executor runs this model's layers op by op, or it has no room for the tokens and all steps.
    """
    whole, ops, config = executor.whole, executor.ops, model.config
    if whole is None or not isinstance(ops, CpuOps):
        raise InputError("only dense models on the compiled kernels tell where their time goes")
    room = config.max_position_embeddings - 2 * (steps + 1)
    if context > room:
        raise InputError(f"{context:,} tokens and the steps behind them are more than the model's limit; {room:,} fit")
    case, plan = Case(1, context), plan_of(kv, config)
    k, v = random_kv(config, case, torch.device("cpu"))
    cache, paging = filled(plan, config, case, k, v, 2 * (steps + 1))
    now, sampler = clock(torch.get_num_threads()), BatchSampler(Sampling(), [[0]])
    token, spent = torch.tensor([1]), torch.zeros(len(PARTS), dtype=torch.int64)
    watched = _TimedHead(ops, now)

    def step(by: CpuExecutor) -> tuple[float, float]:
        began = now()
        logits = by.decode(token, paging.batch([0], [1]), cache)
        decoded = now()
        sampler.next(logits, [0])
        return decoded - began, now() - decoded

    alone: list[float] = []
    seen: dict[str, list[float]] = {name: [] for name in (*PARTS, *_AROUND)}
    for turn in range(steps + 1):
        plain = sum(step(executor))
        whole.spent, executor.ops, watched.seconds = spent.zero_(), watched, 0.0
        try:
            decoded, sampled = step(executor)
        finally:
            whole.spent, executor.ops = None, ops
        if turn == 0:  # warms up
            continue
        alone.append(plain)
        layers = [ns / 1e9 for ns in spent.tolist()]
        between = decoded - sum(layers) - watched.seconds
        for name, seconds in zip(seen, (*layers, watched.seconds, sampled, between), strict=True):
            seen[name].append(seconds)
    head = model.weights.lm_head.nbytes
    projections = sum(t.nbytes for layer in model.weights.layers for _, _, t in layer.named() if t.ndim > 1)
    return Profile(
        context, 1e3 * statistics.median(alone), {name: 1e3 * statistics.median(times) for name, times in seen.items()},
        {
            "projections": projections, "head": head,
            "attention": context * int(plan.bytes_per_token(config.heads.num_kv_heads, config.heads.head_dim)),
        },
    )  # fmt: skip


class _TimedHead(CpuOps):
    """An op table as it is, which adds up the time of `linear`: the head's, since the layers are one call."""

    def __init__(self, ops: CpuOps, now: Callable[[], float]) -> None:
        vars(self).update(vars(ops))
        self._now, self.seconds = now, 0.0

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        began = self._now()
        y = super().linear(x, weight)
        self.seconds += self._now() - began
        return y


def read_speed(threads: int, repeats: int = 3) -> float:
    """Bytes a second that torch reads where it looks for the largest number, at best."""
    numbers = LargePages().empty((_READ_BYTES // 4,), torch.int32).fill_(1)
    now, best = clock(threads), float("inf")
    for _ in range(repeats + 1):
        began = now()
        numbers.max()
        best = min(best, now() - began)
    return _READ_BYTES / best


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:0.6b")
    parser.add_argument("--layers", type=int, help="of random:SIZE, how many")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv", default="tq4")
    parser.add_argument("--contexts", default="1024,16384", help="tokens stored, separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="1 measures CPU time, more wall time")
    parser.add_argument("--isa", help="instruction set of the kernels")
    parser.add_argument("--steps", type=int, default=15, help="that count, at each context")
    parser.add_argument("--save", action="store_true", help="append the JSON line to benchmarks/results")
    args = parser.parse_args(argv)
    try:
        contexts = [int(part) for part in args.contexts.split(",")]
    except ValueError:
        parser.error("--contexts takes numbers separated by commas")
    if min(args.threads, args.steps, *contexts) < 1:
        parser.error("--contexts, --threads and --steps count from 1")
    torch.set_num_threads(args.threads)
    try:
        model = load_model(args.model, args.dtype, args.layers)
        executor = CpuExecutor(model, args.isa)
        found = [profile(executor, model, args.kv, context, args.steps) for context in contexts]
    except InputError as error:
        parser.error(str(error))
    read = read_speed(args.threads)
    _print(args, found, read, model.config.num_layers)
    settings = {name: getattr(args, name) for name in ("model", "layers", "dtype", "kv", "threads", "isa", "steps")}
    rows = [vars(of) for of in found]
    emit("step_profile", {**settings, "read_bytes_per_s": read, "contexts": rows}, save=args.save)


def _print(args: argparse.Namespace, found: Sequence[Profile], read: float, layers: int) -> None:
    time_of = "CPU time" if args.threads == 1 else "wall time"
    for of in found:
        total = sum(of.parts.values())
        rows = [
            (
                name, f"{ms:.2f}", f"{ms / total:.1%}",
                f"{of.bytes[name] / ms / 1e6:.1f}" if name in of.bytes else "",
                f"{ms * read / of.bytes[name] / 1e3:.2f}" if name in of.bytes else "",
            )
            for name, ms in of.parts.items()
        ]  # fmt: skip
        rows.append(("together", f"{total:.2f}", "", "", ""))
        rows.append(("a step alone", f"{of.step:.2f}", "", "", ""))
        title = (
            f"{args.model}, {layers} layers, {args.kv}, {of.context:,} tokens, {args.threads} threads, {time_of}; "
            f"reads {read / 1e9:.1f} GB/s"
        )
        print_rows(title, ["part", "ms", "share", "GB/s", "times its read"], rows)


if __name__ == "__main__":
    main()
