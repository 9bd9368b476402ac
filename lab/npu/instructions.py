"""Instructions of whole decode attention on an NPU: what each emitted kernel function has, times the tasks that call it.

    python -m lab.npu.instructions KV_HEADS GROUP BATCHxCONTEXT …

It is compiled and scheduled for one sequence and two KV heads; a batch and more heads are as many such, for their tasks share
nothing. The calibration is that of benchmarks/LOG.md: 30 cycles an instruction of the vector core and half a cycle a line of
256 bytes, 48 cores at 1.8 GHz, 1.6 TB/s of memory. Loads and stores run beside them and are left out; so are cube cores,
dispatch and what tasks wait for.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from heapq import heapreplace

from torch import Tensor

from haarkv.tq_ops.npu.sim.simulator import Mode
from lab.npu.aicore.emission import Recorder
from lab.npu.aicore.leaf import read_leaves
from lab.npu.attention import AttentionProgram
from lab.npu.text import Tile, parse

CORES, HERTZ, BYTES = 48, 1.8e9, 1.6e12
AN_INSTRUCTION, A_LINE = 30, 0.5
_SIZES = {"half": 2, "bfloat16_t": 2, "int8_t": 1, "uint8_t": 1}


def lines_of(tile: Tile) -> int:
    """Lines of 256 bytes that an operation on a tile goes through; a row begins a new one."""
    assert tile.layout is not None
    rows, columns = min(tile.rows or tile.layout[0], tile.layout[0]), tile.layout[-1]
    return rows * max(1, -(-columns * _SIZES.get(tile.dtype, 4) // 256))


def of_function(path: str, text: str) -> tuple[int, int]:
    """Instructions and lines of a kernel function on a vector core."""
    count = lines = 0
    for operation in parse(path, text).operations:
        tiles = [tile for tile in operation.operands if tile is not None and tile.layout is not None]
        if operation.name not in ("TLoad", "TStore") and tiles:
            count += 1
            # A reduction goes through what it reads, as does a cast of bytes.
            lines += max(map(lines_of, tiles[:2]))
    return count, lines


def of_run(program: AttentionProgram, arguments: Sequence[Tensor]) -> tuple[Counter[str], int, int, list[float]]:
    """Tasks of vector and cube cores; instructions and lines of the former, and the cycles of each of its tasks."""
    with Recorder() as simulator:
        sources = simulator.run(program, arguments, Mode.COMPILE).sources
        order, _ = simulator.schedule(program, arguments)
    leaves = {leaf.hash: leaf for leaf in read_leaves(sources)}
    files = {path.rpartition("/")[2]: (path, text) for path, text in sources.items()}
    known = {leaf.file: of_function(*files[leaf.file]) for leaf in leaves.values()}
    called = [leaves[task.leaf] for task in order if task.leaf in leaves]  # what joins tasks calls no function
    work = [known[leaf.file] for leaf in called if leaf.kind == "aiv"]
    count, lines = (sum(column) for column in zip(*work, strict=True))
    return Counter(leaf.kind for leaf in called), count, lines, [AN_INSTRUCTION * n + A_LINE * m for n, m in work]


def dealt_out(cycles: Sequence[float]) -> float:
    """Cycles until the last of some tasks has ended, the longest first to whichever core is free."""
    cores = [0.0] * CORES
    for task in sorted(cycles, reverse=True):
        heapreplace(cores, cores[0] + task)
    return max(cores)


def main() -> None:
    """Print a row for each size and cache."""
    parser = argparse.ArgumentParser(prog="python -m lab.npu.instructions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kv_heads", type=int)
    parser.add_argument("group", type=int, help="queries' heads of a KV head")
    parser.add_argument("sizes", nargs="+", metavar="BATCHxCONTEXT")
    given = parser.parse_args()
    print("cache | batch x context | instructions | lines | vector us, even | by whole tasks | bytes us | at least us")
    for size in given.sizes:
        batch, context = map(int, size.split("x"))
        times = batch * given.kv_heads // 2
        for variant in ("tq4", "bf16"):
            program = AttentionProgram.tuned(variant, 2 * given.group, 2, 2048)
            _, count, lines, cycles = of_run(program, program.blank_call(1, context))
            even, tasks = (x / HERTZ * 1e6 for x in (times * sum(cycles) / CORES, dealt_out(times * cycles)))
            memory = times * program.kv_bytes(1, context) / BYTES * 1e6
            cells = (
                variant, size, f"{times * count:,}", f"{times * lines:,}", f"{even:.1f}", f"{tasks:.1f}", f"{memory:.1f}",
                f"{max(tasks, memory):.1f}",
            )  # fmt: skip
            print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
