"""`tq serve`: vLLM's OpenAI-compatible server with a packed KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tq import options
from tq.groups import Command
from tq.output import say

_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": True}


_KV = (
    "A format of `tq formats`, or k=NAME,v=NAME; bf16 is vLLM's own; auto, as for `tq generate` "
    "[default: auto; with --calibration k=lr4,v=tq4 with a tail]."
)


@click.command("serve", cls=Command, context_settings=_CONTEXT)
@click.argument("model")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[VLLM FLAGS]...")
@click.option("--kv", metavar="FORMAT", help=_KV)
@options.loss_option
@options.calibration_option
@options.bf16_options
@options.plan_option
@options.balance_option
@options.collapse_option
def command(model: str, flags: tuple[str, ...], balance: str, allow_collapse: bool, **cache: Any) -> None:
    """Serve MODEL with vLLM and a packed KV cache. MODEL is tiny, tiny-hybrid, a folder in Hugging Face
    format, or a name that vLLM can load.

    The server listens on this machine alone, unless --host says otherwise. All other flags go to vLLM unchanged:

    \b
      tq serve tiny --port 8000
      tq serve tiny --kv k=tq5,v=tq4 --kv-tail 124 --kv-sink 4
      tq serve tiny --kv-plan plan.safetensors
      tq serve Qwen/Qwen3-0.6B --max-model-len 8192 --tensor-parallel-size 2
    """
    from haarkv.engine.plans import WITH_CALIBRATION
    from haarkv.models.catalog import TINY, find_model
    from haarkv.serving.serve import as_vllm_takes_it, cache_options, require_vllm, serve
    from tq.loading import AUTO_KV, require_one_cache

    if model.endswith(".gguf") and Path(model).expanduser().is_file():
        raise click.UsageError(
            "tq serve reads no GGUF file; give a folder in Hugging Face format, or use tq chat and tq generate"
        )
    require_vllm()
    if model.startswith("random:"):
        raise click.UsageError(
            "vLLM does not build random models; give tiny, a folder in Hugging Face format, or a name that vLLM can load"
        )
    as_vllm_takes_it(model)
    kv, plan, calibration, tail, sink = (cache[name] for name in ("kv", "kv_plan", "calibration", "kv_tail", "kv_sink"))
    auto = kv == AUTO_KV or (kv, plan, calibration) == (None, None, None)
    require_one_cache(cache, auto=auto)
    if auto:
        kv, plan = None, _plan_file(model, cache["kv_loss"])
    elif kv is None and plan is None:
        kv = WITH_CALIBRATION.kv
        tail, sink = (WITH_CALIBRATION.tail if tail is None else tail), (WITH_CALIBRATION.sink if sink is None else sink)
    if model in ("tiny", "tiny-hybrid"):
        # Clients call it so too. A flag of the user comes later, and the last one counts.
        model, flags = str(find_model(model)), ("--served-model-name", model, "--tokenizer", str(TINY), *flags)
    vllm_options = cache_options(
        kv, calibration, plan, skip_layers=cache["kv_skip_layers"], tail=tail, sink=sink or 0, balance=balance == "auto",
        allow_collapse=allow_collapse,
    )  # fmt: skip
    serve(model, vllm_options, flags, say=say)


def _plan_file(model: str, loss: float | None) -> str:
    """The file of the cache that `auto` chose for a model before, or chooses now; vLLM's processes read it there."""
    import torch

    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.errors import InputError
    from haarkv.validation.planning.auto import LOSS, NO_TAIL, require_loss
    from haarkv.validation.planning.choice_cache import chosen_before, file_for
    from tq.loading import choice

    loss = LOSS if loss is None else require_loss(loss)
    try:
        has_window = any(shape and shape.window for shape in read_config(model).kv_shapes)
        executor = NO_TAIL if has_window or torch.cuda.is_available() else None
        choice({"model": model, "executor": executor}, loss)
        file = file_for(model, loss, executor=executor)
    except InputError as error:
        raise InputError(
            f"no cache can be chosen for {model}: {error}; name one, such as --kv k=tq6,v=tq4, or download the model"
        ) from error
    if chosen_before(file) is None:
        raise InputError(f"the chosen cache cannot be stored as {file}, where vLLM reads it; name a cache with --kv")
    return str(file)
