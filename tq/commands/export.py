"""`tq export`: write a model with its packed cache as ONNX graphs, for compilers and runtimes without Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from reprlib import repr as shown

import click

from haarkv.tq_ops.output_files import check_folder, whole_folder
from tq import __version__, options
from tq.groups import Command
from tq.output import loading, print_table


def _layers(value: str) -> tuple[int | None, int]:
    """A slice A:B of layers, or a number of them."""
    first, colon, second = value.partition(":")
    if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in (first, second)[: 1 + bool(colon)]):
        said = f"{shown(value)} is not a slice of layers; write A:B, which leaves out layer B, such as 0:2"
        raise click.BadParameter(said)
    return (int(first), int(second)) if colon else (None, int(first))


@click.command("export", cls=Command)
@options.model_option()
@click.option("--kv", default="tq4", show_default=True, help="The graphs hold only tq4.")
@options.file("--out", "A new folder; see --force.", metavar="DIR", required=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="[default: float16 for atc, else float32]"
)
@click.option(
    "--layers", type=_layers, metavar="A:B", help="Export layers A to B-1 only. For random:SIZE also N: build only N layers."
)
@click.option("--opset", type=int, metavar="N", help="Opset of the standard operators [default: 23; 15 for atc].")
@click.option(
    "--for", "target", type=click.Choice(["onnxruntime", "atc"]), default="onnxruntime", show_default=True,
    help="The runtime to write for.",
)  # fmt: skip
@click.option(
    "--restore", is_flag=True,
    help="Restore quantized weights of a .gguf file to --dtype, as atc does. Else graphs multiply with them in "
    "com.microsoft's MatMulNBits, where that is exact.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a folder that an earlier export wrote.")
@options.json_option
def command(
    model: str, kv: str, out: Path, dtype: str | None, layers: tuple[int | None, int] | None, opset: int | None, target: str,
    restore: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a model as two ONNX graphs, prefill and decode, and one file of weights. The cache holds packed codes and scales.

    DIR/export.json says what they are of; each graph names its inputs and outputs. --for atc writes graphs of static shapes
    for Ascend's compiler, and atc.sh.
    """
    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.tq_ops.kv.reads import ELSEWHERE, unsupported
    from haarkv.tq_ops.onnx.reads import EXPORTED

    try:
        from haarkv.models.qwen3_14b.onnx.export import ABOUT, ATC_OPSET, Export, write_export
        from haarkv.models.qwen3_14b.onnx.spec import DEFAULT_OPSET
        from haarkv.models.qwen3_14b.onnx.spec import unsupported as graphs_unsupported
    except ImportError as error:
        raise InputError(f"tq export needs the package {error.name}; pip install 'haarkv[onnx]'") from None

    begin, end = layers or (None, None)
    config = read_config(model, end if begin is None else None)
    plan = KVSpec(kv).plan(config.num_layers)
    if reason := unsupported(EXPORTED, plan, config.kv_shapes) or graphs_unsupported(config):
        raise InputError(f"cannot export this: {reason.removesuffix(ELSEWHERE)}")
    span = range(config.num_layers) if begin is None or end is None else range(begin, end)
    if not 0 <= span.start < span.stop <= config.num_layers:
        raise InputError(f"{model} has {config.num_layers} layers; --layers {span.start}:{span.stop} does not fit them")
    atc = target == "atc"
    export = Export(
        model, config, span, dtype or ("float16" if atc else "float32"),
        (ATC_OPSET if atc else DEFAULT_OPSET) if opset is None else opset, atc, __version__, restore,
    )  # fmt: skip
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
    restored = sorted(set(export.blocks.values()) - set(export.kept))
    rows = [(name, f"{size:,}") for name, size in sizes.items()]
    print_table(f"{model} in {out}: layers {span.start} to {span.stop - 1}, {export.dtype}", ("file", "bytes"), rows)
    if restored:
        print(f"restored to {export.dtype}: {', '.join(restored)}")
