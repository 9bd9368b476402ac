"""The smallest error of scale that a validation catches, by stage: `python -m lab.judge.sensitivity --dtype bfloat16`.

Each stage of the middle layer of `tiny` is made too large by 2**-n, op by op and in whole layers; a larger error than one that
is caught is taken to be caught.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import DRIVES, Fault, Layer
from haarkv.validation.faults.layer import NORMS, PROJECTIONS
from haarkv.validation.faults.ops import keeping, larger, one_side, other, steeper
from haarkv.validation.layers.self_test import Setting, first_layers

_COARSEST, _FINEST = 2, 20
_TOKENS = (120, 100)
ScaledFault = Callable[[float], Fault]
"""A fault that makes a stage's result larger by a factor."""


def scaled_stages(at: Layer) -> dict[str, ScaledFault]:
    """By stage, a fault that makes its result larger by a factor."""

    def weight(name: str) -> ScaledFault:
        return lambda by: at.weighing(name, name, lambda call: (call.again().float() * by).to(call.x.dtype))[0]

    def norm(name: str) -> ScaledFault:
        return lambda by: at.weighing(name, name, lambda call: call.again(weight=call.weight.float() * by))[0]

    def storing(side: str) -> ScaledFault:
        return lambda by: at.storing(side, side, keeping(other(one_side(side, lambda x: x * by))))

    makers = dict.fromkeys(NORMS, norm) | dict.fromkeys((*PROJECTIONS, "down_proj"), weight)
    return {name: make(name) for name, make in makers.items() if at.weight(name) is not None} | {
        "store_kv.k": storing("k"),
        "store_kv.v": storing("v"),
        "paged_attention": lambda by: at.attending("attention", larger(by)),
        "paged_attention, one KV head": lambda by: at.attending("attention", larger(by, -1)),
        "softmax scale": lambda by: at.attending("attention", steeper(by)),
    }


def smallest_error(model: DecoderModel, setting: Setting, drive: str, fault: ScaledFault) -> tuple[float | None, str]:
    """The smallest relative error 2**-n that fails the run, and the stage that is named; None if none does."""
    stage, smallest = "–", None
    low, high = _COARSEST, _FINEST + 1  # caught at 2**-low, if at all; not at 2**-high
    while low < high:
        middle = (low + high) // 2
        report = setting.report(model, fault(1 + 2.0**-middle).executor(model, drive))
        first = report.first_divergence
        if report.passed or first is None:
            high = middle
        else:
            low, smallest, stage = middle + 1, 2.0**-middle, f"layer {first.layer} {first.stage}"
    return smallest, stage


def rows(dtype: str) -> Iterator[dict[str, object]]:
    """A row for each stage, in both ways of driving."""
    model = first_layers(load_model("tiny", dtype), 3)
    ids = load_tokenizer("tiny", model.config).encode(Path(str(reference.__file__)).read_text(encoding="utf-8"))
    setting = Setting(KVSpec("tq4"), [ids[:count] for count in _TOKENS], 0, "")
    for drive in DRIVES:
        for stage, fault in scaled_stages(Layer(model, model.config.num_layers // 2)).items():
            error, found = smallest_error(model, setting, drive, fault)
            yield {"dtype": dtype, "driven": drive, "stage": stage, "error": error, "found": found}


def main() -> int:
    """Print a JSON line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in args.dtype:
        for row in rows(dtype):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
