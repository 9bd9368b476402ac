"""The cache that `tq.load`'s arguments or a command's options ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from haarkv.engine import loading
from haarkv.engine.plans import SINKS, TAIL, WITH_CALIBRATION
from haarkv.engine.session import Session
from haarkv.executors.catalog import AUTO
from haarkv.models.catalog import read_config
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning.auto import LOSS, require_loss, steps
from haarkv.validation.planning.choice_cache import cache_for, saved_choice
from tq.output import say, scoring

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
        model: `tiny`, `random:SIZE`, a folder in Hugging Face format, a `.gguf` file (`~` is home), or the Hub id of a
            downloaded model.
        kv: a KV format, `k=NAME,v=NAME`, a `KVSpec`, or `auto`, the default: the smallest cache that loses at most `kv_loss`.
            It is chosen once for a model, in the time of a few prompts of 1,024 tokens: `~/.cache/haarkv` keeps it. With a
            calibration the default is k=lr4,v=tq4 with 124 recent and 4 first tokens in BF16.
        tail: recent tokens in BF16; the fewest that the format needs unless given.
        sink: first tokens in BF16; none unless given, or unless the default cache has some.
        skip_layers: layers in bf16; negative ones count from the end.
        calibration: learned coordinates for `lr2` to `lr5`: a file of `tq calibrate`, or its content.
        plan: a file of `tq plan`, which sets the whole cache.
        kv_loss: mean KL in nats a token that `auto` may lose; 0.002 unless given.
        on_choice: called with a line on what `auto` chose, and why.
        executor, device, dtype, layers, others: as `haarkv.engine.loading.load` takes them.
    Raises:
        InputError: arguments that exclude each other, do not exist, or do not fit together.
    """

    def choose(loss: float) -> KVSpec:
        return cache_for(
            str(model), loss=loss, layers=layers, executor=executor, dtype=dtype, device="cpu", on_choice=on_choice
        )

    args = {
        "model": str(model), "layers": layers, "executor": executor, "kv": kv, "calibration": calibration, "kv_tail": tail,
        "kv_sink": sink, "kv_skip_layers": tuple(skip_layers), "kv_plan": plan, "kv_loss": kv_loss,
    }  # fmt: skip
    return loading.load(
        model, kv=kv_request(args, choose), executor=executor, device=device, dtype=dtype, layers=layers, **others
    )


_OPTIONS = ("kv", "calibration", "kv_tail", "kv_sink", "kv_skip_layers")
"""Options that describe a cache, but a plan."""


def kv_spec(args: Mapping[str, Any]) -> KVSpec:
    """The cache that `options.kv_options` ask for, by their names, chosen now if need be."""
    spec = kv_request(args)
    return spec if isinstance(spec, KVSpec) else spec()


def kv_request(args: Mapping[str, Any], choose: Callable[[float], KVSpec] | None = None) -> KVSpec | Callable[[], KVSpec]:
    """The same, or what chooses it; `choose` maps a loss to the cache of `auto`."""
    kv, plan, calibration = args.get("kv"), args.get("kv_plan"), args.get("calibration")
    model, layers = args.get("model"), args.get("layers")
    # Where none is named: without a model what stores any, with a calibration what it is for, else one is chosen.
    default, is_named = KVSpec(), kv is not None or plan is not None or model is None
    if not is_named and calibration is not None:
        context = read_config(str(model), layers).max_position_embeddings
        default = replace(WITH_CALIBRATION, tail=min(TAIL, context), sink=min(SINKS, context))
    auto = plan is None and (kv == AUTO_KV or (not is_named and calibration is None))
    require_one_cache(args, auto=auto)
    if auto:
        loss = LOSS if args.get("kv_loss") is None else require_loss(args["kv_loss"])
        return partial(choose, loss) if choose else partial(choice, args, loss)
    if plan is not None:
        return plan_file.load(plan)
    if isinstance(kv, KVSpec):
        return kv
    if isinstance(calibration, Path | str):
        calibration = calibration_file.load(calibration)
    settings: dict[str, Any] = {"kv": default.kv if kv is None else kv, "tail": default.tail, "sink": default.sink}
    # 0 is asked for.
    settings |= {name: args[f"kv_{name}"] for name in ("tail", "sink", "skip_layers") if args.get(f"kv_{name}") is not None}
    return replace(calibration.spec if calibration else KVSpec(), **settings)


def cache_options(args: Mapping[str, Any]) -> list[str]:
    """The options in `args` that describe a cache, as they are written."""
    return [f"--{name.replace('_', '-')}" for name in _OPTIONS if args.get(name) not in (None, ())]


def require_one_cache(args: Mapping[str, Any], *, auto: bool) -> None:
    """Refuse options beside one that sets the whole cache, and a loss where no cache is chosen."""
    kv, plan = args.get("kv"), args.get("kv_plan")
    if args.get("kv_loss") is not None and not auto:
        raise InputError("--kv-loss says what --kv auto may lose; give --kv auto as well")
    if plan is None and not auto and not isinstance(kv, KVSpec):
        return
    whole, way_out = "--kv-plan" if plan is not None else "--kv auto" if auto else "a KVSpec", ""
    if auto and kv is None:
        whole, way_out = f"{whole}, the default,", ", or name a format with --kv"
    if others := [option for option in cache_options(args) if option != "--kv" or plan is not None]:
        raise InputError(f"{whole} sets the whole cache; leave out {others[0]}{way_out}")


def choice(args: Mapping[str, Any], loss: float) -> KVSpec:
    """The cache of `--kv auto`, chosen now or before."""
    model, layers, executor = args["model"], args.get("layers"), args.get("executor")
    if (spec := saved_choice(model, loss, layers, executor, say)) is not None:
        return spec
    # What another executor runs is chosen here on what can show its keys and queries.
    lines = list[str]()
    with scoring(steps(model, layers)) as on_step:
        spec = cache_for(
            model, loss=loss, layers=layers, on_step=on_step, executor=executor, dtype=args.get("dtype"), device="cpu",
            on_choice=lines.append,
        )  # fmt: skip
    for line in lines:
        say(line)
    return spec


def named_plans(plan_files: Sequence[str], others: Iterable[str], what: str) -> dict[str, KVSpec]:
    """Plans of some files by file name; a name that is in `others` too is refused. `what`: the plural noun for the error."""
    plans = {Path(name).stem: plan_file.load(name) for name in plan_files}
    if len(plans) < len(plan_files) or plans.keys() & {*others, *formats.names()}:
        raise InputError(f"two {what} would have the same name; a plan is named after its file: rename the file")
    return plans
