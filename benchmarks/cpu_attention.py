"""Decode attention over packed codes on a CPU beside torch's SDPA over BF16 K and V, and the floor of the machine.

`python -m haarkv.benchmarks.cpu_attention`

One layer of Qwen3-14B, one new token of one sequence. SDPA gets the query heads of a KV head as rows of one head, in which
form it is several times as fast as with `enable_gqa`, and the best of the forms in `sdpa_forms` counts. The sides take turns;
before its turn each rests until the threads of the one before have gone to sleep, and runs once uncounted. Successive runs
read different K and V, so that what is measured comes from memory as it does in a model of many layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks.report import emit, print_rows
from haarkv.benchmarks.timing import measure_machine
from haarkv.models.qwen3_14b.config import QWEN3_14B
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, blocks_for
from haarkv.tq_ops.kv.plan import KVSpec

HEADS, KV_HEADS, DIM = QWEN3_14B.num_heads, QWEN3_14B.num_kv_heads, QWEN3_14B.head_dim
GROUP, SCALE = HEADS // KV_HEADS, DIM**-0.5
# Layers' worth of K and V that take turns: together far more than a processor's cache, where a short context allows it.
COLD_BYTES = 128 * 2**20
# Threads of OpenMP spin for up to 20 ms after a loop.
REST_S = 0.03
RUNS = 5
Call = Callable[[int], object]


def packed_bytes(context: int) -> int:
    """Bytes of codes and scales that attention must read, K and V."""
    return context * KV_HEADS * 2 * (DIM // 2 + 2)


def multiply_adds(context: int) -> int:
    """Multiply-adds of Q·K and P·V; look-ups and the softmax come on top."""
    return context * HEADS * 2 * DIM


def copies(context: int) -> int:
    """How many layers take turns."""
    return max(1, min(64, COLD_BYTES // packed_bytes(context)))


def packed(context: int, ops: CpuOps, kv: str) -> tuple[Call, Call]:
    """Attention over, and appending to, caches of random codes."""
    layers = copies(context)
    cache = PagedKVCache(
        KVSpec(kv).plan(layers), num_kv_heads=KV_HEADS, head_dim=DIM, num_blocks=blocks_for(context), num_rows=1
    )
    for layer in range(layers):
        for fields in (cache.k_fields(layer), cache.v_fields(layer)):
            fields["codes"].random_(0, 256)
            fields["scale"].fill_(DIM**0.5)  # vectors as long as those of numbers of size 1
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    sequence = paging.add()
    if context > 1:
        paging.batch([sequence], [context - 1])
    batch: Batch = paging.batch([sequence], [1])
    for layer in range(layers):
        ops.paged_attention(torch.zeros(1, HEADS, DIM), cache, layer, batch, SCALE)  # its rotation is made on first use
    q = torch.randn(1, HEADS, DIM, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, KV_HEADS, DIM)

    def attend(turn: int) -> Tensor:
        return ops.paged_attention(q, cache, turn % layers, batch, SCALE)

    def append(turn: int) -> None:
        ops.store_kv(k, v, cache, turn % layers, batch)

    return attend, append


def sdpa_forms(context: int) -> dict[str, Call]:
    """Ways to have torch do the same over unpacked K and V."""
    layers = max(1, copies(context) // 4)
    half = [torch.randn(2, 1, KV_HEADS, context, DIM, dtype=torch.bfloat16) for _ in range(layers)]
    full = [kv.float() for kv in half]
    rows = torch.randn(1, KV_HEADS, GROUP, DIM, dtype=torch.bfloat16)
    flat = rows.view(1, HEADS, 1, DIM)

    def products(turn: int) -> Tensor:
        k, v = half[turn % layers].unbind()
        return torch.matmul(torch.softmax(torch.matmul(rows, k.transpose(-1, -2)) * SCALE, dim=-1), v)

    def sdpa(q: Tensor, kv: list[Tensor], turn: int, gqa: bool = False) -> Tensor:
        k, v = kv[turn % layers].unbind()
        return scaled_dot_product_attention(q, k, v, enable_gqa=gqa)

    return {
        "sdpa bf16, heads as rows": lambda turn: sdpa(rows, half, turn),
        "sdpa fp32, heads as rows": lambda turn: sdpa(rows.float(), full, turn),
        "sdpa bf16, enable_gqa": lambda turn: sdpa(flat, half, turn, gqa=True),
        "matmul and softmax, bf16": products,
    }


def measure(runs: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every side, in turns of five runs, for at least so long and three turns; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    began, count = time.perf_counter(), 0
    while count < 4 * RUNS or time.perf_counter() - began < seconds:
        for name, run in runs.items():
            time.sleep(REST_S)
            run(count)
            for index in range(count + 1, count + 1 + RUNS):
                before = time.perf_counter()
                run(index)
                if count:
                    times[name].append(1e3 * (time.perf_counter() - before))
        count += RUNS
    return times


def machine_limits() -> dict[str, float]:
    """A copy's GB/s, read and written, and 10**9 multiply-adds a second of an FP32 matrix product."""
    machine = measure_machine(torch.device("cpu"))
    return {"copy_gb_s": machine.copy_gbps, "fma_g_s": machine.fp32_gflops / 2}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--kv", default="tq4", choices=("tq4", "tbq4_0"))
    parser.add_argument("--isa", help="instruction set; the CPU's best unless given")
    parser.add_argument("--seconds", type=float, default=3.0, help="that every context is measured at least")
    parser.add_argument("--save", action="store_true", help="append the JSON lines to benchmarks/results")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    ops, limits, table, lines = CpuOps(args.isa), machine_limits(), [], []
    for context in args.contexts:
        attend, append = packed(context, ops, args.kv)
        forms = sdpa_forms(context)
        times = measure({"attention": attend, "append": append, **forms}, args.seconds)
        medians = {name: statistics.median(ms) for name, ms in times.items()}
        best = min(forms, key=lambda name: medians[name])
        memory = 1e-6 * packed_bytes(context) / limits["copy_gb_s"]
        arithmetic = 1e-6 * multiply_adds(context) / limits["fma_g_s"]
        floor = max(memory, arithmetic)
        lines.append({
            "context": context, "kv": args.kv, "isa": ops.isa, **limits, "ms": medians,
            "ms_min": {name: min(ms) for name, ms in times.items()}, "turns": len(times["append"]), "best_peer": best,
            "speedup": medians[best] / medians["attention"], "append_share": medians["append"] / medians["attention"],
            "memory_floor_ms": memory, "arithmetic_floor_ms": arithmetic, "over_floor": medians["attention"] / floor,
        })  # fmt: skip
        table.append([
            f"{context:,}", f"{medians['attention']:.3f}", f"{min(times['attention']):.3f}", f"{medians[best]:.3f}", best,
            f"{medians[best] / medians['attention']:.2f}", f"{memory:.3f}", f"{arithmetic:.3f}",
            f"{medians['attention'] / floor:.2f}", f"{1e3 * medians['append']:.0f}",
        ])  # fmt: skip
    title = (
        f"Qwen3-14B, one layer, batch 1, {args.kv} by {ops.isa}, {torch.get_num_threads()} threads, ms; "
        f"copy {limits['copy_gb_s']:.1f} GB/s, {limits['fma_g_s']:.0f} G multiply-adds/s"
    )
    columns = ["context", "ours", "min", "best peer", "which", "ratio", "bytes", "sums", "over floor", "append µs"]
    print_rows(title, columns, table)
    for line in lines:
        emit("cpu_attention", line, save=args.save)


if __name__ == "__main__":
    main()
