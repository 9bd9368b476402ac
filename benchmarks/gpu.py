"""Everything that needs a GPU, in one call: the tests there, then attention, quantize-append and whole steps at the 14B shape.

    python -m haarkv.benchmarks.gpu OUT             # on a machine with an NVIDIA GPU
    python -m haarkv.benchmarks.gpu OUT --dry-run   # tiny sizes, in Triton's interpreter: shows that the script works

Each part leaves `OUT/PART.jsonl`, a line a figure, and whatever goes wrong in it is a line too; the others go on. Times are of
captured graphs where it says so: what the GPU takes, without Python between two launches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks import decode_peers
from haarkv.benchmarks.caches import filled, random_kv
from haarkv.benchmarks.decode_cost import Case, attention_cost, row, step_cost
from haarkv.benchmarks.report import machine as host
from haarkv.benchmarks.timing import Machine, measure_machine, take_turns
from haarkv.executors.cuda import CudaExecutor
from haarkv.executors.cuda_graph import DecodeStep
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.models.catalog import read_config
from haarkv.models.checkpoint import random_weights
from haarkv.models.rope import RopeTable
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.plan import KVSpec

Call = Callable[[], object]
ROOT = Path(__file__).parents[1]
_STEPS = 12


@dataclass(frozen=True)
class Sizes:
    """What is measured: the true thing, or as little as shows that the script works."""

    config: DecoderConfig
    attention: Sequence[Case]
    steps: Sequence[Case]
    formats: Sequence[str]
    repeats: int
    dry: bool


QWEN3_14B = read_config("random:14b")
FULL = Sizes(
    config=replace(QWEN3_14B, num_layers=4),
    attention=[Case(batch, context) for batch in (1, 8, 32) for context in (1024, 4096, 16384, 32768)],
    steps=[Case(1, 4096), Case(8, 4096), Case(8, 32768)],
    formats=("tq4", "tbq4_0"),
    repeats=15,
    dry=False,
)
DRY = Sizes(
    config=replace(
        QWEN3_14B, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=61,
        max_position_embeddings=512,
    ),
    attention=[Case(2, 24)],
    steps=[Case(2, 24)],
    formats=("tq4",),
    repeats=1,
    dry=True,
)  # fmt: skip


class Bench:
    """One model of the sizes' shape on the device, and what the parts share."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.config = sizes, sizes.config
        model = DecoderModel(self.config, random_weights(self.config, torch.bfloat16), RopeTable(self.config))
        self.executor = CudaExecutor(model, interpreted=sizes.dry)
        self.device = self.executor.device
        self.model = model.to(self.device)
        self.machine: Machine = measure_machine(self.device)

    def captured(self, run: Call) -> Call:
        """The run as a graph, which takes what the GPU takes; itself where there is no GPU."""
        if self.device.type != "cuda":
            return run
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def describe(self) -> Iterator[dict[str, Any]]:
        """The machine, and what it can do at best."""
        yield {"kind": "machine", "executor": self.executor.description, **host(), **vars(self.machine)}

    def attention(self) -> Iterator[dict[str, Any]]:
        """Decode attention of one layer, and storing its new tokens, beside SDPA over bf16; caches cold, graphs."""
        for case in self.sizes.attention:
            k, v = random_kv(self.config, case, self.device)
            q = torch.randn(case.batch, self.config.num_heads, self.config.head_dim, device=self.device).to(torch.bfloat16)
            runs: dict[str, Call] = {}
            sizes: dict[str, float] = {}
            for kv in self.sizes.formats:
                plan = KVSpec(kv).plan(1)
                cache, paging = filled(plan, self.config, case, k, v, 1)
                batch = paging.batch(range(case.batch), [1] * case.batch).to(self.device)
                ops, scale = self.executor.step_ops, self.config.softmax_scale
                last = (k[:, :, -1].float(), v[:, :, -1].float())
                ops.store_kv(*last, cache, 0, batch)
                runs[f"cuda {kv}"] = partial(ops.paged_attention, q, cache, 0, batch, scale)
                runs[f"store {kv}"] = partial(ops.store_kv, *last, cache, 0, batch)
                sizes[f"cuda {kv}"] = plan.bytes_per_token(self.config.num_kv_heads, self.config.head_dim)
            for peer in decode_peers.attention(q, k, v):
                runs[peer.name], sizes[peer.name] = partial(peer.run, 0), peer.token_bytes
            graphs = {}
            for who, run in runs.items():
                try:
                    graphs[who] = self.captured(run)
                except RuntimeError as error:
                    yield {"kind": "attention", "who": who, "error": str(error).splitlines()[0]}
            for who, taken in take_turns(graphs, self.device, repeats=self.sizes.repeats).items():
                if who.startswith("store "):
                    yield {"kind": "store", "who": who, "batch": case.batch, "context": case.context, **vars(taken)}
                    continue
                cost = attention_cost(self.config, case, sizes[who], 2)
                yield row("attention", who, case, cost, self.machine, taken).as_json()

    def steps(self) -> Iterator[dict[str, Any]]:
        """Whole decode steps as graphs, of so many layers: packed, and the same layers over SDPA and dense bf16 K and V."""
        for case in self.sizes.steps:
            k, v = random_kv(self.config, case, self.device)
            runs: dict[str, Call] = {}
            costs = {}
            for kv in self.sizes.formats[:1]:
                plan = KVSpec(kv).plan(self.config.num_layers)
                cache, paging = filled(plan, self.config, case, k, v, _STEPS)
                batch = paging.batch(range(case.batch), [1] * case.batch).to(self.device)
                tokens = torch.arange(case.batch, device=self.device) % self.config.vocab_size
                runs[f"cuda {kv}"] = partial(self.executor.decode, tokens, batch, cache)
                costs[f"cuda {kv}"] = plan.bytes_per_token(self.config.num_kv_heads, self.config.head_dim)
                dense = DenseStep(self, k, v, cache, batch, tokens)
                runs["bf16 sdpa"] = dense.run
                costs["bf16 sdpa"] = 4.0 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim
            for who, taken in take_turns(runs, self.device, repeats=self.sizes.repeats, cold=False).items():
                cost = step_cost(self.model, case, costs[who])
                yield {
                    "layers": self.config.num_layers, **row("step", who, case, cost, self.machine, taken).as_json(),
                    "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0,
                }  # fmt: skip


class DenseStep:
    """The executor's own step with bf16 K and V, one tensor a layer, and SDPA in its place for attention."""

    def __init__(self, bench: Bench, k: Tensor, v: Tensor, cache: Any, batch: Batch, tokens: Tensor) -> None:
        self._k, self._v = ([x.clone() for _ in range(bench.config.num_layers)] for x in (k, v))
        self._last, self._batch, self._tokens = k.shape[2] - 1, batch, tokens
        kv_heads, dim = k.shape[1], k.shape[3]

        def store(k: Tensor, v: Tensor, _cache: object, layer: int, _batch: Batch) -> None:
            for dense, new in ((self._k[layer], k), (self._v[layer], v)):
                dense[:, :, self._last] = new.to(dense.dtype)[: len(dense)]

        def attend(q: Tensor, _cache: object, layer: int, _batch: Batch, scale: float) -> Tensor:
            live = len(self._k[layer])
            rows = q[:live].view(live, kv_heads, -1, dim)
            out = scaled_dot_product_attention(rows, self._k[layer], self._v[layer], scale=scale)
            return torch.nn.functional.pad(out.reshape(live, -1, dim), (0, 0, 0, 0, 0, len(q) - live))

        table = {name: getattr(bench.executor.step_ops, name) for name in ("rms_norm", "linear", "rope", "silu_mul")}
        ops: Any = argparse.Namespace(**table, store_kv=store, paged_attention=attend)

        def step(token_ids: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            logits = bench.model.decode(token_ids, batch, cache, ops)
            return logits, torch.isfinite(logits).all()

        pool = torch.cuda.graph_pool_handle() if bench.device.type == "cuda" else None
        self._step = DecodeStep(len(tokens), cache, bench.config.max_position_embeddings, step, pool)

    @torch.inference_mode()
    def run(self) -> bool:
        """One step, over when the host knows that it went well, as an executor's is."""
        return bool(self._step(self._tokens, self._batch)[1])


def tests(dry: bool) -> Iterator[dict[str, Any]]:
    """The tests of the kernels and the executor, compiled on the GPU, and the validator on the model that ships."""
    commands = {
        "pytest": ["-m", "pytest", "-q", "tests/tq_ops/cuda/test_cuda_ops.py", "tests/executors/test_cuda_executor.py"],
        "validate": ["-m", "tq", "validate", "--executor", "cuda", "--prompt-file", "models/tiny_qwen3/held_out.txt",
                     "--prompt-tokens", "300", "--steps", "8"],
    }  # fmt: skip
    for name, command in commands.items() if not dry else {"pytest": ["-m", "pytest", "--version"]}.items():
        began = time.monotonic()
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        lines = (done.stdout + done.stderr).splitlines()
        yield {"kind": "test", "name": name, "exit": done.returncode, "seconds": time.monotonic() - began, "end": lines[-40:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the JSON lines go; made if need be")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--parts", default="tests,machine,attention,steps", help="which of them, in order")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    made: list[Bench] = []

    def bench() -> Bench:
        if not made:
            made.append(Bench(DRY if given.dry_run else FULL))
        return made[0]

    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "tests": lambda: tests(given.dry_run),
        "machine": lambda: bench().describe(),
        "attention": lambda: bench().attention(),
        "steps": lambda: bench().steps(),
    }
    failed = 0
    for name in given.parts.split(","):
        with torch.inference_mode(), (given.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            try:
                for line in parts[name]():
                    failed += "error" in line or bool(line.get("exit"))
                    print(json.dumps(line), file=file, flush=True)
                    print(json.dumps(line), flush=True)
            except Exception as error:  # one part must not take the others' figures with it
                failed += 1
                line = {"part": name, "error": repr(error), "traceback": traceback.format_exc().splitlines()[-12:]}
                print(json.dumps(line), file=file, flush=True)
                print(json.dumps(line), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
