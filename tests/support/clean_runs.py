"""Validations in which nothing is wrong: other prompts, formats, windows, dtypes, executors and drives. None may be red.

python tests/support/clean_runs.py 0 1000      # prints what is red, how near the rest came to that, and how ties were spread
python tests/support/clean_runs.py 0 40 npu    # the NPU's programs in the simulator; `cuda` with TRITON_INTERPRET=1: kernels
"""

import json
import random
import sys
import time
from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch
from bases import calibration
from small_models import CONFIGS, random_tokens, small_model

from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import reordered
from haarkv.validation.layers import runner
from haarkv.validation.layers.chance import expected, stored_differently
from haarkv.validation.layers.ledger import Ledger
from haarkv.validation.layers.parts import parts_of
from haarkv.validation.layers.runner import validate
from haarkv.validation.layers.self_test import WholeLayers

FORMATS = ("tq4", "tq4", "tq4", "tq3", "tq2", "tq6", "tq8", "bf16", "tq4_seed", "k=bf16,v=tq4", "k=lr3,v=tq4", "k=lr5,v=tq3")
TIES = {}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cache
def _model(name, dtype, seed):
    return load_model("tiny", dtype) if name == "tiny" else small_model(CONFIGS[name], seed, DTYPES[dtype])


@cache
def _texts():
    tokenizer = load_tokenizer("tiny", _model("tiny", "bfloat16", 0).config)
    return [tokenizer.encode(text[:20_000]) for text in held_out_texts().values() if len(text) > 2000]


def _created(executor, model, plan):
    if executor == "reordered":
        return ReferenceExecutor(model, reordered())
    if executor == "cuda":
        from haarkv.executors.cuda import CudaExecutor

        return CudaExecutor(model, interpreted=not torch.cuda.is_available())
    return catalog.create(executor, model, plan, "sim" if executor == "npu" else None)


def _refusal(executor, config, plan, model):
    """Why an executor cannot run this; None if it can."""
    if executor == "cuda":  # without a GPU the catalog refuses it for that alone
        return _created(executor, model, plan).supports(config, plan)
    try:
        catalog.check(executor, config, plan, "sim" if executor == "npu" else None)
    except ValueError as error:
        return str(error)
    return None


def _windows(number, kv):
    """A tail and sinks, in a third of the runs; and how many tokens it takes for the ring to start over at times."""
    draw = random.Random(f"windows of {number}")
    if draw.random() < 2 / 3 or kv == "bf16":
        return KVSpec(kv), 0
    return KVSpec(kv, tail=draw.choice((None, 1, 3, 16, 40)), sink=draw.choice((0, 2, 5))), draw.choice((0, 0, 60))


def clean_run(number, executors=("cpu", "onnx", "reordered"), most_tokens=40, instead="reordered"):
    """One validation, drawn by its number; what it was, and its report.

    Args:
        instead: the executor that runs where the drawn one cannot; without any the report is None.
    """
    draw = random.Random(number)
    name, dtype = draw.choice(["tiny", *CONFIGS]), draw.choice(list(DTYPES))
    model = _model(name, dtype, draw.randrange(3))
    config = model.config
    kv, executor = draw.choice(FORMATS), draw.choice(executors)
    made_up = calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim) if "lr" in kv else None
    spec, longer = _windows(number, kv)
    plan = replace(spec, calibration=made_up).plan(config.num_layers)
    if executor != "reordered" and (reason := _refusal(executor, config, plan, model)):
        if instead is None:
            return f"{number}: {reason}", None
        executor = instead
    candidate = _created(executor, model, plan)
    prompts = []
    for row in range(draw.choice((1, 1, 2))):
        count = draw.randint(2, most_tokens) + longer
        if name == "tiny":
            text = draw.choice(_texts())
            begin = draw.randrange(max(1, len(text) - count))
            prompts.append(text[begin : begin + count])
        else:
            prompts.append(random_tokens(config, count, 100 * number + row))
    wrap = WholeLayers if draw.random() < 0.5 else (lambda e: e)
    what = f"{number}: {name} {dtype} {plan.describe()} {executor} {list(map(len, prompts))} {wrap.__name__}"
    return what, validate(ReferenceExecutor(model), wrap(candidate), model, prompts, draw.choice((0, 0, 1)), plan)


def main(begin, end, *executors):
    torch.set_num_threads(1)
    runner.Ledger = _Counting
    red, runs, worst, started = 0, 0, {}, time.time()
    for number in range(begin, end):
        what, report = clean_run(number, executors, 12, None) if executors else clean_run(number)
        if executors:  # simulators take their time
            print(what, "cannot run" if report is None else "passed" if report.passed else "red", flush=True)
        if report is None:
            continue
        runs += 1
        TIES.setdefault(f"{report.candidate} {report.dtype}", []).extend(_Counting.seen)
        _Counting.seen.clear()
        if not report.passed:
            red += 1
            first = report.first_divergence
            print("RED", what, first, flush=True)
        for row in report.tests:
            if row.share is not None and row.share > worst.get(row.name, (0.0,))[0]:
                worst[row.name] = (row.share, what, row.layer, row.stage, row.value, row.bound)
        if runs % 50 == 0:
            print(f"{runs} runs, {red} red, {time.time() - started:.0f} s", flush=True)
            _print_ties()
    print(f"{runs} runs, {red} red, {time.time() - started:.0f} s")
    print(json.dumps(worst, indent=1))
    _print_ties()
    return red


class _Counting(Ledger):
    """Also counts the ties of whole layers, and those that noise makes, where there are none as well."""

    seen: ClassVar = []

    def stored(self, drive, layer, ours, theirs, chances):
        likely = chances()
        if drive == "layers":
            for part in parts_of(self._cache, layer):
                if len(next(iter(ours[part.name].values()))):
                    different, _, _ = stored_differently(part.kv_format, layer, ours[part.name], theirs[part.name])
                    self.seen.append((int(different.sum()), expected(likely[part.name].levels)))
        return super().stored(drive, layer, ours, theirs, lambda: likely)


def _print_ties():
    """Vectors with other levels as a multiple of those that noise makes, by executor and dtype: what TIE_MARGIN must cover."""
    for kind, rows in sorted(TIES.items()):
        found, likely = (sum(column) for column in zip(*rows, strict=True))
        ratio = f"{likely:.1f} expected, ratio {found / max(likely, 1e-9):.2f}"
        print(f"ties, {kind}: {found} in {len(rows)} layers' parts, {ratio}", flush=True)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
