"""What is checked and timed on a GPU: arguments of Python by the name of a check, requests by the name of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from haarkv.benchmarks.decode import Request
from haarkv.tq_ops import formats
from haarkv.tq_ops.table import OP_NAMES

_CONTRACT = ("-m", "lab.bench.contract", "--table", "cuda", "--threads", "1", "--json")
_TESTS = {
    "the kernels": (
        "tests/tq_ops/cuda/test_cuda_ops.py", "tests/tq_ops/cuda/test_stretches.py", "tests/tq_ops/test_block_products.py",
    ),
    "the executor": ("tests/executors/test_cuda_executor.py", "tests/executors/test_cuda_step.py"),
    "hybrids and experts": ("tests/tq_ops/test_delta_tables.py", "tests/tq_ops/cuda/test_experts.py"),
}  # fmt: skip
_SHARES = {"paged_attention": 6, "store_kv": 3}
"""Processes that share an op's cases, each of which compiles kernels of its own."""
CHECKS_S = 185.0
PRETRAINED_S = 240.0
"""Of a given model's check, and of its timings: kernels of each layer's bits are compiled, and the CPU runs the reference."""
_VALIDATE = ("-m", "tq", "validate", "--executor", "cuda", "--prompt-file", "models/tiny_qwen3/held_out.txt",
             "--prompt-tokens", "300", "--steps", "8", "--model")  # fmt: skip


def checks(dry: bool) -> Mapping[str, Sequence[str]]:
    """Arguments of Python by the name of the check. In a rehearsal they take seconds, and nothing is proved."""
    if dry:
        return {
            "contract rms_norm": [*_CONTRACT, "--op", "rms_norm", "--share", "1/2"],
            "a check that fails": ["-c", "import sys; sys.exit('it fails on purpose')"],
        }
    # Compiling takes most of the time, so what can run at once does.
    workers = ["-n", "4", "--dist", "worksteal"] if find_spec("xdist") else []
    contract = {
        f"contract {op}, {part} of {shares}": [*_CONTRACT, "--op", op, "--share", f"{part}/{shares}"]
        for op, shares in {**dict.fromkeys(OP_NAMES, 1), **_SHARES}.items()
        for part in range(1, shares + 1)
    }
    left_out = "not slow and not cuda_compile and not cuda_long"
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", "-m", left_out]
    return {
        **contract,
        **{f"tests of {what}": [*pytest, *workers, *files] for what, files in _TESTS.items()},
        **{f"validate {model}": [*_VALIDATE, model] for model in ("tiny", "tiny-hybrid")},
    }


@dataclass(frozen=True)
class Timing:
    """A group of cases in one process, and the seconds that it may take.

    Attributes:
        prefix_tokens: before a prompt whose attention is measured; None where steps are.
        peers: whether SDPA is measured, too.
    """

    request: Request
    seconds: float
    prefix_tokens: int | None = None
    peers: bool = True


_WHOLE_BYTES = 112 * 2**30
"""Of a GPU on which all layers fit: weights, packed and 16-bit K and V of the largest case, and what a step computes with."""
_FEW_LAYERS = 4


def timings(dry: bool, memory: int) -> dict[str, Timing]:
    """All groups by name, of Qwen3-14B's shape.

    Args:
        memory: bytes of the GPU's; too few for the whole model, and a few of its layers are run.
    """
    layer = Request("random:14b", ["cuda"], ["tq4"], (1024, 4096, 16384, 32768), (1,), layers=1, repeats=11,
                    kinds=("attention",))  # fmt: skip
    every = [name for name in formats.names() if not formats.needs_calibration(name)]
    prompt = replace(layer, contexts=(2048,))
    steps = replace(layer, kinds=("step",), layers=None if memory >= _WHOLE_BYTES else _FEW_LAYERS)
    groups = {
        **{f"attention of {batch}": Timing(replace(layer, batches=(batch,)), 45) for batch in (1, 8, 32)},
        "attention of every format": Timing(
            replace(layer, kvs=[*every, "k=tq6,v=tq4+tail124+sink4"], contexts=(4096, 32768), batches=(1, 8)),
            45,
            peers=False,
        ),
        "a prompt": Timing(prompt, 25, prefix_tokens=0),
        "a prompt behind 32768": Timing(prompt, 25, prefix_tokens=32768),
        "steps at 4096": Timing(replace(steps, contexts=(4096,), batches=(1, 8)), 60),
        "steps at 32768": Timing(replace(steps, contexts=(32768,), batches=(8,)), 60),
    }
    if not dry:
        return groups
    small: dict[str, Any] = {"model": "tiny", "layers": None, "executors": ["reference"], "kvs": ["tq4"], "contexts": (32,)}
    dry_groups = {name: groups[name] for name in ("attention of 1", "a prompt behind 32768", "steps at 4096")}
    return {
        name: Timing(replace(one.request, **small, batches=(1,), repeats=1), 1800, one.prefix_tokens and 16)
        for name, one in dry_groups.items()
    }


@dataclass(frozen=True)
class PretrainedModel:
    """A model of the caller's, which is validated and timed as well.

    Attributes:
        model: a file or folder, as `tq` takes it.
        plan: the file of a cache's plan; `tq4` alone without.
    """

    model: str
    plan: str | None

    def words(self) -> list[str]:
        """The options that name it."""
        return ["--model", self.model, *(["--kv-plan", self.plan] if self.plan else [])]

    def check(self) -> dict[str, Sequence[str]]:
        """By name, arguments of Python that validate it."""
        cache = ["--kv-plan", self.plan] if self.plan else ["--kv", "tq4"]
        return {"validate the model": [*_VALIDATE, self.model, *cache]}

    def timings(self) -> dict[str, Timing]:
        """Attention and steps, without peers."""
        kvs = ["tq4", *filter(None, [self.plan])]
        kinds = ("attention", "step")
        request = Request(self.model, ["cuda"], kvs, (1024, 4096), (1, 8), repeats=11, kinds=kinds)
        return {"the model": Timing(request, PRETRAINED_S, peers=False)}
