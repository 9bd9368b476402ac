"""`tq.load`: a session whose cache is said as the command's options say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from haarkv.engine import loading
from haarkv.engine.plans import default_spec
from haarkv.engine.session import Session
from haarkv.executors.catalog import AUTO
from haarkv.models.catalog import read_config
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning.auto import LOSS
from haarkv.validation.planning.remembered import cache_for, default_cache

AUTO_KV = "auto"


def load(
    model: str | Path = "tiny",
    *,
    kv: str | KVSpec | None = None,
    tail: int | None = None,
    sink: int | None = None,
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
            takes minutes, once for a model: it is remembered in `~/.cache/haarkv`. Unless given: tq4 for toys and random
            models; with a calibration k=lr4,v=tq4 with 124 recent and 4 first tokens in BF16; else auto, where the model's
            keys can be learned.
        tail: recent tokens that stay in BF16; the fewest that the format needs unless given.
        sink: first tokens that stay in BF16; none unless given, or unless the default cache has some.
        skip_layers: layers that are left in bf16; negative ones count from the end.
        calibration: what formats `lr2` to `lr5` take their coordinates from: a file of `tq calibrate`, or what it holds.
        plan: a file of `tq plan`, which sets the whole cache.
        kv_loss: mean KL in nats a token that `auto` may lose; 0.002 unless given.
        on_choice: told in one line what `auto` has chosen now, and why.
        executor, device, dtype, layers, others: as `haarkv.engine.loading.load` takes them.
    Raises:
        InputError: two of these that exclude each other, one that does not exist, or a model and a cache that do not fit
            together.
    """
    beside: dict[str, Any] = {"tail": tail, "sink": sink, "skip_layers": skip_layers}
    beside = {name: value for name, value in beside.items() if value or value == 0}  # 0 is asked for as well
    given = next(iter([*beside, *["calibration"] * bool(calibration)]), None)
    default = default_cache(str(model), layers, executor) if kv is None and plan is None and not calibration else KVSpec()
    auto = kv == AUTO_KV or default is None
    if kv_loss is not None and not auto:
        raise InputError("kv_loss says what kv='auto' may lose; give kv='auto' as well")
    if plan is not None:
        if other := "kv" if kv is not None else given:
            raise InputError(f"plan sets the whole cache; leave out {other}")
        spec = plan_file.load(plan)
    elif auto or isinstance(kv, KVSpec):
        if given:
            raise InputError(f"{'auto' if auto else 'a KVSpec'} sets the whole cache; leave out {given}")
        loss = LOSS if kv_loss is None else kv_loss
        spec = (
            kv
            if isinstance(kv, KVSpec)
            else cache_for(
                str(model), loss=loss, layers=layers, executor=executor, dtype=dtype, device="cpu", on_choice=on_choice
            )
        )
    else:
        if isinstance(calibration, Path | str):
            calibration = calibration_file.load(calibration)
        spec = default or KVSpec()
        if calibration and kv is None:
            spec = default_spec(learned=True, context=read_config(model, layers).max_position_embeddings)
        learned = calibration.spec if calibration else KVSpec()
        spec = replace(learned, kv=kv or spec.kv, **{"tail": spec.tail, "sink": spec.sink} | beside)
    return loading.load(model, kv=spec, executor=executor, device=device, dtype=dtype, layers=layers, **others)
