"""`tq choice`: the cache that `--kv auto` chose for a model, as a file for other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq import options
from tq.groups import Command, Group
from tq.output import print_sentence

if TYPE_CHECKING:
    from haarkv.tq_ops.kv.plan import KVSpec

_file = click.argument("file", type=click.Path(path_type=Path))
_options = options.together(options.model_option(), options.loss_option, options.executor_option(), options.layers_option)


@click.command("choice", cls=Group)
def command() -> None:
    """The cache that --kv auto chose for a model, as a file: for other machines, so that they need not choose."""


@command.command("export", cls=Command)
@_file
@_options
@options.threads_option
def export_command(file: Path, model: str, kv_loss: float | None, executor: str, layers: int | None) -> None:
    """Write the chosen cache to FILE, a plan file as --kv-plan takes it. A cache that was not chosen yet is chosen now."""
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.output_files import check_writable, write_whole
    from haarkv.validation.planning.choice_cache import file_for
    from tq.loading import AUTO_KV, kv_spec

    check_writable(file)
    loss = _loss(kv_loss, executor)
    spec = kv_spec({"model": model, "kv": AUTO_KV, "kv_loss": kv_loss, "layers": layers, "executor": executor})
    choice_file = file_for(model, loss, layers, executor)
    if not choice_file.exists():
        raise InputError(f"the choice could not be kept in {choice_file.parent}; make that folder writable")
    write_whole(file, choice_file.read_bytes())
    print_sentence(f"{file}: {_brief(spec, model, layers)}; {file.stat().st_size / 1e6:.1f} MB")


@command.command("import", cls=Command)
@_file
@_options
def import_command(file: Path, model: str, kv_loss: float | None, executor: str, layers: int | None) -> None:
    """Take the cache in FILE as the one that was chosen for a model, for the bound of --kv-loss.

    FILE is of `tq choice export` or `tq plan`. It must be of this model and, with learned coordinates, of these weights.
    """
    from haarkv.validation.planning.choice_cache import take

    spec = take(file, model, _loss(kv_loss, executor), layers, executor)
    print_sentence(f"{model} takes {_brief(spec, model, layers)}")


def _loss(kv_loss: float | None, executor: str) -> float:
    """The bound of the choice; an executor that there is none of is refused as well."""
    from haarkv.executors.catalog import AUTO, info
    from haarkv.validation.planning.auto import LOSS, require_loss

    if executor != AUTO:
        info(executor)
    return LOSS if kv_loss is None else require_loss(kv_loss)


def _brief(spec: KVSpec, model: str, layers: int | None) -> str:
    from haarkv.engine.plans import plan_for
    from haarkv.models.catalog import read_config

    return plan_for(spec, read_config(model, layers)).summary()
