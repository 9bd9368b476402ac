"""What `tq validate` runs: loads a model, makes both executors, chooses prompts and compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from tq.output import comparing, compiling, loading, warn

if TYPE_CHECKING:
    from haarkv.executors.catalog import Selection
    from haarkv.models.parallel import Ranks
    from haarkv.validation.layers.replay.case import Make, OneRun
    from haarkv.validation.layers.report import Report


@dataclass(frozen=True)
class Ran:
    """A report, the prompts in words, why `auto` passed over a faster executor, and the runs that the report is of."""

    report: Report
    texts: Sequence[str]
    note: str
    runs: Sequence[OneRun]


def validated(
    texts: Sequence[str], *, model: str, executor: str, device: str | None, reference: str, prompt_tokens: int | None,
    steps: int, dtype: str | None, layers: int | None, ranks: Ranks, repeat: int, activation_bits: int, **others: Any,
) -> Ran | None:  # fmt: skip
    """What was found; on other ranks than 0 nothing.

    Of several ranks each has the executor on its part of the model, and rank 0 the reference on the whole.

    Args:
        texts: prompts; without any, some are chosen that exercise everything.
    """
    with loading(model) as progress:
        from haarkv.engine.loading import require_rounding
        from haarkv.engine.plans import plan_for
        from haarkv.engine.session import Session
        from haarkv.executors.catalog import AUTO, block_types, check, create, default_dtype, interpreted, select
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
        reference = select(reference, config, [plan], dtype=dtype).name  # a slip in the name is refused first
        selected = select(executor, part, [plan_here], device=device, dtype=dtype)
        if executor == AUTO and selected.name == reference:
            raise click.UsageError(_itself(selected))
        check(reference, config, plan)
        check(selected.name, part, plan_here, device, ranks)
        # Both run the same weights, in a dtype that both take.
        shared = "bfloat16" if "bfloat16" in (default_dtype(reference), default_dtype(selected.name)) else "float32"
        # Recurrent states are not judged beside rounded products.
        kept = () if config.state_shapes else block_types(selected.name, device)
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

    make = make_pair(reference, selected.name, device)
    with comparing(total) as on_row, gathered(on_trial, ranks, config, plan_here) as candidate:
        report = validate(trusted, candidate, loaded, ids, steps, plan, on_row, repeats=repeat)
        runs = [OneRun(report, loaded, ids, steps, plan, spec.calibration, make)]
        if scaled:
            other = with_extreme_scales(loaded, plan, scaled[0])
            pair = make[0](other, plan), make[1](other, plan)
            of_scaled = validate(*pair, other, scaled, 1, plan, on_row)
            runs.append(OneRun(of_scaled, other, scaled, 1, plan, spec.calibration, make))
            report = joined(report, of_scaled, "scaled")
    return Ran(report, texts or [tokenizer.decode(tokens) for tokens in (*ids, *scaled)], selected.passed_over, runs)


_SCALED_TOKENS = 24


def make_pair(reference: str, executor: str, device: str | None) -> tuple[Make, Make]:
    """What makes the reference and the executor on trial of any model."""
    from haarkv.executors.catalog import create

    return (
        lambda model, plan: create(reference, model, plan, on_program=compiling),
        lambda model, plan: create(executor, model, plan, device, compiling),
    )


def _itself(selected: Selection) -> str:
    """What is wrong when `auto` stands for the reference of the comparison."""
    from haarkv.executors.catalog import FASTEST_FIRST

    why = f" ({selected.passed_over})" if selected.passed_over else ""
    nothing = "compared with itself it proves nothing"
    if selected.name == FASTEST_FIRST[-1]:
        return f"only {selected.name} can run this here{why}, and {nothing}; change --kv or --model"
    return f"auto is {selected.name} here{why}, the reference itself, and {nothing}; name another --executor"
