"""`tq.load`: a session whose cache is said as the command's options say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from haarkv.engine import loading
from haarkv.engine.session import Session
from haarkv.executors.catalog import AUTO
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning.auto import LOSS
from haarkv.validation.planning.remembered import cache_for


def load(
    model: str | Path = "tiny",
    *,
    kv: str | KVSpec | None = None,
    tail: int | None = None,
    sink: int = 0,
    skip_layers: Sequence[int] = (),
    calibration: CalibrationFile | Path | str | None = None,
    plan: Path | str | None = None,
    kv_loss: float | None = None,
    on_choice: Callable[[str], object] = lambda _: None,
    executor: str = AUTO,
    device: str | None = None,
    dtype: str | None = None,
    layers: int | None = None,
    **others: Any,
) -> Session:
    """Load a model with its tokenizer, an executor and a KV cache.

        session = tq.load("model.gguf", kv="auto")
        session = tq.load("model.gguf", kv="k=lr4,v=tq4", calibration="model.safetensors", tail=124, sink=4)

    Args:
        model: `tiny`, `random:SIZE`, a folder in Hugging Face format or a `.gguf` file (`~` is the home folder), or the Hub
            id of a model that was downloaded before.
        kv: a KV format, `k=NAME,v=NAME`, a `KVSpec`, or `auto`: the smallest cache that loses at most `kv_loss`. Choosing it
            takes minutes, once for a model: it is remembered in `~/.cache/haarkv`. tq4 unless given.
        tail: recent tokens that stay in BF16; the fewest that the format needs unless given.
        sink: first tokens that stay in BF16.
        skip_layers: layers that are left in bf16; negative ones count from the end.
        calibration: what formats `lr2` to `lr5` take their coordinates from: a file of `tq calibrate`, or what it holds.
        plan: a file of `tq plan`, which sets the whole cache.
        kv_loss: mean KL in nats a token that `auto` may lose; 0.01 unless given.
        on_choice: told in one line what `auto` has chosen now, and why.
        executor, device, dtype, layers, others: as `haarkv.engine.loading.load` takes them.
    Raises:
        InputError: two of these that exclude each other, one that does not exist, or a model and a cache that do not fit
            together.
    """
    said = {"tail": tail, "sink": sink, "skip_layers": skip_layers, "calibration": calibration}
    given = [name for name, value in said.items() if value]
    if kv_loss is not None and kv != "auto":
        raise InputError("kv_loss says what kv='auto' may lose; give kv='auto' as well")
    if plan is not None:
        if other := next(iter((["kv"] if kv is not None else []) + given), None):
            raise InputError(f"plan sets the whole cache; leave out {other}")
        spec = plan_file.load(plan)
    elif isinstance(kv, KVSpec) or kv == "auto":
        if given:
            raise InputError(f"{'auto' if kv == 'auto' else 'a KVSpec'} sets the whole cache; leave out {given[0]}")
        if isinstance(kv, KVSpec):
            spec = kv
        else:
            loss = LOSS if kv_loss is None else kv_loss
            spec = cache_for(str(model), loss=loss, layers=layers, dtype=dtype, device="cpu", on_choice=on_choice)
    else:
        if isinstance(calibration, Path | str):
            calibration = calibration_file.load(calibration)
        learned = calibration.spec if calibration else KVSpec()
        spec = replace(learned, kv=kv or learned.kv, tail=tail, sink=sink, skip_layers=skip_layers)
    return loading.load(model, kv=spec, executor=executor, device=device, dtype=dtype, layers=layers, **others)
