"""`tq eval`: what each KV format costs in fidelity, against the same model with a bf16 cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import count_noun
from tq import options
from tq.commands.generate import read_prompt
from tq.groups import Command
from tq.output import loading, print_table, scoring

if TYPE_CHECKING:
    from haarkv.validation.fidelity.evaluation import FidelityRow, Setup, Workload
    from haarkv.validation.fidelity.scores import Partial

# Width of the whole table; a narrower terminal gets it in two parts.
_WIDTH = 120


@click.command("eval", cls=Command)
@click.option("--text", "text_file", metavar="FILE", required=True, help="The UTF-8 text to score; - is stdin.")
@options.model_option()
@click.option("--kv", "kvs", multiple=True, metavar="LIST", help="Formats, separated by commas; repeatable [default: tq4].")
@options.calibration_option
@options.bf16_options
@click.option("--kv-plan", "plan_files", multiple=True, metavar="FILE", help="A plan from `tq plan`, as one more row.")
@options.balance_option
@options.executor_option()
@options.run_options()
@click.option("--window", type=int, metavar="W", help="Tokens in a window [default: 1024, or the model's context].")
@options.count("--tokens", "Score N tokens at most, spread over the text.", metavar="N")
@options.resume_option
@options.json_option
def command(
    text_file: str, model: str, kvs: tuple[str, ...], plan_files: tuple[str, ...], window: int | None,
    tokens: int | None, executor: str, device: str | None, dtype: str | None, layers: int | None,
    resume_file: Path | None, balance: str, as_json: bool, **kv: Any,
) -> None:  # fmt: skip
    """Measure what each KV format changes, against the same model with K and V in bf16.

    The text is cut into windows that do not overlap. Each window is prefilled into an empty cache of each format, so that
    attention reads what that cache stores. A format is a name from `tq formats`, or k=NAME,v=NAME:

    \b
      tq eval --text held_out.txt --kv tq4,k=tq8,v=tq4,tq2      # three formats
      tq eval --text held_out.txt --kv tq4 --resume run.json

    --kv-tail, --kv-sink and --kv-skip-layers apply to every format; a plan brings its own. One executor runs all caches:
    auto is the fastest that reads every one of them.
    """
    text = read_text(text_file, "--text")
    options.check_outputs(resume=resume_file)
    from haarkv.validation.fidelity.evaluation import evaluate, make_workload
    from haarkv.validation.fidelity.setup import load_setup, parse_list
    from tq.loading import kv_spec, named_plans

    spec = kv_spec(kv)
    names = parse_list(kvs or (() if plan_files else ("tq4",)), spec.calibration)
    plans = named_plans(plan_files, names, "rows")
    options.say_if_interpreted(executor, device=device)
    with loading(model) as progress:
        setup = load_setup(
            model, names, spec=spec, plans=plans, progress=progress, balance=balance == "auto", executor=executor,
            device=device, dtype=dtype, layers=layers,
        )  # fmt: skip
    ids, context = setup.base.tokenizer.encode(text), setup.base.config.max_position_embeddings
    plan = make_workload(ids, context, window=window, tokens=tokens)
    with scoring(len(setup.caches) * plan.scored_tokens) as on_step:
        rows = evaluate(setup, plan, partial=open_partial(resume_file, setup, plan), on_step=on_step)
    if as_json:
        print(json.dumps({"model": model, "text": text_file, **_as_json(setup, plan, rows)}))
    else:
        _print(model, text_file, setup, plan, rows)


def read_text(name: str, option: str) -> str:
    """A text to measure by or learn from; an empty one is a usage error."""
    if text := read_prompt(name, option):
        return text
    raise click.UsageError(f"{option} {name} is empty; give a text of a few thousand tokens")


def open_partial(path: Path | None, setup: Setup, plan: Workload) -> Partial:
    """Results that an earlier run left in the file; this run saves to it."""
    from haarkv.validation.fidelity.scores import Partial
    from haarkv.validation.fidelity.setup import cache_fingerprint, run_fingerprint

    caches = {name: cache_fingerprint(side) for name, side in setup.caches.items()}
    return Partial(path, run_fingerprint(setup, plan), caches)


def _print(model: str, text_file: str, setup: Setup, plan: Workload, rows: Sequence[FidelityRow]) -> None:
    dtype, windows = str(setup.model.dtype).removeprefix("torch."), count_noun(len(plan.windows), "window")
    sample = f"{count_noun(plan.scored_tokens, 'token')} of {text_file} in {windows} of {len(plan.windows[0]):,}"
    title = f"{model} in {dtype}: {sample}, against its own bf16 cache"
    # With fewer positions the 99.9 % quantile is the largest value.
    tail = "99.9 %" if plan.scored_tokens >= 1000 else "largest"
    name = ("kv", [row.kv for row in rows])
    divergence = [
        ("bytes/token", [f"{row.bytes_per_token:,.0f}" for row in rows]),
        ("bits", [f"{row.bits_per_value:.3f}" for row in rows]),
        ("KL mean", [f"{row.kl_mean:.3g}" for row in rows]),
        ("median", [f"{row.kl_median:.3g}" for row in rows]),
        (tail, [f"{row.kl_p999:.3g}" for row in rows]),
        ("same top", [f"{row.top1:.2%}" for row in rows]),
    ]
    text_columns = [
        ("RMS Δp", [f"{row.rms_dp:.3%}" for row in rows]),
        ("PPL", [f"{row.ppl:.4f}" for row in rows]),
        ("ΔPPL", [f"{row.ppl_delta:+.4f}" for row in rows]),
    ]
    narrow = sys.stdout.isatty() and get_terminal_size().columns < _WIDTH
    for number, part in enumerate([divergence, text_columns] if narrow else [divergence + text_columns]):
        columns, cells = zip(name, *part, strict=True)
        print_table("" if number else title, columns, list(zip(*cells, strict=True)))
    print("bits: a value, scales included, as allocated for a window; KL in nats")


def _as_json(setup: Setup, plan: Workload, rows: Sequence[FidelityRow]) -> dict[str, Any]:
    return {
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "tokens": plan.scored_tokens,
        "windows": len(plan.windows),
        "window": len(plan.windows[0]),
        "rows": [asdict(row) for row in rows],
    }
