"""`tq cache`: sequences as the KV cache stores them, in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq import options
from tq.groups import Group
from tq.output import print_table

if TYPE_CHECKING:
    from haarkv.tq_ops.kv.cache_file import Origin


@click.group("cache", cls=Group)
def command() -> None:
    """Look at a stored KV cache. `tq generate --save-cache FILE` writes one, and --load-cache goes on with it."""


@command.command("info")
@click.argument("file", type=click.Path(path_type=Path))
@options.json_option
def info(file: Path, as_json: bool) -> None:
    """Check a file against its digests, and say what it holds."""
    from haarkv.tq_ops.kv.cache_file import load
    from haarkv.tq_ops.kv.shapes import blocks_for

    sequence, origin = load(file)
    report = {
        "tokens": len(sequence.token_ids), "stored": sequence.length, "blocks": blocks_for(sequence.length),
        "bytes": file.stat().st_size, "kv_bytes": sequence.nbytes,
        "formats": list(origin.layers), "tail": origin.tail, "sink": origin.sink,
        "weights": origin.weights, "tables": origin.tables, "made_by": origin.made_by,
    }  # fmt: skip
    if as_json:
        print(json.dumps({"file": str(file), **report, "model": origin.shape.as_json()}))
        return
    rows = [
        ("tokens", f"{report['tokens']:,}, of them {sequence.length:,} stored"),
        ("bytes", f"{report['bytes']:,}, K and V {sequence.nbytes:,} in {report['blocks']:,} blocks a layer"),
        ("cache", _formats(origin)),
        ("model", f"{origin.shape}; weights {origin.weights}"),
        ("made by", origin.made_by),
        ("check", "every block is as its digest says"),
    ]
    print_table(str(file), [], rows)


def _formats(origin: Origin) -> str:
    different = list(dict.fromkeys(origin.layers))
    words = [different[0] if len(different) == 1 else f"{len(different)} formats by layer, {', '.join(different)}"]
    words += [f"tail {origin.tail}"] * (origin.tail is not None) + [f"sink {origin.sink}"] * bool(origin.sink)
    return "; ".join(words)
