"""`tq plan`: choose the formats of each layer's K and V, and a tail, for the least KL within a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import count_noun
from tq import options
from tq.commands.eval import open_partial, read_text
from tq.groups import Command
from tq.output import loading, print_table, scoring, unread_is_fine

if TYPE_CHECKING:
    from haarkv.models.config import ModelConfig
    from haarkv.tq_ops.formats import Calibration
    from haarkv.validation.fidelity.evaluation import FidelityRow, Setup, Workload
    from haarkv.validation.planning.search import Allocation, Costs, Verification

_CONTEXT = 4096
_LEAST, _FEW = 32, 1024
"""Tokens of a text below which a mean KL is chance, and below which small differences between caches are."""


@click.command("plan", cls=Command)
@click.option("--text", "text_file", metavar="FILE", required=True, help="The UTF-8 text to choose by; - is stdin.")
@click.option(
    "--verify", "verify_file", metavar="FILE",
    help="A text to judge the plan by [default: the second half of --text, excluded from the search].",
)  # fmt: skip
@click.option("--budget", type=float, required=True, metavar="BITS", help="Bits a value, scales and tail included.")
@options.file("--out", "The plan, as JSON; with a calibration both, as safetensors.", "out_file", required=True)
@click.option("--calibration", metavar="FILE", help="Choose among the learned formats lrB of a file of `tq calibrate`.")
@options.model_option()
@options.executor_option()
@options.run_options()
@click.option(
    "--candidates", metavar="LIST",
    help="Formats to choose among [default: tq2 to tq8 and bf16; with a calibration lr2 to lr5 and tq2 to tq6].",
)  # fmt: skip
@options.numbers("--tails", "Tails to try, in tokens; 0 is none [default: 0,16,32,64,128].", least=0, metavar="LIST")
@options.numbers("--sinks", "Numbers of first tokens in BF16 to try [default: 0].", least=0, metavar="LIST")
@click.option("--context", type=int, metavar="N", help="Tokens that share a tail [default: 4096, or the model's context].")
@options.count("--tokens", "Tokens of --text to choose by.", 4096)
@options.count("--verify-tokens", "Tokens to judge by.", 20480)
@click.option("--window", type=int, metavar="W", help="Tokens in a window when one K or V is measured [default: 1024].")
@options.resume_option
@click.option("--force", is_flag=True, help="Write the plan even if one format of the same bytes is as good.")
@options.json_option
def command(
    text_file: str, verify_file: str | None, budget: float, out_file: Path, candidates: str | None,
    tails: tuple[int, ...] | None, sinks: tuple[int, ...] | None, calibration: str | None, context: int | None,
    tokens: int, verify_tokens: int, window: int | None, resume_file: Path | None, force: bool,
    as_json: bool, **model: Any,
) -> int:  # fmt: skip
    """Choose a format for K and for V of each layer, and a tail, within a budget of bits a value.

    First each candidate is measured alone, at K and at V of each layer, with everything else in bf16. For each tail, the
    formats with the smallest sum of these KL make a plan. Then each plan is measured as a whole. The best is judged on unseen
    text, against single formats of the same bytes. It is written if none of them is as good; otherwise the exit code is 1.

    \b
      tq plan --calibration tiny.safetensors --text train.txt --budget 2.6 --out plan.safetensors
      tq plan --text train.txt --verify held_out.txt --budget 4.0 --out plan.json
      tq generate --kv-plan plan.json --prompt 'def main('
    """
    text, other = read_text(text_file, "--text"), None if verify_file is None else read_text(verify_file, "--verify")
    if text == other:
        raise click.UsageError("--text and --verify are the same text, which cannot judge what it chose; give another one")
    options.check_outputs(out=out_file, resume=resume_file)
    from haarkv.engine.plans import shape_signature
    from haarkv.models.catalog import read_config
    from haarkv.tq_ops.kv import calibration_file, plan_file
    from haarkv.tq_ops.kv.plan import KVSpec
    from haarkv.validation.fidelity.evaluation import make_workload
    from haarkv.validation.fidelity.setup import load_setup
    from haarkv.validation.planning.search import (
        CANDIDATES,
        LEARNED_CANDIDATES,
        TAILS,
        at,
        choices_within,
        everywhere,
        places,
        require_candidates,
        session_with_plan,
        uniform_rivals,
        verify,
    )  # fmt: skip

    config = read_config(model["model"], model["layers"])
    file = None if calibration is None else calibration_file.load(calibration)
    spec = file.spec if file else KVSpec()
    default = LEARNED_CANDIDATES if file else CANDIDATES
    names = list(dict.fromkeys(part.strip() for part in candidates.split(","))) if candidates is not None else default
    require_candidates(names, config, spec.calibration)
    options.say_if_interpreted(model["executor"], device=model["device"])
    with loading(model["model"]) as progress:
        # One executor runs every candidate beside every tail and number of sinks.
        every = {name: replace(spec, kv=everywhere(name)) for name in names}
        every[""] = replace(spec, kv="tq4", tail=max(tails or TAILS), sink=max(sinks or (0,)))
        setup = load_setup(kvs=["bf16"], spec=spec, plans=every, progress=progress, **model)
    encode, limit = setup.base.tokenizer.encode, config.max_position_embeddings
    ids = encode(text)
    texts = (ids[: len(ids) // 2], ids[len(ids) // 2 :]) if other is None else (ids, encode(other))
    context = _context(context, config, texts)
    choose = partial(
        choices_within, config=config, budget=budget, tails=tails or TAILS, sinks=sinks or (0,), context=context,
        calibration=spec.calibration,
    )  # fmt: skip
    # A budget that nothing meets, or a tail that the executor does not take, is refused before anything is measured.
    for choice in choose({place: dict.fromkeys(at(place[1], names), 0.0) for place in places(config)}):
        session_with_plan(setup.base, choice.plan)
    measured = make_workload(texts[0], limit, window=window, tokens=tokens)
    whole, unseen = (
        make_workload(part, limit, window=context, tokens=max(count, context))
        for part, count in zip(texts, (tokens, verify_tokens), strict=True)
    )
    search = _search(setup, names, spec.calibration, choose, measured, whole, resume_file)
    # A learned format must beat those of fixed rotations as well.
    rival_names = list(dict.fromkeys([*names, *(CANDIDATES if file else ())]))
    rivals = uniform_rivals(search.choice.plan, config, context, rival_names, spec.calibration)
    with scoring((1 + len(rivals)) * unseen.scored_tokens) as on_step:
        verification = verify(setup, unseen, search.choice.plan, rivals, on_step)
    is_written = force or verification.beaten_by is None
    measurements = measured_by(budget, context, search, verification)
    if is_written:
        plan_file.save(out_file, search.choice.plan, shape_signature(config), measurements, file)
    with unread_is_fine():
        if as_json:
            print(json.dumps({"plan": str(out_file) if is_written else None, **measurements}))
        else:
            print_plan(context, search, verification)
            print(ending(out_file, verification.beaten_by, is_written))
    return int(not is_written)


def _context(context: int | None, config: ModelConfig, texts: Sequence[list[int]]) -> int:
    """Tokens in a sequence: as given, or as many as the model and both texts allow, up to 4,096."""
    most, shortest = config.max_position_embeddings, min(map(len, texts)) - 1
    if context is not None and not 1 <= context <= most:
        raise click.UsageError(f"this model has a context of {most} tokens; --context must lie in 1 … {most}")
    if shortest < (least := max(context or 0, _LEAST)):
        lengths = " and ".join(f"{len(ids):,}" for ids in texts)
        raise click.UsageError(
            f"the text is too short: {lengths} tokens to choose and to judge by; each needs {least + 1:,} at least"
        )
    return context or min(_CONTEXT, most, shortest)


def _search(
    setup: Setup, names: Sequence[str], calibration: Calibration | None, choose: Callable[[Costs], list[Allocation]],
    measured: Workload, whole: Workload, resume_file: Path | None,
) -> PlanSearch:  # fmt: skip
    """Measure each place, choose a plan beside each tail, and take the one that is best as a whole."""
    from haarkv.validation.planning.search import changed_caches, compare, measure

    caches = changed_caches(setup.base, names, calibration)
    trial_setup = replace(setup, caches={name: side for name, (_, _, side) in caches.items()})
    partial_scores = open_partial(resume_file, trial_setup, measured)
    with scoring(len(trial_setup.caches) * measured.scored_tokens) as on_step:
        costs = measure(setup, measured, names, coordinates=calibration, partial=partial_scores, on_step=on_step)
    choices = choose(costs)
    with scoring(len(choices) * whole.scored_tokens) as on_step:
        rows = compare(setup, whole, choices, on_step)
    _, choice = min(zip(rows, choices, strict=True), key=lambda pair: pair[0].kl_mean)
    return PlanSearch(costs, choice, rows, measured.scored_tokens)


# -- In words and in the plan's file ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanSearch:
    """The chosen plan and the measurements behind it.

    Attributes:
        costs: KL of each candidate at each place.
        rows: of all plans that were measured as a whole.
        tokens: of the text to choose by.
    """

    costs: Costs
    choice: Allocation
    rows: Sequence[FidelityRow]
    tokens: int


def measured_by(budget: float, context: int, search: PlanSearch, verification: Verification) -> dict[str, Any]:
    """The measurements that a plan file carries."""
    return {
        "budget": budget,
        "context": context,
        "calibration_tokens": search.tokens,
        "predicted_kl_without_tail": search.choice.predicted_kl,
        "calibration": [row.measurements for row in search.rows],
        "verified_tokens": verification.tokens,
        "verified": [row.measurements for row in (verification.plan, *verification.rivals)],
        "costs": {f"layer {layer} {side}": dict(costs) for (layer, side), costs in search.costs.items()},
    }


def print_plan(context: int, search: PlanSearch, verification: Verification) -> None:
    """The plan layer by layer, and beside its rivals on unseen text."""
    plan, costs, total = search.choice.plan, search.costs, search.choice.predicted_kl or 1.0
    cells = [
        (str(layer), k.name, f"{costs[layer, 'k'][k.name] / total:.1%}", v.name, f"{costs[layer, 'v'][v.name] / total:.1%}")
        for layer, (k, v) in enumerate(plan.layers)
        if (layer, "k") in costs
    ]
    parts = [f"a tail of {plan.recent} tokens"] * bool(plan.recent) + [f"{plan.sink} sinks"] * bool(plan.sink)
    suffix = f", and {' and '.join(parts)} in BF16" if parts else ""
    print_table(f"formats by layer{suffix}; shares of the KL", ["layer", "K", "its share", "V", "its share"], cells)
    where = f"{count_noun(verification.tokens, 'unseen token')} in {count_noun(verification.windows, 'window')} of {context:,}"
    columns = ["kv", "bytes/token", "bits", "KL mean", "median", "99.9 %"]
    print_table(
        f"{where}, against the model's own bf16 cache",
        columns,
        [_cells(row) for row in (verification.plan, *verification.rivals)],
    )
    if verification.tokens < _FEW:
        print(f"so few tokens show large differences only; judge by a longer text, of {_FEW:,} tokens or more")
    for row, nearer in zip(verification.rivals, verification.nearer, strict=True):
        print(_verdict(verification.plan, row, nearer, verification.windows))


def ending(out_file: Path, better: FidelityRow | None, is_written: bool) -> str:
    """The last line: whether the plan is written, and why not."""
    note = f", though {better.kv} of the same bytes is no worse" if better else ""
    if is_written:
        return f"written to {out_file}{note}"
    return f"{out_file} is not written{note.replace('though', 'because')}; --force writes it"


def _cells(row: FidelityRow) -> tuple[str, ...]:
    sizes = (f"{row.bytes_per_token:,.0f}", f"{row.bits_per_value:.3f}")
    return (row.kv, *sizes, *(f"{kl:.3g}" for kl in (row.kl_mean, row.kl_median, row.kl_p999)))


def _verdict(plan: FidelityRow, rival: FidelityRow, nearer: int, windows: int) -> str:
    """In one line, by how much the plan wins or loses."""
    size = plan.bytes_per_token / rival.bytes_per_token - 1
    bytes_ = "the same bytes" if size == 0 else f"{abs(size):.1%} {'fewer' if size < 0 else 'more'} bytes"
    if plan.kl_mean == rival.kl_mean:
        change = f"has the same mean KL as {rival.kv}"
    elif plan.kl_mean < rival.kl_mean:
        change = f"beats {rival.kv} by {1 - plan.kl_mean / rival.kl_mean:.1%} of its mean KL"
    else:
        change = f"loses to {rival.kv} by {plan.kl_mean / rival.kl_mean - 1:.1%} of its mean KL"
    figures = f"({plan.kl_mean:.3g} against {rival.kl_mean:.3g})"
    return f"the plan {change} {figures} at {bytes_}, nearer in {nearer} of {count_noun(windows, 'window')}"
