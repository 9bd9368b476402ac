"""Instructions of whole decode attention on an NPU: what each emitted kernel function has, times the tasks that call it.

    python tests/support/npu_instructions.py HEADS KV_HEADS BATCHxCONTEXT …

The calibration is that of benchmarks/LOG.md: 30 cycles an instruction of the vector core and half a cycle a line of 256 bytes,
48 cores at 1.8 GHz, 1.6 TB/s of memory. Loads and stores run beside them and are left out; so are cube cores and dispatch.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from aicore.emission import Recorder
from aicore.leaf import read_leaves

from haarkv.tq_ops.npu.emitted.text import parse
from haarkv.tq_ops.npu.scopes import AttentionProgram
from haarkv.tq_ops.npu.sim.simulator import Mode

CORES, HERTZ, BYTES = 48, 1.8e9, 1.6e12
AN_INSTRUCTION, A_LINE = 30, 0.5
_SIZES = {"half": 2, "bfloat16_t": 2, "int8_t": 1, "uint8_t": 1}


def lines_of(tile):
    """Lines of 256 bytes that an operation on a tile goes through; a row begins a new one."""
    rows, columns = min(tile.rows or tile.layout[0], tile.layout[0]), tile.layout[-1]
    return rows * max(1, -(-columns * _SIZES.get(tile.dtype, 4) // 256))


def of_function(path, text):
    """Instructions and lines of a kernel function on a vector core."""
    count = lines = 0
    for operation in parse(path, text).operations:
        tiles = [tile for tile in operation.operands if tile is not None and tile.layout is not None]
        if operation.name not in ("TLoad", "TStore") and tiles:
            count += 1
            # A reduction goes through what it reads, as does a cast of bytes.
            lines += max(map(lines_of, tiles[:2]))
    return count, lines


def of_run(program, arguments):
    """Tasks of vector and cube cores; instructions and lines of the former; the cycles of its longest task."""
    with Recorder() as simulator:
        sources = simulator.run(program, arguments, Mode.COMPILE).sources
        order, _ = simulator.schedule(program, arguments)
    paths = {leaf.hash: (leaf.kind, path) for leaf in read_leaves(sources) for path in sources if path.endswith(leaf.file)}
    tasks, total, longest, known = Counter(), [0, 0], 0.0, {}
    for task in order:
        kind, path = paths[task.leaf]
        tasks[kind] += 1
        if kind == "aiv":
            count, lines = known.setdefault(path, of_function(path, sources[path])) if path not in known else known[path]
            total = [total[0] + count, total[1] + lines]
            longest = max(longest, AN_INSTRUCTION * count + A_LINE * lines)
    return tasks, *total, longest


def main(heads, kv_heads, *sizes):
    print("cache | batch x context | tasks aiv, aic | instructions | lines | vector us | bytes us | larger | longest task us")
    for size in sizes:
        batch, context = map(int, size.split("x"))
        for variant in ("tq4", "bf16"):
            program = AttentionProgram.tuned(variant, int(heads), int(kv_heads), 2048)
            tasks, count, lines, longest = of_run(program, program.blank_call(batch, context))
            vector = (AN_INSTRUCTION * count + A_LINE * lines) / CORES / HERTZ * 1e6
            memory = program.kv_bytes(batch, context) / BYTES * 1e6
            cells = (
                variant, size, f"{tasks['aiv']}, {tasks['aic']}", f"{count:,}", f"{lines:,}", f"{vector:.1f}", f"{memory:.1f}",
                f"{max(vector, memory):.1f}", f"{longest / HERTZ * 1e6:.1f}",
            )  # fmt: skip
            print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
