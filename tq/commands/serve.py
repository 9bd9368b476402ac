"""`tq serve`: vLLM's OpenAI-compatible server with a compressed KV cache."""

from __future__ import annotations

import sys

import click

_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": True}


@click.command("serve", context_settings=_CONTEXT)
@click.argument("model")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[VLLM FLAGS]...")
@click.option("--kv", default="tq4", show_default=True, metavar="FORMAT", help="tq4, or bf16 for vLLM's own cache.")
@click.option("--kv-metrics-per-layer", is_flag=True, help="Also report each layer in /metrics.")
def command(model: str, flags: tuple[str, ...], kv: str, kv_metrics_per_layer: bool) -> None:
    """Serve MODEL with vLLM and a KV cache in tq4. MODEL is tiny or a folder in Hugging Face format.

    The server listens on this machine alone, unless --host says otherwise. All other flags go to vLLM unchanged:

    \b
      tq serve tiny --port 8000
      tq serve Qwen/Qwen3-0.6B --max-model-len 8192 --tensor-parallel-size 2
    """
    from haarkv.models.catalog import TINY
    from haarkv.serving.serve import serve

    if model.startswith("random:"):
        raise click.UsageError(
            "vLLM does not build random models; give tiny, a folder in Hugging Face format, or a name that vLLM can load"
        )
    if model == "tiny":
        # Clients call it tiny too. A flag of the user comes later, and the last one counts.
        model, flags = str(TINY), ("--served-model-name", "tiny", *flags)
    serve(model, kv, flags, per_layer=kv_metrics_per_layer, say=lambda sentence: print(f"tq: {sentence}", file=sys.stderr))
