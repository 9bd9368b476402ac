"""`tq validate`: compare an executor with a reference, layer by layer, and name the layer and stage where they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import write_whole
from tq import options
from tq.commands.generate import read_prompts
from tq.commands.validate_report import about, as_csv, compare, print_rows, print_verdict, unexercised, write_replay
from tq.commands.validate_run import validated
from tq.output import unread_is_fine
from tq.ranks import tensor_parallel

if TYPE_CHECKING:
    from haarkv.models.base import DecoderModel
    from haarkv.validation.layers.self_test import SelfTestRow, Sensitivity

_SELF_TEST_TOKENS, _BLOCK_TOKENS = (120, 100), (24, 16)


@click.command("validate")
@options.model_option()
@options.prompt_options
@options.count("--prompt-tokens", "Use only the first N tokens of each prompt.", metavar="N")
@options.kv_options()
@options.executor_option()
@options.run_options()
@click.option("--reference", default="reference", show_default=True, help="The executor to compare with.")
@options.count("--steps", "Decode steps after the prefill.", 4, least=0)
@options.file("--csv", "Write the rows, with Ascend's columns.", "csv_file")
@options.file("--html", "Write a page with plots.", "html_file")
@options.file("--replay", "On failure, write the failing layer, shrunk, for `tq replay`.", "replay_file")
@click.option("--verbose", is_flag=True, help="Print a row for each layer too.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A.json B.json",
    help="Run nothing: what got better or worse from one --json report to another?",
)
@options.count("--repeat", "Run each layer so often again, and compare the executor with itself.", 1, least=0)
@click.option(
    "--self-test",
    is_flag=True,
    help="Plant faults, and with --model F.gguf in its blocks, and check that each is found; minutes.",
)
@click.option("--sensitivity", is_flag=True, help="Print the smallest error of scale that is caught, by stage; minutes.")
@options.json_option
@click.pass_context
@tensor_parallel
def command(context: click.Context, /, **given: Any) -> int:
    """Compare an executor with a reference, layer by layer.

    Each layer runs twice: on the reference's own input (which layer is wrong?), and on what the executor made of the layer
    before (how do errors grow?). Without --executor, the fastest executor of this machine is compared. Without --prompt, some
    are chosen that exercise everything; with your own, the verdict says what they did not.

    Exit code 0 if everything is within its bounds, 1 if not, 2 if nothing could be compared.
    """
    # Whoever reads only the first line of the output still gets the files and the exit code.
    with unread_is_fine():
        options.set_threads(given["threads"])
        if given["compare"]:
            _alone({"compare", "as_json", "threads"}, "--compare runs nothing")
            before, after = given["compare"]
            return compare(before, after, given["as_json"])
        if given["self_test"] and given["sensitivity"]:
            raise click.UsageError("--self-test and --sensitivity are two commands; give one of them")
        if given["self_test"]:
            return _self_test(given["model"], dtype=given["dtype"], as_json=given["as_json"])
        if given["sensitivity"]:
            return _sensitivity(dtype=given["dtype"], as_json=given["as_json"])
        if given["replay_file"] and given["ranks"].size > 1:
            raise click.UsageError("--replay writes a layer that one process runs; leave out --tensor-parallel")
        options.check_outputs(**{name: given[f"{name}_file"] for name in ("csv", "html", "replay")})
        has_prompts = bool(given["prompts"] or given["files"])
        if given["prompt_tokens"] and not has_prompts:
            raise click.UsageError("--prompt-tokens cuts your own prompts; give --prompt or --prompt-file as well")
        texts = read_prompts(given["prompts"], given["files"], given["ranks"]) if has_prompts else []
        ran = validated(texts, **given)
        if ran is None:  # rank 0 has the report
            return 0
        report, replay_note = ran.report, ""
        if given["replay_file"] and not report.passed:
            replay_note = write_replay(given["replay_file"], ran.runs)
        if given["csv_file"]:
            write_whole(given["csv_file"], as_csv(report))
        if given["html_file"]:
            from haarkv.validation.layers.page import page

            write_whole(given["html_file"], page(report, about(context, given["model"], ran.texts)))
        if given["as_json"]:
            from haarkv.validation.layers.report import as_json

            extra = {"replay": replay_note} if replay_note else {}
            print(json.dumps({"model": given["model"], **extra, **as_json(report)}))
        else:
            more = [unexercised(report, chosen=not has_prompts)]
            more += [("executor", f"{report.candidate} ({ran.note})")] if ran.note else []
            more += [("replay", replay_note)] if replay_note else []
            print_verdict(report, more)
            print_rows(report, given["verbose"])
        return 0 if report.passed else 1


def _alone(own: set[str], why: str) -> None:
    """Refuse options beside those that a way of running this command has a use for."""
    if others := [option for name, option in options.written().items() if name not in own]:
        raise click.UsageError(f"{why}; leave out {others[0]}")


_OWN = {"self_test", "sensitivity", "dtype", "as_json", "threads"}
_LAYERS = 3
_Subject = tuple[list["DecoderModel"], list[list[int]]]


def _first_layers(model: str, dtype: str | None, kept: Sequence[str], tokens: Sequence[int]) -> _Subject:
    """The first layers of a model, in each dtype that is asked for, and pieces of a text of code.

    Args:
        kept: types of blocks that stay as the file has them.
        tokens: of each piece.
    """
    from haarkv.models.catalog import load_model
    from haarkv.models.text import load_tokenizer
    from haarkv.tq_ops import reference
    from haarkv.validation.layers.self_test import first_layers

    dtypes = [dtype] if dtype else ["float32", "bfloat16"]
    models = [first_layers(load_model(model, name, keep_blocks=kept), _LAYERS) for name in dtypes]
    text = Path(str(reference.__file__)).read_text(encoding="utf-8")
    ids = load_tokenizer(model, models[0].config).encode(text)
    return models, [ids[:count] for count in tokens]


def _self_test(model: str, *, dtype: str | None, as_json: bool) -> int:
    """Plant every fault and print what the validator said; 0 if each was found where it was planted, else 1."""
    _alone(_OWN | {"model"}, "--self-test uses its own prompts and executor")
    from haarkv.executors.catalog import NAMES, block_types
    from haarkv.validation.layers.block_faults import runner_of_blocks
    from haarkv.validation.layers.delta_faults import small_hybrid
    from haarkv.validation.layers.self_test import self_test, self_test_of_blocks

    on_row, rows = None if as_json else _show_fault, []
    if "model" in options.written():
        models, prompts = _first_layers(model, dtype, [kind for name in NAMES for kind in block_types(name)], _BLOCK_TOKENS)
        if runner_of_blocks(models[0]) is None:
            raise click.UsageError(
                f"--self-test plants faults in blocks of a file, and no executor multiplies with any of {model} as they are; "
                "leave out --model, or give a .gguf file"
            )
        rows += self_test_of_blocks(models, prompts, on_row)
    models, prompts = _first_layers("tiny", dtype, (), _SELF_TEST_TOKENS)
    models += [small_hybrid(model.dtype, model.config.vocab_size) for model in models]
    rows += self_test(models, prompts, on_row)
    caught = sum(row.caught for row in rows)
    if as_json:
        print(json.dumps({"passed": caught == len(rows), "rows": [asdict(row) for row in rows]}))
    else:
        print(
            f"\n{caught} of {len(rows)} faults and controls judged right: " + ("passed" if caught == len(rows) else "FAILED")
        )
    return 0 if caught == len(rows) else 1


def _show_fault(row: SelfTestRow) -> None:
    widths = zip((8, 6, 40, 24, 24), (row.dtype, row.driven, row.fault, row.planted, row.found), strict=True)
    line = "  ".join(cell.ljust(width) for width, cell in widths)
    print(f"{'ok  ' if row.caught else 'MISS'}  {line}  {row.how}", flush=True)


# -- Sensitivity ---------------------------------------------------------------------------------------------------------
def _sensitivity(*, dtype: str | None, as_json: bool) -> int:
    """Print the smallest error of scale that is caught, by stage; 0."""
    _alone(_OWN, "--sensitivity uses its own model, prompts and executor")
    models, prompts = _first_layers("tiny", dtype, (), _SELF_TEST_TOKENS)
    from haarkv.validation.layers.self_test import sensitivity

    rows = [row for model in models for row in sensitivity(model, prompts, None if as_json else _show_sensitivity)]
    if as_json:
        print(json.dumps({"tokens": list(map(len, prompts)), "rows": [asdict(row) for row in rows]}))
    return 0


def _show_sensitivity(row: Sensitivity) -> None:
    error = "none" if row.error is None else f"{row.error:.1e}"
    widths = zip((8, 6, 28, 8), (row.dtype, row.driven, row.stage, error), strict=True)
    print(f"{'  '.join(cell.ljust(width) for width, cell in widths)}  {row.found}", flush=True)
