"""`tq quantize`: a model as a GGUF file with fewer bits a weight, which llama.cpp reads as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from haarkv.tq_ops.output_files import check_writable
from tq import options
from tq.groups import Command
from tq.options import IntRange
from tq.output import loading, print_table, scoring, warn

if TYPE_CHECKING:
    import torch


_WINDOW = 512
_OWN = "own"


@click.command("quantize", cls=Command)
@click.argument("model")
@options.file("--out", "The GGUF file to write.", "out", required=True)
@click.option(
    "--type", "mix", default="q4_k_m", show_default=True, metavar="TYPE",
    help="q4_k_m (Q4_K, and Q6_K where it costs most), q6_k, q4_k, q8_0, q5_1, q5_0, q4_1, q4_0, bf16, f16 or f32.",
)  # fmt: skip
@click.option(
    "--imatrix",
    metavar="FILE|own",
    help="Count errors by what weights are multiplied with on this UTF-8 text, or on what the model writes itself.",
)
@click.option("--imatrix-tokens", type=IntRange(64, 2**20), default=8192, show_default=True, help="Of that text.")
@options.threads_option
@options.json_option
def command(
    model: str, out: Path, mix: str, imatrix: str | None, imatrix_tokens: int, threads: int | None, as_json: bool
) -> None:  # fmt: skip
    """Write MODEL as a .gguf file with fewer bits a weight. The file is written whole or not at all.

    Everything that a .gguf file says of itself stays: names, tokenizer, chat template. What has the type that it is to
    have is copied as it is. Rows that blocks of 256 do not divide get Q5_0 in place of Q4_K, and Q8_0 in place of Q6_K.
    With fewer bits than that the head has Q6_K, as llama.cpp gives it.

    Folders in Hugging Face format are written of llama, mistral, qwen2, qwen3, qwen3_moe and gemma3_text models whose
    tokenizer llama.cpp has.
    """
    from haarkv.models.catalog import read_config, source_of
    from haarkv.models.checkpoint import held_for
    from haarkv.models.gguf_folder import FolderOrigin
    from haarkv.models.gguf_source import GGUFSource
    from haarkv.models.gguf_writer import FileOrigin, write_quantized
    from haarkv.models.hf_folder import HFFolder
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.output_files import whole_file

    if imatrix is None and "imatrix_tokens" in options.written():
        raise click.UsageError("--imatrix-tokens says how much of the text of --imatrix is read; give --imatrix as well")
    options.set_threads(threads)
    check_writable(out)
    mix = mix.lower()
    source = source_of(model)
    if source is None:
        raise InputError(f"{model} has random weights, which nobody needs in a file; name a folder or a .gguf file")
    if out.resolve() == source.path.resolve():
        raise click.UsageError("--out is the model itself; name another file")
    config = read_config(model)
    held = held_for(source, config)
    origin = FileOrigin(source) if isinstance(source, GGUFSource) else FolderOrigin(HFFolder(source.path), config, held)
    if again := sorted({of.blocks for of in held.values() if of.blocks} - {mix.upper()}):
        warn(f"{source.path} is quantized already ({', '.join(again)}): what that has lost stays lost")
    found = None if imatrix is None else _importance(model, imatrix, imatrix_tokens)
    with loading(f"{out}") as progress, whole_file(out) as half:
        done = write_quantized(origin, half, mix, found, progress)
    size = out.stat().st_size
    if as_json:
        said = {"model": model, "out": str(out), "type": mix, "bytes": size, "tensors": dict(done.types)}
        print(json.dumps(said | {"copied": done.copied, "by_importance": done.weighted, "imatrix": imatrix}))
        return
    numbers = sum(_count(of.shape) for of in held.values())
    tensors = ", ".join(f"{count} {name}" for name, count in done.types.items())
    counted = f"; errors of {done.weighted} counted by importance" if found else ""
    rows = [("tensors", f"{tensors}; {done.copied} copied as they were{counted}"),
            ("size", f"{size / 1e9:.3f} GB, {8 * done.nbytes / numbers:.2f} bits a weight")]  # fmt: skip
    print_table(f"{model} as {out}", [], rows)


def _count(shape: tuple[int, ...]) -> int:
    import math

    return math.prod(shape)


def _importance(model: str, text: str, tokens: int) -> dict[str, torch.Tensor]:
    """What weights are multiplied with on a text, or on what the model writes itself."""
    import torch

    from haarkv.engine.importance import importance
    from haarkv.engine.loading import load
    from haarkv.tq_ops.errors import InputError
    from haarkv.validation.planning.own_text import write
    from tq.commands.generate import read_prompt

    with loading(model) as progress:
        session = load(model, kv="bf16", executor="cpu", balance=False, progress=progress)
    if text == _OWN:
        with scoring(tokens) as on_step:
            ids = write(session, tokens, on_step=on_step)
    else:
        ids = torch.tensor(session.tokenizer.encode(read_prompt(text, "--imatrix")))[:tokens]
    window = min(_WINDOW, session.config.max_position_embeddings)
    windows = [part for part in torch.split(ids, window) if len(part) == window] or [ids]
    if not len(ids):
        raise InputError(f"--imatrix {text} is empty")
    with scoring(sum(map(len, windows))) as on_step:
        return importance(session, windows, on_step)
