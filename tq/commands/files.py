"""`tq export`: a model as ONNX graphs; `tq quantize`: a GGUF file with fewer bits a weight."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING

import click

from haarkv.tq_ops.output_files import check_folder, check_writable, whole_folder
from tq import __version__, options
from tq.groups import Command
from tq.options import IntRange
from tq.output import loading, print_table, scoring, warn

if TYPE_CHECKING:
    import torch

    from haarkv.validation.planning.auto import CacheChoice


def _layers(value: str) -> tuple[int | None, int]:
    """A slice A:B of layers, or a number of them."""
    first, colon, second = value.partition(":")
    if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in (first, second)[: 1 + bool(colon)]):
        reason = f"{shown(value)} is not a slice of layers; write A:B, which leaves out layer B, such as 0:2"
        raise click.BadParameter(reason)
    return (int(first), int(second)) if colon else (None, int(first))


@click.command("export", cls=Command)
@options.model_option()
@click.option("--kv", default="tq4", show_default=True, help="The graphs hold only tq4.")
@options.file("--out", "A new folder; see --force.", metavar="DIR", required=True)
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True)
@click.option(
    "--layers", type=_layers, metavar="A:B", help="Export layers A to B-1 only. For random:SIZE also N: build only N layers."
)
@click.option("--opset", type=int, metavar="N", help="Opset of the standard operators [default: 23].")
@click.option(
    "--restore", is_flag=True,
    help="Restore quantized weights of a .gguf file to --dtype. Else graphs multiply with them in "
    "com.microsoft's MatMulNBits, where that is exact.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a folder that an earlier export wrote.")
@options.json_option
def export_command(
    model: str, kv: str, out: Path, dtype: str, layers: tuple[int | None, int] | None, opset: int | None, restore: bool,
    force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a model as two ONNX graphs, prefill and decode, and one file of weights. The cache holds packed codes and scales.

    DIR/export.json says what they are of; each graph names its inputs and outputs.
    """
    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.kv.kernel_support import ELSEWHERE, unsupported
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.tq_ops.onnx import EXPORT_SUPPORT

    try:
        from haarkv.models.qwen3_14b.onnx.export import ABOUT, Export, write_export
        from haarkv.models.qwen3_14b.onnx.model import DEFAULT_OPSET
        from haarkv.models.qwen3_14b.onnx.model import unsupported as graphs_unsupported
    except ImportError as error:
        raise InputError(f"tq export needs the package {error.name}; pip install 'haarkv[onnx]'") from None

    begin, end = layers or (None, None)
    config = read_config(model, end if begin is None else None)
    plan = KVSpec(kv).plan(config.num_layers)
    if reason := unsupported(EXPORT_SUPPORT, plan, config.kv_shapes) or graphs_unsupported(config):
        raise InputError(f"cannot export this: {reason.removesuffix(ELSEWHERE)}")
    span = range(config.num_layers) if begin is None or end is None else range(begin, end)
    if not 0 <= span.start < span.stop <= config.num_layers:
        raise InputError(f"{model} has {config.num_layers} layers; --layers {span.start}:{span.stop} does not fit them")
    export = Export(model, config, span, dtype, DEFAULT_OPSET if opset is None else opset, __version__, restore)
    if out.exists() and not force:
        raise InputError(f"{out} exists; name another folder, or replace an earlier export with --force")
    replaces = ABOUT if force else None
    check_folder(out, replaces=replaces)
    with whole_folder(out, replaces=replaces) as folder, loading(model) as progress:
        graphs = write_export(folder, export, progress)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if as_json:
        print(json.dumps({"model": model, "out": str(out), "graphs": graphs, "bytes": sizes, **export.about()}))
        return
    restored_types = sorted(set(export.blocks.values()) - set(export.kept_types))
    rows = [(name, f"{size:,}") for name, size in sizes.items()]
    print_table(f"{model} in {out}: layers {span.start} to {span.stop - 1}, {export.dtype}", ("file", "bytes"), rows)
    if restored_types:
        print(f"restored to {export.dtype}: {', '.join(restored_types)}")


# -- A GGUF file -------------------------------------------------------------------------------------------------------------


_WINDOW = 512
_OWN_TEXT = "own"


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
@click.option(
    "--kv-choice", is_flag=True,
    help="Choose the KV cache of the new file, and store it there: haarkv takes it by default, llama.cpp ignores it.",
)  # fmt: skip
@options.threads_option
@options.json_option
def quantize_command(
    model: str, out: Path, mix: str, imatrix: str | None, imatrix_tokens: int, kv_choice: bool, as_json: bool
) -> None:  # fmt: skip
    """Write MODEL as a .gguf file with fewer bits a weight. The file is written whole or not at all.

    Everything that a .gguf file says of itself stays: names, tokenizer, chat template. What has the type that it is to
    have is copied as it is. Rows that blocks of 256 do not divide get Q5_0 in place of Q4_K, and Q8_0 in place of Q6_K.
    With fewer bits than that the head has Q6_K, as llama.cpp gives it.

    MODEL is a .gguf file; of a folder in Hugging Face format, llama.cpp's convert_hf_to_gguf.py makes one.
    """
    from haarkv.models.catalog import open_source, read_config
    from haarkv.models.checkpoint import require_tensors
    from haarkv.models.gguf_quantize import write_quantized
    from haarkv.models.gguf_source import GGUFSource
    from haarkv.models.weights import checkpoint_tensors
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.output_files import whole_file

    if imatrix is None and "imatrix_tokens" in options.written_options():
        raise click.UsageError("--imatrix-tokens says how much of the text of --imatrix is read; give --imatrix as well")
    check_writable(out)
    mix = mix.lower()
    source = open_source(model)
    if not isinstance(source, GGUFSource):
        raise InputError(
            f"{model} is no .gguf file; llama.cpp's convert_hf_to_gguf.py makes one of a folder in Hugging Face format"
        )
    if out.resolve() == source.path.resolve():
        raise click.UsageError("--out is the model itself; name another file")
    entries = require_tensors(source.path, source.tensors(), checkpoint_tensors(read_config(model)))
    if again := sorted({entry.blocks for entry in entries.values() if entry.blocks} - {mix.upper()}):
        warn(f"{source.path} is quantized already ({', '.join(again)}): what that has lost stays lost")
    importance = None if imatrix is None else _importance(model, imatrix, imatrix_tokens)
    choice = None
    with whole_file(out) as half:
        weights_file = half.with_name("model.gguf") if kv_choice else half
        with loading(f"{out}") as progress:
            done = write_quantized(source, weights_file, mix, importance, progress)
        if kv_choice:
            # In a folder of its own: `half` lies in a locked one.
            choice = _choose(weights_file, plan_file := half.with_name("choice") / "plan")
            write_quantized(GGUFSource(weights_file), half, mix, choice=plan_file.read_bytes())
    size = out.stat().st_size
    if as_json:
        result = {"model": model, "out": str(out), "type": mix, "bytes": size, "tensors": dict(done.types)}
        result["kv_choice"] = choice and str(choice)
        print(json.dumps(result | {"copied": done.copied_tensors, "by_importance": done.weighted_tensors, "imatrix": imatrix}))
        return
    numbers = sum(math.prod(entry.shape) for entry in entries.values())
    tensors = ", ".join(f"{count} {name}" for name, count in done.types.items())
    importance_note = f"; errors of {done.weighted_tensors} counted by importance" if importance else ""
    rows = [("tensors", f"{tensors}; {done.copied_tensors} copied as they were{importance_note}"),
            ("size", f"{size / 1e9:.3f} GB, {8 * done.nbytes / numbers:.2f} bits a weight"),
            *([("KV cache", str(choice))] if choice else [])]  # fmt: skip
    print_table(f"{model} as {out}", [], rows)


def _choose(model: Path, plan_file: Path) -> CacheChoice:
    """Choose the default cache of a model, and write its plan file."""
    from haarkv.validation.planning.auto import choose, steps
    from haarkv.validation.planning.calibrate import load_subject
    from haarkv.validation.planning.choice_cache import remember

    with scoring(steps(str(model))) as on_step:
        choice = choose(load_subject(str(model), device="cpu"), on_step=on_step)
    remember(plan_file, choice)
    return choice


def _importance(model: str, text: str, tokens: int) -> dict[str, torch.Tensor]:
    """Importance of each weight's inputs on a text, or on text of the model itself."""
    import torch

    from haarkv.engine.loading import load
    from haarkv.tq_ops.errors import InputError
    from haarkv.validation.planning.common_text import write
    from haarkv.validation.planning.moments import importance
    from tq.commands.generate import read_prompt

    with loading(model) as progress:
        session = load(model, kv="bf16", executor="cpu", balance=False, progress=progress)
    if text == _OWN_TEXT:
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
