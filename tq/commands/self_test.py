"""`tq dev self-test`: does the validator find what is wrong?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq import options
from tq.groups import Command
from tq.output import print_judged, unread_is_fine

if TYPE_CHECKING:
    from haarkv.models.base import DecoderModel
    from haarkv.validation.layers.self_test import SelfTestRow

_TOKENS, _BLOCK_TOKENS = (120, 100), (24, 16)
"""Tokens of the prompts, and of those for a file's blocks."""
_LAYERS = 3
_Subject = tuple[list["DecoderModel"], list[list[int]]]


@click.command("self-test", cls=Command)
@click.option("--model", "-m", metavar="FILE", help="Also plant faults in the blocks of this .gguf file.")
@options.dtype_option()
@options.threads_option
@options.json_option
def self_test(model: str | None, dtype: str | None, threads: int | None, as_json: bool) -> int:
    """Plant faults in executors of the model that ships, and check that `tq validate` finds each; minutes.

    Exit code 0 if each was found where it was planted, and nothing where none was; else 1.
    """
    with unread_is_fine():
        options.set_threads(threads)
        from haarkv.executors.catalog import NAMES, info
        from haarkv.validation.faults.model import runner_of_blocks
        from haarkv.validation.faults.states import small_hybrid
        from haarkv.validation.layers.self_test import self_test, self_test_of_blocks

        on_row, rows = None if as_json else _show_fault, []
        if model is not None:
            kinds = [kind for name in NAMES for kind in info(name).block_types()]
            models, prompts = _first_layers(model, dtype, kinds, _BLOCK_TOKENS)
            if runner_of_blocks(models[0]) is None:
                raise click.UsageError(
                    f"--model is for faults in blocks of a file, and no executor multiplies with any of {model} as they are; "
                    "leave it out, or give a .gguf file"
                )
            rows += self_test_of_blocks(models, prompts, on_row)
        models, prompts = _first_layers("tiny", dtype, (), _TOKENS)
        models += [small_hybrid(each.dtype, each.config.vocab_size) for each in models]
        rows += self_test(models, prompts, on_row)
        num_caught = sum(row.caught for row in rows)
        all_caught = num_caught == len(rows)
        if as_json:
            print(json.dumps({"passed": all_caught, "rows": [asdict(row) for row in rows]}))
        else:
            summary = f"{num_caught} of {len(rows)} faults and controls judged right"
            print()
            print_judged(f"{summary}: {'passed' if all_caught else 'FAILED'}", all_caught)
        return 0 if all_caught else 1


def _first_layers(model: str, dtype: str | None, block_types: Sequence[str], tokens: Sequence[int]) -> _Subject:
    """The first layers of a model in each dtype, and pieces of source code of so many tokens each.

    Weight blocks of the types in `block_types` stay as the file has them.
    """
    from haarkv.models.catalog import load_model
    from haarkv.models.text import load_tokenizer
    from haarkv.tq_ops import reference
    from haarkv.validation.layers.self_test import first_layers

    dtypes = [dtype] if dtype else ["float32", "bfloat16"]
    models = [first_layers(load_model(model, name, keep_blocks=block_types), _LAYERS) for name in dtypes]
    text = Path(str(reference.__file__)).read_text(encoding="utf-8")
    ids = load_tokenizer(model, models[0].config).encode(text)
    return models, [ids[:count] for count in tokens]


def _show_fault(row: SelfTestRow) -> None:
    widths = zip((8, 6, 40, 24, 24), (row.dtype, row.driven, row.fault, row.planted, row.found), strict=True)
    line = "  ".join(cell.ljust(width) for width, cell in widths)
    print_judged(f"{'ok  ' if row.caught else 'MISS'}  {line}  {row.how}", None if row.caught else False)
