"""`tq serve`: vLLM's OpenAI-compatible server with a compressed KV cache."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tq import options

_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": True}


@click.command("serve", context_settings=_CONTEXT)
@click.argument("model")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[VLLM FLAGS]...")
@click.option("--kv", metavar="FORMAT", help="A format of `tq formats`, or k=NAME,v=NAME [default: tq4]; bf16 is vLLM's own.")
@options.calibration_option
@options.tail_option
@options.sink_option
@options.skip_layers_option
@options.plan_option
@options.balance_option
@options.collapse_option
@click.option("--kv-metrics-per-layer", is_flag=True, help="Also report each layer in /metrics.")
def command(
    model: str, flags: tuple[str, ...], kv: str | None, calibration: str | None, kv_tail: int | None, kv_sink: int,
    kv_skip_layers: tuple[int, ...], kv_plan: str | None, balance: str, allow_collapse: bool, kv_metrics_per_layer: bool,
) -> None:  # fmt: skip
    """Serve MODEL with vLLM and a packed KV cache. MODEL is tiny or a folder in Hugging Face format.

    The server listens on this machine alone, unless --host says otherwise. All other flags go to vLLM unchanged:

    \b
      tq serve tiny --port 8000
      tq serve tiny --kv k=tq5,v=tq4 --kv-tail 124 --kv-sink 4
      tq serve tiny --kv-plan plan.safetensors
      tq serve Qwen/Qwen3-0.6B --max-model-len 8192 --tensor-parallel-size 2
    """
    from haarkv.models.catalog import TINY
    from haarkv.serving.serve import Cache, serve

    if model.startswith("random:"):
        raise click.UsageError(
            "vLLM does not build random models; give tiny, a folder in Hugging Face format, or a name that vLLM can load"
        )
    given = {
        "--kv": kv, "--calibration": calibration, "--kv-tail": kv_tail, "--kv-sink": kv_sink or None,
        "--kv-skip-layers": kv_skip_layers or None,
    }  # fmt: skip
    if kv_plan is not None and (others := [option for option, value in given.items() if value is not None]):
        raise click.UsageError(f"--kv-plan sets the whole cache; leave out {others[0]}")
    if model == "tiny":
        # Clients call it tiny too. A flag of the user comes later, and the last one counts.
        model, flags = str(TINY), ("--served-model-name", "tiny", *flags)
    learned, plan = (None if file is None else Path(file) for file in (calibration, kv_plan))
    cache = Cache(
        kv, learned, plan, kv_skip_layers, balance == "auto", allow_collapse, kv_metrics_per_layer, tail=kv_tail, sink=kv_sink
    )
    serve(model, cache, flags, say=lambda sentence: print(f"tq: {sentence}", file=sys.stderr))
