"""`tq validate` compares an executor with a reference, layer by layer; `tq dev replay` runs one failing layer from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import write_whole
from tq import options
from tq.commands import validate_report as reports
from tq.commands.generate import read_prompts
from tq.groups import Command
from tq.output import comparing, compiling, loading, unread_is_fine, warn
from tq.ranks import tensor_parallel

if TYPE_CHECKING:
    from haarkv.executors.catalog import Selection
    from haarkv.models.config import ModelConfig
    from haarkv.models.parallel import Ranks
    from haarkv.tq_ops.kv.plan import KVPlan
    from haarkv.validation.layers.replay.case import Make, OneRun
    from haarkv.validation.layers.report import Report

_OF_COMPARE = {"compare", "as_json", "threads"}
_SCALED_TOKENS = 24
"""Of the prompt that is run once more, with K and V of other lengths."""


@click.command("validate", cls=Command)
@options.model_option()
@options.prompt_options
@options.count("--prompt-tokens", "Use only the first N tokens of each prompt.", metavar="N")
@options.kv_options()
@options.executor_option()
@options.run_options()
@options.activation_option
@click.option("--reference", default="reference", show_default=True, help="The executor to compare with.")
@options.count("--steps", "Decode steps after the prefill.", 4, least=0)
@options.file("--csv", "Write the rows, with Ascend's columns.", "csv_file")
@options.file("--html", "Write a page with plots.", "html_file")
@options.file("--replay", "On failure, write the failing layer for `tq dev replay`.", "replay_file")
@click.option("--verbose", is_flag=True, help="Print a row for each layer too.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A.json B.json",
    help="Run nothing: what got better or worse from one --json report to another?",
)
@options.count("--repeat", "Run each layer so often again, and compare the executor with itself.", 1, least=0)
@click.option("--self-test", "moved", flag_value="self-test", hidden=True)
@click.option("--sensitivity", "moved", flag_value="sensitivity", hidden=True)
@options.json_option
@click.pass_context
@tensor_parallel
def command(context: click.Context, /, **given: Any) -> int:
    """Compare an executor with a reference, layer by layer.

    Each layer runs twice: on the reference's own input (which layer is wrong?), and on what the executor made of the layer
    before (how do errors grow?). Without --executor, the fastest executor of this machine is compared. Without --prompt, some
    are chosen that exercise everything; with your own, the verdict says what they did not.

    Exit code 0 if there is no fault, 1 if there is, 2 if nothing could be compared.
    """
    # Whoever reads only the first line of the output still gets the files and the exit code.
    with unread_is_fine():
        if moved := given.pop("moved"):
            raise click.UsageError(f"--{moved} is a command of its own now: `tq dev {moved}`")
        options.set_threads(given["threads"])
        if given["compare"]:
            if others := [option for name, option in options.written().items() if name not in _OF_COMPARE]:
                raise click.UsageError(f"--compare runs nothing; leave out {others[0]}")
            before, after = given["compare"]
            return reports.compare(before, after, given["as_json"])
        if given["replay_file"] and given["ranks"].size > 1:
            raise click.UsageError("--replay writes a layer that one process runs; leave out --tensor-parallel")
        options.check_outputs(**{name: given[f"{name}_file"] for name in ("csv", "html", "replay")})
        has_prompts = bool(given["prompts"] or given["files"])
        if given["prompt_tokens"] and not has_prompts:
            raise click.UsageError("--prompt-tokens cuts your own prompts; give --prompt or --prompt-file as well")
        texts = read_prompts(given["prompts"], given["files"], given["ranks"]) if has_prompts else []
        ran = _validated(texts, **given)
        if ran is None:  # rank 0 has the report
            return 0
        from haarkv.executors import catalog

        report, replay_note = ran.report, ""
        simulated = given["device"] == "sim" or bool(catalog.interpreted(report.candidate, given["device"]))
        if given["replay_file"]:
            replay_note = "nothing failed, so no file is written"
            if not report.passed:
                replay_note = reports.write_replay(given["replay_file"], ran.runs)
        if given["csv_file"]:
            write_whole(given["csv_file"], reports.as_csv(report))
        if given["html_file"]:
            from haarkv.validation.layers.page import page

            write_whole(given["html_file"], page(report, reports.about(context, given["model"], ran.texts)))
        if given["as_json"]:
            from haarkv.validation.layers.report import as_json

            extra = {"replay": replay_note} if replay_note else {}
            print(json.dumps({"model": given["model"], "simulated": simulated, **extra, **as_json(report)}))
        else:
            more = [reports.unexercised(report, chosen=not has_prompts)]
            more += [("executor", f"{report.candidate} ({ran.note})")] if ran.note else []
            more += [("replay", replay_note)] if replay_note else []
            reports.print_verdict(report, more, "in PyPTO's interpreter, on no card" if simulated else "")
            reports.print_rows(report, given["verbose"])
        return int(not report.passed)


@click.command("replay", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@options.executor_option()
@options.device_option
@options.threads_option
@click.option("--reference", default="reference", show_default=True, help="The executor to compare with.")
@options.json_option
def replay(file: Path, executor: str, device: str | None, threads: int | None, reference: str, as_json: bool) -> int:
    """Run the failing layer of FILE, which `tq validate --replay FILE` wrote, and compare it with the reference.

    FILE holds all that the layer needs: no model is loaded. Exit code 0 if there is no fault, 1 if there is, 2 if nothing
    could be compared.
    """
    with unread_is_fine():
        options.set_threads(threads)
        from haarkv.executors.catalog import check
        from haarkv.validation.layers.replay.case import judged, require_expected
        from haarkv.validation.layers.replay.file import load
        from haarkv.validation.layers.report import as_json as plain

        found = load(file)
        dtype = str(found.case.hidden.dtype).removeprefix("torch.")
        of = found.case.config, found.case.plan
        reference, selected = _selected(reference, of, executor, of, device, dtype, "name another --executor")
        check(selected.name, *of, device)
        trusted, on_trial = _make_pair(reference, selected.name, device)
        require_expected(found.case, found.made, trusted)
        report = judged(found.case, trusted, on_trial)
        if as_json:
            print(json.dumps({**reports.replay_as_json(found, report), **plain(report)}))
        else:
            reports.print_replay(found, report)
        return int(not report.passed)


# -- The run ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ran:
    """A report, the prompts in words, why `auto` passed over a faster executor, and the runs that the report is of."""

    report: Report
    texts: Sequence[str]
    note: str
    runs: Sequence[OneRun]


def _validated(
    texts: Sequence[str], *, model: str, executor: str, device: str | None, reference: str, prompt_tokens: int | None,
    steps: int, dtype: str | None, layers: int | None, ranks: Ranks, repeat: int, activation_bits: int, **others: Any,
) -> _Ran | None:  # fmt: skip
    """What was found; on other ranks than 0 nothing.

    Of several ranks each has the executor on its part of the model, and rank 0 the reference on the whole.

    Args:
        texts: prompts; without any, some are chosen that exercise everything.
    """
    with loading(model) as progress:
        from haarkv.engine.loading import require_rounding
        from haarkv.engine.plans import plan_for
        from haarkv.engine.session import Session
        from haarkv.executors.catalog import check, create, info, interpreted
        from haarkv.models.catalog import load_model, read_config
        from haarkv.models.parallel import Split
        from haarkv.models.text import load_tokenizer
        from haarkv.validation.layers.exercise import chosen_prompts, with_extreme_scales
        from haarkv.validation.layers.ranks import follow, gathered
        from haarkv.validation.layers.replay.case import OneRun
        from haarkv.validation.layers.report import joined
        from haarkv.validation.layers.runner import count_rows, validate
        from tq.loading import kv_spec

        config = read_config(model, layers)
        chosen_for = {"model": model, "layers": layers, "dtype": dtype, "executor": executor}
        spec, split = kv_spec(chosen_for | others), Split(config, ranks.rank, ranks.size)
        part, plan, plan_here = split.part, plan_for(spec, config), plan_for(spec, config, split)
        reference, selected = _selected(
            reference, (config, plan), executor, (part, plan_here), device, dtype, "change --kv or --model"
        )
        check(selected.name, part, plan_here, device, ranks)
        # Both run the same weights, in a dtype that both take.
        shared = "bfloat16" if "bfloat16" in (info(reference).dtype, info(selected.name).dtype) else "float32"
        # Recurrent states are not judged beside rounded products.
        kept = () if config.state_shapes else info(selected.name).block_types(device)
        require_rounding(activation_bits, selected.name, model, kept)
        read = partial(load_model, model, dtype or shared, layers, progress, keep_blocks=kept, activation_bits=activation_bits)
        here = read(ranks=ranks)
        on_trial = create(selected.name, here, plan_here, device, compiling)
        if (slowly := interpreted(selected.name, device)) and ranks.rank == 0:
            warn(slowly)
        if ranks.rank:
            follow(on_trial, ranks, config, plan_here)
            return None
        loaded = here if ranks.size == 1 else read()
    trusted = create(reference, loaded, plan, on_program=compiling)
    tokenizer = load_tokenizer(model, loaded.config)
    if texts:
        session = Session(model, loaded.config, trusted, tokenizer, plan)
        ids = [tokens[:prompt_tokens] for tokens in session.encode(texts)]
    else:
        ids = chosen_prompts(tokenizer, loaded.config, plan, steps, on_trial.decode_step)
    # Ranks make their executors once; on one rank there is a second run, of the same model with K and V of other lengths.
    scaled = (
        [] if texts or ranks.size > 1 or not any(kv_format.lossy for kv_format in plan.formats) else [ids[0][:_SCALED_TOKENS]]
    )
    total = count_rows(ids, steps, plan) if all(ids) else 0
    total += count_rows(scaled, 1, plan) if scaled else 0

    make = _make_pair(reference, selected.name, device)
    with comparing(total) as on_row, gathered(on_trial, ranks, config, plan_here) as candidate:
        report = validate(trusted, candidate, loaded, ids, steps, plan, on_row, repeats=repeat)
        runs = [OneRun(report, loaded, ids, steps, plan, spec.calibration, make)]
        if scaled:
            other = with_extreme_scales(loaded, plan, scaled[0])
            pair = make[0](other, plan), make[1](other, plan)
            of_scaled = validate(*pair, other, scaled, 1, plan, on_row)
            runs.append(OneRun(of_scaled, other, scaled, 1, plan, spec.calibration, make))
            report = joined(report, of_scaled, "scaled")
    return _Ran(report, texts or [tokenizer.decode(tokens) for tokens in (*ids, *scaled)], selected.passed_over, runs)


def _make_pair(reference: str, executor: str, device: str | None) -> tuple[Make, Make]:
    """What makes the reference and the executor on trial of any model."""
    from haarkv.executors.catalog import create

    return (
        lambda model, plan: create(reference, model, plan, on_program=compiling),
        lambda model, plan: create(executor, model, plan, device, compiling),
    )


def _selected(
    reference: str, of_reference: tuple[ModelConfig, KVPlan], executor: str, on_trial: tuple[ModelConfig, KVPlan],
    device: str | None, dtype: str | None, instead: str,
) -> tuple[str, Selection]:  # fmt: skip
    """The reference and the executor on trial, each of a model and its cache; `instead` says what helps without another."""
    from haarkv.executors.catalog import AUTO, FASTEST_FIRST, check, select

    trusted = select(reference, of_reference[0], [of_reference[1]], dtype=dtype).name  # a slip in the name is refused first
    selected = select(executor, on_trial[0], [on_trial[1]], device=device, dtype=dtype)
    if executor == AUTO and selected.name == trusted:
        why = f" ({selected.passed_over})" if selected.passed_over else ""
        nothing = "compared with itself it proves nothing"
        if selected.name == FASTEST_FIRST[-1]:
            raise click.UsageError(f"only {selected.name} can run this here{why}, and {nothing}; {instead}")
        raise click.UsageError(
            f"auto is {selected.name} here{why}, the reference itself, and {nothing}; name another --executor"
        )
    check(trusted, *of_reference)
    return trusted, selected
