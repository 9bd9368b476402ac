"""`tq info`: a model's shapes, and what its KV cache takes in every format."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tq.options import json_option, layers_option
from tq.output import print_table

if TYPE_CHECKING:
    from haarkv.models.base import DecoderConfig

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class _Memory(click.ParamType[int]):
    """Bytes, from 24GiB, 24G, 512MiB or a plain number."""

    name = "memory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is not an amount of memory; write it like 24GiB", param, ctx)
        size = float(match[1]) * _UNITS[match[2].upper()]
        if size == float("inf"):
            self.fail("that is too much memory to count", param, ctx)
        return int(size)


@click.command("info")
@click.argument("model", default="tiny")
@click.option(
    "--memory", type=_Memory(), default="24GiB", show_default=True, help="Room for the weights in bf16 and the KV cache."
)
@layers_option
@json_option
def command(model: str, memory: int, layers: int | None, as_json: bool) -> None:
    """Show a model's shapes, and for every KV format its bytes a token and the longest context that fits.

    MODEL is tiny (the default), random:SIZE, a folder in Hugging Face format (~ is home), or the Hub id of a model already
    downloaded. The weights are not read.
    """
    from haarkv.models.catalog import read_config

    config = read_config(model, layers)
    weights = 2 * config.num_parameters()
    rows = _kv_rows(config, memory - weights)
    if as_json:
        shapes = {**asdict(config), "parameters": config.num_parameters(), "weight_bytes": weights}
        print(json.dumps({"model": model, **shapes, "memory": memory, "kv": rows}))
        return
    print_table(model, [], _shape_rows(config, weights))
    cells = [
        (
            r["format"],
            f"{r['bytes_per_token']:,.0f}",
            f"{r['ratio']:.2f}x",
            f"{r['max_tokens']:,}" if weights < memory else "–",
        )
        for r in rows
    ]
    title = f"KV cache; tokens that fit in {memory / 2**30:.1f} GiB beside the weights"
    print_table(title, ["format", "bytes/token", "vs bf16", "tokens"], cells)


def _shape_rows(config: DecoderConfig, weights: int) -> list[tuple[str, str]]:
    return [
        ("layers", f"{config.num_layers}"),
        ("hidden", f"{config.hidden_size}"),
        ("heads", f"{config.num_heads} over {config.num_kv_heads} KV heads, head_dim {config.head_dim}"),
        ("MLP", f"{config.intermediate_size}"),
        ("vocabulary", f"{config.vocab_size}" + (", head tied to the embedding" if config.tie_word_embeddings else "")),
        ("RoPE", f"theta {config.rope_theta:g}, up to {config.max_position_embeddings:,} positions"),
        ("parameters", f"{config.num_parameters():,}; {weights / 1e9:.3f} GB in bf16"),
    ]


def _kv_rows(config: DecoderConfig, free: int) -> list[dict[str, Any]]:
    """For every format with a layout for this head_dim: bytes a token, and the tokens that fit in whole blocks."""
    from haarkv.engine.plans import plan_for
    from haarkv.tq_ops import formats
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.kv.plan import BLOCK_SIZE, KVSpec

    def size_of(name: str) -> float:
        return plan_for(KVSpec(name), config).bytes_per_token(config.num_kv_heads, config.head_dim)

    rows = []
    for name in formats.names():
        try:
            size = size_of(name)
        except InputError:
            continue
        blocks = max(0, int(free // (size * BLOCK_SIZE)))
        rows.append(
            {"format": name, "bytes_per_token": size, "ratio": size_of("bf16") / size, "max_tokens": blocks * BLOCK_SIZE}
        )
    return rows
