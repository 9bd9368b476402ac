"""`tq cache`: sequences as the KV cache stores them, in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import count_noun
from tq import options
from tq.commands.generate import read_prompts
from tq.groups import Group
from tq.output import err, prefilling, print_table, warn

if TYPE_CHECKING:
    from haarkv.tq_ops.kv.cache_file import Origin

_FILE = click.Path(path_type=Path)
_OUT = options.file("--out", "The file to write.", required=True)
_COMPRESS = click.option(
    "--compress/--no-compress", default=True, show_default=True,
    help="Pack the file without loss, where that saves 5 % or more.",
)  # fmt: skip


@click.group("cache", cls=Group)
def command() -> None:
    """Store what a prompt leaves in the KV cache, and look at it.

    `tq generate --load-cache FILE` goes on with such a file, and --save-cache writes one.
    """


@command.command("save")
@options.model_option()
@options.prompt_options
@options.session_options
@options.chat_options
@_COMPRESS
@_OUT
def save(
    prompts: tuple[str, ...], files: tuple[str, ...], compress: bool, out: Path, **args: Any
) -> None:  # fmt: skip
    """Run a prompt through the model, and store its tokens with their K and V."""
    from haarkv.models.parallel import SINGLE_RANK
    from haarkv.tq_ops.output_files import check_writable

    texts = read_prompts(prompts, files, SINGLE_RANK)
    if len(texts) > 1:
        raise click.UsageError("a file stores one sequence; give one prompt")
    check_writable(out)
    session = options.open_session(args)
    with prefilling() as on_prefill:
        result = session.generate(
            texts, max_new_tokens=1, on_prefill=on_prefill, on_warning=warn, keep=True,
            **{name: args[name] for name in options.CHAT},
        )  # fmt: skip
    whole = result.stored[0]
    sequence = replace(whole, token_ids=whole.token_ids[: whole.length])
    session.save_cache(out, sequence, compress=compress)
    print(f"{out}: {count_noun(sequence.length, 'token')}, {out.stat().st_size:,} bytes, {result.kv.format}", file=err().file)


@command.command("info")
@click.argument("file", type=_FILE)
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
