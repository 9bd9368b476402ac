"""The options that describe a KV cache, and the cache that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq.option_kinds import Decorator, IntRange, Numbers, set_threads, together, written
from tq.output import say, scoring

if TYPE_CHECKING:
    from haarkv.tq_ops.kv.plan import KVSpec


def _kv_option(default: str) -> Decorator:
    return click.option(
        "--kv", show_default=default,
        help="A format of `tq formats`, or k=NAME,v=NAME; auto: the smallest cache that loses at most --kv-loss.",
    )  # fmt: skip


_DEFAULT = "auto; above a billion weights and with Gated DeltaNet k=tq6,v=tq4 with a tail; of toys and random models tq4"
kv_option = _kv_option(_DEFAULT)
loss_option = click.option(
    "--kv-loss", type=float, metavar="NATS", help="What --kv auto may lose: mean KL a token [default: 0.002]."
)
plan_option = click.option("--kv-plan", metavar="FILE", help="A plan from `tq plan`; it sets every layer's formats.")
calibration_option = click.option(
    "--calibration", metavar="FILE", help="Learned coordinates from `tq calibrate`, for formats lr2 to lr5."
)
skip_layers_option = click.option(
    "--kv-skip-layers", type=Numbers(least=None), default=(), metavar="LIST", help="Keep these layers in BF16: 0,1,-1."
)
tail_option = click.option("--kv-tail", type=IntRange(min=0), metavar="R", help="Keep the last R tokens in BF16.")
sink_option = click.option("--kv-sink", type=IntRange(min=0), metavar="S", help="Keep the first S tokens in BF16.")
_BESIDE = (tail_option, sink_option, skip_layers_option)


balance_option = click.option(
    "--balance", type=click.Choice(["auto", "off"]), default="auto", show_default=True,
    help="Scale uneven channels of K and V; the model stays the same, and the cache loses less.",
)  # fmt: skip
collapse_option = click.option("--allow-collapse", is_flag=True, help="Only warn where text from this cache would be garbage.")


def kv_options(kv: bool = True, default: str = _DEFAULT) -> Decorator:
    """Give a command `--kv-tail`, `--kv-sink` and `--kv-skip-layers`; with `kv`, all that describe the cache.

    Args:
        default: what help says of a cache that is not named.
    """
    options = (_kv_option(default), loss_option, calibration_option, *_BESIDE, plan_option)
    return together(*options) if kv else together(*_BESIDE)


def kv_spec(given: Mapping[str, Any]) -> KVSpec:
    """The cache that those options ask for.

    Args:
        given: a command's arguments by name; an argument that the command lacks has its default.
    Raises:
        click.UsageError: a plan file together with an option that it already sets.
        InputError: a file that is not a plan.
    """
    from haarkv.tq_ops.kv import calibration_file
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.tq_ops.kv.plan_file import load

    file = given.get("kv_plan")
    by_default = given.get("kv") is None and file is None
    default = _default_cache(given) if by_default else KVSpec(KVSpec.kv if given.get("kv") is None else given["kv"])
    if file is None and (default is None or default.kv == "auto"):
        return _chosen(given)
    if given.get("kv_loss") is not None:
        raise click.UsageError("--kv-loss says what --kv auto may lose; give --kv auto as well")
    if file is None:
        assert default is not None
        learned = KVSpec() if given.get("calibration") is None else calibration_file.load(given["calibration"]).spec
        # 0 is asked for as well.
        tail = default.tail if given["kv_tail"] is None else given["kv_tail"]
        sink = default.sink if given["kv_sink"] is None else given["kv_sink"]
        return replace(learned, kv=default.kv, tail=tail, sink=sink, skip_layers=given["kv_skip_layers"])
    for name, option in written().items():
        if name in ("kv", "calibration", "kv_tail", "kv_sink", "kv_skip_layers"):
            raise click.UsageError(f"--kv-plan sets the whole cache; leave out {option}")
    return load(file)


def _default_cache(given: Mapping[str, Any]) -> KVSpec | None:
    """Without `--kv`: what stores any model, with a calibration what it is for, and None where a cache is chosen."""
    from haarkv.engine.plans import default_spec
    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.validation.planning.remembered import default_cache

    if given.get("calibration") is not None and "model" in given:
        return default_spec(learned=True, context=read_config(given["model"], given.get("layers")).max_position_embeddings)
    return default_cache(given["model"], given.get("layers"), given.get("executor")) if "model" in given else KVSpec()


def _chosen(given: Mapping[str, Any]) -> KVSpec:
    """The cache of `--kv auto`, chosen now or before; what was chosen now is said in one line."""
    for name, option in written().items():
        if name in ("calibration", "kv_tail", "kv_sink", "kv_skip_layers"):
            auto, other = ("--kv auto", "") if given.get("kv") else ("--kv auto, the default,", ", or name a format with --kv")
            raise click.UsageError(f"{auto} sets the whole cache; leave out {option}{other}")
    if "model" not in given:
        raise click.UsageError("--kv auto is for commands that run one model; name a format")
    from haarkv.models.catalog import read_config
    from haarkv.validation.planning.auto import LOSS, require_loss, steps
    from haarkv.validation.planning.remembered import cache_for, chosen_before, file_for, fixed_cache

    set_threads(given.get("threads"))
    layers, executor = given.get("layers"), given.get("executor")
    loss = LOSS if given.get("kv_loss") is None else require_loss(given["kv_loss"])
    if (known := chosen_before(file_for(given["model"], loss, layers, executor))) is not None:
        return known
    fixed = fixed_cache(read_config(given["model"], layers), executor)
    say(
        "choosing a KV cache for this model: it takes minutes, longer for larger models, and is done once; to start at once, "
        f"give --kv {fixed.kv} --kv-tail {fixed.tail} --kv-sink {fixed.sink}"
    )
    # What another executor runs is chosen here on what can show its keys and queries.
    said = list[str]()
    with scoring(steps(given["model"], layers)) as on_step:
        spec = cache_for(
            given["model"], loss=loss, layers=layers, executor=executor, dtype=given.get("dtype"), device="cpu",
            on_step=on_step, on_choice=said.append,
        )  # fmt: skip
    for line in said:
        say(line)
    return spec


def named_plans(plan_files: Sequence[str], taken: Iterable[str], what: str) -> dict[str, KVSpec]:
    """The plans of some files, each by its file's name.

    Args:
        taken: names of formats that stand beside them.
        what: what would have the same name, in the plural.
    Raises:
        click.UsageError: a name would stand for two.
        InputError: a file that is not a plan.
    """
    from haarkv.tq_ops import formats
    from haarkv.tq_ops.kv.plan_file import load

    plans = {Path(name).stem: load(name) for name in plan_files}
    if len(plans) < len(plan_files) or plans.keys() & {*taken, *formats.names()}:
        raise click.UsageError(f"two {what} would have the same name; a plan is named after its file: rename the file")
    return plans
