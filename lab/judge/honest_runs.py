"""Honest runs that the null has not seen, judged: none may be a fault. `python -m lab.judge.honest_runs --runs 1000`."""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OP_NAMES, OpTable, with_ops
from haarkv.validation.faults.base import DRIVES
from haarkv.validation.layers.honest_runs import HonestCache
from haarkv.validation.layers.null import honest
from haarkv.validation.layers.runner import validate
from haarkv.validation.layers.self_test import first_layers

_SEEDS = 10**9
"""Where seeds begin that no null draws from."""


def device(model: DecoderModel, seed: int) -> ReferenceExecutor:
    """An executor that computes as another honest device would: every call with noise of its own."""
    ops = cast(OpTable, reference)

    def noisy(name: str) -> Callable[..., Any]:
        def run(x: Tensor, *args: Any) -> Any:
            # The same input gives the same noise; the parity of a seed is a device's way to round attention.
            content = zlib.crc32(x.contiguous().view(torch.uint8).numpy().tobytes(), seed)
            return getattr(honest(ops, _SEEDS + seed % 2 + 2 * content), name)(x, *args)

        return run

    return ReferenceExecutor(model, with_ops(ops, {name: noisy(name) for name in OP_NAMES}))


def main() -> int:
    """Exit code 1 if a run was found to be at fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--kv", nargs="+", default=["tq4", "k=tq6,v=tq3"])
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    alarms, nearest, done = 0, 0.0, 0
    text = Path(str(sys.modules["argparse"].__file__)).read_text(encoding="utf-8")
    for dtype in ("bfloat16", "float32"):
        model = first_layers(load_model("tiny", dtype), args.layers)
        ids = load_tokenizer("tiny", model.config).encode(text)
        prompts = [ids[1000:1130], ids[2000:2040]]
        for kv in args.kv:
            known_outputs: HonestCache = {}
            plan = KVSpec(kv).plan(args.layers)
            for seed in range(args.runs // (2 * len(args.kv))):
                candidate = list(DRIVES.values())[seed // 2 % len(DRIVES)](device(model, 1000 * (seed + 1) + seed % 2))
                report = validate(
                    ReferenceExecutor(model),
                    candidate,
                    model,
                    prompts,
                    1,
                    plan,
                    modes=("teacher-forced",),
                    honest_cache=known_outputs,
                )
                done += 1
                nearest = max(nearest, *(row.share for row in report.rows), *(total.share for total in report.tests))
                if not report.passed:
                    alarms += 1
                    print(dtype, kv, seed, report.first_divergence, flush=True)
            print(f"{dtype} {kv}: {done} runs so far, {alarms} alarms, nearest to one {nearest:.2f}", flush=True)
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
