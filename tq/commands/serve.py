"""`tq serve`: vLLM's OpenAI-compatible server with a packed KV cache."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from tq import options
from tq.groups import Command

_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": True}


_KV = (
    "A format of `tq formats`, or k=NAME,v=NAME; bf16 is vLLM's own; auto is what `tq generate --kv auto` chose for this "
    "model before [default: that; where there is none, or beside other options, k=tq6,v=tq4, with --calibration k=lr4,v=tq4]."
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
    from haarkv.models.catalog import TINY, find_model
    from haarkv.serving.serve import cache_options, require_vllm, serve
    from tq.loading import AUTO_KV, require_one_cache
    from tq.loading import cache_options as options_in

    if model.endswith(".gguf") and Path(model).expanduser().is_file():
        raise click.UsageError(
            "tq serve reads no GGUF file; give a folder in Hugging Face format, or use tq chat and tq generate"
        )
    require_vllm()
    if model.startswith("random:"):
        raise click.UsageError(
            "vLLM does not build random models; give tiny, a folder in Hugging Face format, or a name that vLLM can load"
        )
    kv, plan, loss = cache["kv"], cache["kv_plan"], cache["kv_loss"]
    auto = kv == AUTO_KV or (plan is None and not options_in(cache))
    require_one_cache(cache, auto=auto)
    notes = list[str]()

    def say(sentence: str) -> None:
        for line in (*notes, sentence):
            print(f"tq: {line}", file=sys.stderr)
        notes.clear()

    if auto:
        plan = _remembered_plan(model, loss, kv == AUTO_KV, notes)
        kv = _format(model, has_calibration=False) if plan is None else None
        if kv is not None:
            notes.append(f"no cache was chosen for this model, so it gets {kv}; {_how(model)}")
    elif kv is None and plan is None:
        kv = _format(model, has_calibration=cache["calibration"] is not None)
    if model in ("tiny", "tiny-hybrid"):
        # Clients call it so too. A flag of the user comes later, and the last one counts.
        model, flags = str(find_model(model)), ("--served-model-name", model, "--tokenizer", str(TINY), *flags)
    vllm_options = cache_options(
        kv, cache["calibration"], plan, skip_layers=cache["kv_skip_layers"], tail=cache["kv_tail"], sink=cache["kv_sink"] or 0,
        balance=balance == "auto", allow_collapse=allow_collapse,
    )  # fmt: skip
    serve(model, vllm_options, flags, say=say)


def _remembered_plan(model: str, loss: float | None, is_required: bool, notes: list[str]) -> str | None:
    """The file of the cache that `--kv auto` chose for a model before; None where there is none and none is required. Adds to
    `notes`.
    """
    from haarkv.tq_ops.errors import InputError
    from haarkv.validation.planning.auto import LOSS
    from haarkv.validation.planning.choice_cache import chosen_before, file_for

    try:
        file = file_for(model, LOSS if loss is None else loss)
    except InputError:  # a name that only vLLM can load, or no model at all, which is said elsewhere
        file = None
    if file is not None and chosen_before(file) is not None:
        notes.append("this is the cache that --kv auto chose for this model before; --kv tq4 is the plain one")
        return str(file)
    if is_required or loss is not None:
        how = _how(model, "" if loss is None else f" --kv-loss {loss:g}")
        raise InputError(f"no cache was chosen for {model} yet; {how}, which tq serve then takes")
    return None


def _format(model: str, has_calibration: bool) -> str:
    """The default format: tq4 for toys, else one that loses little on any model, without a tail."""
    from haarkv.engine.plans import default_spec
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.validation.planning.choice_cache import default_cache

    if not has_calibration:
        with suppress(InputError):  # as above
            if default_cache(model) == KVSpec():
                return KVSpec.kv
    return default_spec(has_calibration).kv


def _how(model: str, more: str = "") -> str:
    return f"`tq generate --model {model} --kv auto{more} --prompt Hello` chooses one"
