"""`tq validate` compares an executor with a reference, layer by layer; `tq dev replay` runs one failing layer from a
file; `tq dev self-test` plants faults and looks whether they are found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import write_whole
from tq import options
from tq.commands import validate_report as reports
from tq.commands.generate import read_prompts
from tq.groups import Command, tensor_parallel
from tq.output import compiling, counting, loading, print_judged, unread_is_fine, warn

if TYPE_CHECKING:
    from haarkv.executors.catalog import Selection
    from haarkv.models.base import DecoderModel
    from haarkv.models.config import ModelConfig
    from haarkv.models.parallel import Ranks
    from haarkv.tq_ops.kv.plan import KVPlan
    from haarkv.validation.layers.replay.case import Make, OneRun
    from haarkv.validation.layers.report import Report
    from haarkv.validation.layers.self_test import SelfTestRow

_COMPARE_OPTIONS = {"compare", "as_json", "threads"}
_SCALED_TOKENS = 24
"""Tokens of the prompt that runs once more, with K and V of other lengths."""


@click.command("validate", cls=Command)
@options.model_option()
@options.prompt_options
@options.count("--prompt-tokens", "Use only the first N tokens of each prompt.", metavar="N")
@options.kv_options()
@options.executor_option()
@options.run_options()
@options.activation_option
@click.option("--reference", default="reference", show_default=True, help="What to compare with: reference or cpu.")
@options.count("--steps", "Decode steps after the prefill.", 4, least=0)
@options.file("--csv", "Write the rows.", "csv_file")
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
@options.count("--repeat", "Run each layer N more times; the executor's bits must be equal.", 1, least=0)
@options.json_option
@click.pass_context
@tensor_parallel
def command(context: click.Context, /, **args: Any) -> int:
    """Compare an executor with a reference, layer by layer.

    Each layer runs twice: on the reference's own input (which layer is wrong?), and on what the executor made of the layer
    before (how do errors grow?). Without --executor, the fastest executor of this machine is compared. Without --prompt, some
    are chosen that exercise almost every branch; the row `not exercised` lists the others.

    Exit code 0 if there is no fault, 1 if there is, 2 if nothing could be compared.
    """
    # A reader that closes the pipe after one line still gets the files and the exit code.
    with unread_is_fine():
        if args["compare"]:
            if others := [option for name, option in options.written_options().items() if name not in _COMPARE_OPTIONS]:
                raise click.UsageError(f"--compare runs nothing; leave out {others[0]}")
            before, after = args["compare"]
            return reports.compare(before, after, args["as_json"])
        if args["replay_file"] and args["ranks"].size > 1:
            raise click.UsageError("--replay writes a layer that one process runs; leave out --tensor-parallel")
        options.check_outputs(**{name: args[f"{name}_file"] for name in ("csv", "html", "replay")})
        has_prompts = bool(args["prompts"] or args["files"])
        if args["prompt_tokens"] and not has_prompts:
            raise click.UsageError("--prompt-tokens cuts your own prompts; give --prompt or --prompt-file as well")
        texts = read_prompts(args["prompts"], args["files"], args["ranks"]) if has_prompts else []
        ran = _run_validation(texts, **args)
        if ran is None:  # rank 0 has the report
            return 0
        from haarkv.executors import catalog

        report, replay_note = ran.report, ""
        is_simulated = args["device"] == "sim" or bool(catalog.interpreter_warning(report.candidate, args["device"]))
        if args["replay_file"]:
            replay_note = "nothing failed, so no file is written"
            if not report.passed:
                replay_note = reports.write_replay(args["replay_file"], ran.runs)
        if args["csv_file"]:
            from haarkv.validation.layers.report import as_csv

            write_whole(args["csv_file"], as_csv(report))
        if args["html_file"]:
            from haarkv.validation.layers.page import page

            write_whole(args["html_file"], page(report, reports.about(context, args["model"], ran.texts)))
        if args["as_json"]:
            from haarkv.validation.layers.report import as_json

            extra = {"replay": replay_note} if replay_note else {}
            print(json.dumps({"model": args["model"], "simulated": is_simulated, **extra, **as_json(report)}))
        else:
            # If the prompts were chosen, no others would exercise more.
            hint = " (leave out --prompt to exercise more)" if report.not_exercised and has_prompts else ""
            more = [("not exercised", f"{'; '.join(report.beyond)}{hint}")]
            more += [("executor", f"{report.candidate} ({ran.note})")] if ran.note else []
            more += [("replay", replay_note)] if replay_note else []
            reports.print_verdict(report, more, "in PyPTO's interpreter, on no card" if is_simulated else "")
            reports.print_rows(report, args["verbose"])
        return int(not report.passed)


@click.command("replay", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@options.executor_option()
@options.device_option
@options.threads_option
@click.option("--reference", default="reference", show_default=True, help="What to compare with: reference or cpu.")
@options.json_option
def replay(file: Path, executor: str, device: str | None, reference: str, as_json: bool) -> int:
    """Run the failing layer of FILE, which `tq validate --replay FILE` wrote, and compare it with the reference.

    FILE holds all that the layer needs: no model is loaded. Exit code 0 if there is no fault, 1 if there is, 2 if nothing
    could be compared.
    """
    with unread_is_fine():
        from haarkv.executors.catalog import check
        from haarkv.validation.layers.replay.case import judge_case, require_expected
        from haarkv.validation.layers.replay.file import load
        from haarkv.validation.layers.report import as_json as plain

        replay_file = load(file)
        dtype = str(replay_file.case.hidden.dtype).removeprefix("torch.")
        config_and_plan = replay_file.case.config, replay_file.case.plan
        reference, selection = _select_pair(
            reference, config_and_plan, executor, config_and_plan, device, dtype, "name another --executor"
        )
        check(selection.name, *config_and_plan, device)
        reference_executor, on_trial = _make_pair(reference, selection.name, device)
        require_expected(replay_file.case, replay_file.record, reference_executor)
        report = judge_case(replay_file.case, reference_executor, on_trial)
        if as_json:
            print(json.dumps({**reports.replay_as_json(replay_file, report), **plain(report)}))
        else:
            reports.print_replay(replay_file, report)
        return int(not report.passed)


# -- The run ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ran:
    """A report, the prompts, why `auto` passed over a faster executor, and the runs of the report."""

    report: Report
    texts: Sequence[str]
    note: str
    runs: Sequence[OneRun]


def _run_validation(
    texts: Sequence[str], *, model: str, executor: str, device: str | None, reference: str, prompt_tokens: int | None,
    steps: int, dtype: str | None, layers: int | None, ranks: Ranks, repeat: int, activation_bits: int, **others: Any,
) -> _Ran | None:  # fmt: skip
    """Run the validation; on other ranks than 0 there is no result.

    Of several ranks each has the executor on its part of the model, and rank 0 the reference on the whole.

    Args:
        texts: prompts; without any, some are chosen that exercise everything.
    """
    with loading(model) as progress:
        from haarkv.engine.loading import require_rounding
        from haarkv.engine.plans import plan_for
        from haarkv.engine.session import Session
        from haarkv.executors.catalog import check, create, info, interpreter_warning
        from haarkv.models.catalog import load_model, read_config
        from haarkv.models.parallel import Split
        from haarkv.models.text import load_tokenizer
        from haarkv.validation.layers.exercise import covering_prompts_for, with_extreme_scales
        from haarkv.validation.layers.ranks import follow, multi_rank_executor
        from haarkv.validation.layers.replay.case import OneRun
        from haarkv.validation.layers.report import join_reports
        from haarkv.validation.layers.runner import count_rows, require_own_formats, validate
        from tq.loading import kv_spec

        config = read_config(model, layers)
        chosen_for = {"model": model, "layers": layers, "dtype": dtype, "executor": executor}
        spec, split = kv_spec(chosen_for | others), Split(config, ranks.rank, ranks.size)
        part, plan, plan_here = split.part, plan_for(spec, config), plan_for(spec, config, split)
        reference, selection = _select_pair(
            reference, (config, plan), executor, (part, plan_here), device, dtype, "change --kv or --model"
        )
        check(selection.name, part, plan_here, device, ranks)
        require_own_formats(plan)
        # Both run the same weights, in a dtype that both take.
        shared = "bfloat16" if "bfloat16" in (info(reference).dtype, info(selection.name).dtype) else "float32"
        # Recurrent states are not judged beside rounded products.
        block_types = () if config.state_shapes else info(selection.name).block_types(device)
        require_rounding(activation_bits, selection.name, model, block_types)
        read = partial(
            load_model, model, dtype or shared, layers, progress, keep_blocks=block_types, activation_bits=activation_bits
        )
        rank_model = read(ranks=ranks)
        on_trial = create(selection.name, rank_model, plan_here, device, compiling)
        if (slowly := interpreter_warning(selection.name, device)) and ranks.rank == 0:
            warn(slowly)
        if ranks.rank:
            follow(on_trial, ranks, config, plan_here)
            return None
        whole_model = rank_model if ranks.size == 1 else read()
    reference_executor = create(reference, whole_model, plan, on_program=compiling)
    tokenizer = load_tokenizer(model, whole_model.config)
    if texts:
        session = Session(model, whole_model.config, reference_executor, tokenizer, plan)
        ids = [tokens[:prompt_tokens] for tokens in session.encode(texts)]
    else:
        ids = covering_prompts_for(tokenizer, whole_model.config, plan, steps, on_trial.decode_step)
    # Ranks make their executors once; on one rank there is a second run, of the same model with K and V of other lengths.
    scaled_ids = (
        [] if texts or ranks.size > 1 or not any(kv_format.lossy for kv_format in plan.formats) else [ids[0][:_SCALED_TOKENS]]
    )
    total = count_rows(ids, steps, plan) if all(ids) else 0
    total += count_rows(scaled_ids, 1, plan) if scaled_ids else 0

    make = _make_pair(reference, selection.name, device)
    with counting(total, "comparing layers") as on_row, multi_rank_executor(on_trial, ranks, config, plan_here) as candidate:
        report = validate(reference_executor, candidate, whole_model, ids, steps, plan, on_row, repeats=repeat)
        runs = [OneRun(report, whole_model, ids, steps, plan, spec.calibration, make)]
        if scaled_ids:
            other = with_extreme_scales(whole_model, plan, scaled_ids[0])
            pair = make[0](other, plan), make[1](other, plan)
            scaled_report = validate(*pair, other, scaled_ids, 1, plan, on_row)
            runs.append(OneRun(scaled_report, other, scaled_ids, 1, plan, spec.calibration, make))
            report = join_reports(report, scaled_report, "scaled")
    return _Ran(report, texts or [tokenizer.decode(tokens) for tokens in (*ids, *scaled_ids)], selection.passed_over, runs)


def _make_pair(reference: str, executor: str, device: str | None) -> tuple[Make, Make]:
    """Builders of the reference and of the executor on trial."""
    from haarkv.executors.catalog import create

    return (
        lambda model, plan: create(reference, model, plan, on_program=compiling),
        lambda model, plan: create(executor, model, plan, device, compiling),
    )


def _select_pair(
    reference: str, reference_case: tuple[ModelConfig, KVPlan], executor: str, on_trial: tuple[ModelConfig, KVPlan],
    device: str | None, dtype: str | None, instead: str,
) -> tuple[str, Selection]:  # fmt: skip
    """The reference and the executor on trial, each for a model and its cache; `instead` is the advice where both are one."""
    from haarkv.executors.catalog import AUTO, FASTEST_FIRST, check, select

    reference_name = select(
        reference, reference_case[0], [reference_case[1]], dtype=dtype
    ).name  # a slip in the name is refused first
    selection = select(executor, on_trial[0], [on_trial[1]], device=device, dtype=dtype)
    if executor == AUTO and selection.name == reference_name:
        why = f" ({selection.passed_over})" if selection.passed_over else ""
        nothing = "compared with itself it proves nothing"
        if selection.name == FASTEST_FIRST[-1]:
            raise click.UsageError(f"only {selection.name} can run this here{why}, and {nothing}; {instead}")
        raise click.UsageError(
            f"auto is {selection.name} here{why}, the reference itself, and {nothing}; name another --executor"
        )
    check(reference_name, *reference_case)
    return reference_name, selection


# -- Does the validator find what is wrong? --------------------------------------------------------------------------------

_TOKENS, _BLOCK_TOKENS = (120, 100), (24, 16)
"""Tokens of the prompts, and of those for a file's blocks."""
_LAYERS = 3
_Subject = tuple[list["DecoderModel"], list[list[int]]]


@click.command("self-test", cls=Command)
@click.option("--model", "-m", metavar="FILE", help="Also plant faults in the blocks of this .gguf file.")
@options.dtype_option()
@options.threads_option
@options.json_option
def self_test(model: str | None, dtype: str | None, as_json: bool) -> int:
    """Plant faults in executors of the model that ships, and check that `tq validate` finds each; minutes.

    Exit code 0 if each was found where it was planted, and nothing where none was; else 1.
    """
    with unread_is_fine():
        from haarkv.executors.catalog import NAMES, info
        from haarkv.validation.faults.model import runner_of_blocks
        from haarkv.validation.faults.states import small_hybrid
        from haarkv.validation.layers.self_test import self_test

        on_row, rows = None if as_json else _show_fault, []
        if model is not None:
            kinds = [kind for name in NAMES for kind in info(name).block_types()]
            models, prompts = _first_layers(model, dtype, kinds, _BLOCK_TOKENS)
            if runner_of_blocks(models[0]) is None:
                raise click.UsageError(
                    f"--model is for faults in blocks of a file, and no executor multiplies with any of {model} as they are; "
                    "leave it out, or give a .gguf file"
                )
            rows += self_test(models, prompts, on_row)
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
    """The first layers of a model in each dtype, and pieces of source code, one of each length in `tokens`.

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
