"""`tq calibrate`: learn in which coordinates a model's keys are cheapest to store."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq import options
from tq.commands.eval import read_text
from tq.groups import Command
from tq.output import loading, print_table, scoring, unread_is_fine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from haarkv.validation.fidelity.evaluation import FidelityRow, Workload
    from haarkv.validation.planning.calibrate import Learning, Subject


@click.command("calibrate", cls=Command)
@click.option(
    "--text", "text_files", metavar="FILE", multiple=True,
    help="UTF-8 text to learn from; repeatable; - is stdin [default: Python's language reference].",
)  # fmt: skip
@click.option(
    "--verify", "verify_file", metavar="FILE",
    help="A text to judge by [default: the second half of the text, excluded from learning].",
)  # fmt: skip
@options.file("--out", "The calibration, as safetensors.", "out_file", required=True)
@options.model_option()
@options.executor_option()
@options.run_options()
@options.count("--tokens", "Tokens to learn from.", 10240)
@options.count("--verify-tokens", "Tokens to judge by.", 4096)
@click.option("--window", type=int, metavar="W", help="Tokens in a window [default: 1024, or the model's context].")
@click.option("--force", is_flag=True, help="Write the file even if tq4 is as good at the same bytes.")
@options.json_option
def command(
    text_files: tuple[str, ...], verify_file: str | None, out_file: Path, tokens: int, verify_tokens: int,
    window: int | None, force: bool, as_json: bool, **model: Any,
) -> int:  # fmt: skip
    """Learn in which coordinates a model's keys are cheapest to store, for formats lr2 to lr5.

    All windows go through the model layer by layer. A layer's queries and the spread of its keys give the
    coordinates of each KV head. Ten thousand tokens are enough, of text like yours or of what the model writes from its
    start token; the error on unseen text says whether they were. Then k=lr4,v=tq4 is judged on that text beside tq4 of the
    same bytes. The file is written if it is better; otherwise the exit code is 1.

    \b
      tq calibrate --out tiny.safetensors
      tq calibrate --text train.txt --verify held_out.txt --out tiny.safetensors
      tq plan --calibration tiny.safetensors --text train.txt --budget 2.6 --out plan.safetensors
    """
    texts = [read_text(name, "--text") for name in text_files]
    text = "\n".join(texts) if texts else None
    other = None if verify_file is None else read_text(verify_file, "--verify")
    if other is not None and other in (text, *texts):
        raise click.UsageError("--text and --verify are the same text, which cannot judge what was learned; give another one")
    options.check_outputs(out=out_file)
    from haarkv.validation.fidelity.evaluation import make_workload
    from haarkv.validation.planning.calibrate import load_subject
    from haarkv.validation.planning.common_text import common_text

    options.say_if_interpreted(model["executor"], device=model["device"])
    with loading(model["model"]) as progress:
        subject = load_subject(progress=progress, **model)
    encode, most = subject.tokenizer.encode, subject.config.max_position_embeddings
    total = tokens + 1 + (verify_tokens + 1 if other is None else 0)
    ids = common_text(subject.tokenizer, total) if text is None else encode(text)
    half = tokens + 1 if text is None and len(ids) == total else len(ids) // 2
    learned_from, unseen = (ids[:half], ids[half:]) if other is None else (ids, encode(other))
    work = make_workload(learned_from, most, window=window, tokens=tokens)
    # As long as is allowed: keys of late positions are judged too.
    longest = max(1, min(most, verify_tokens, len(unseen) - 1))
    unseen_work = make_workload(unseen, most, window=longest, tokens=verify_tokens)
    began = time.monotonic()
    windows, held_out = ([each.fed(window) for window in each.windows] for each in (work, unseen_work))
    with scoring(subject.config.num_layers * (work.scored_tokens + unseen_work.scored_tokens)) as on_step:
        learning = subject.learn(windows, held_out, on_step)
    seconds = time.monotonic() - began
    return _judge(subject, learning, unseen_work, work.scored_tokens, seconds, out_file, force=force, as_json=as_json)


def _judge(
    subject: Subject, learning: Learning, unseen_work: Workload, tokens: int, seconds: float, out_file: Path, *, force: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Judge what was learned on unseen text and write it, or say why not. The exit code."""
    from haarkv.tq_ops.kv.calibration_file import save

    result = subject.calibration_file(learning, {})
    with scoring(2 * unseen_work.scored_tokens) as on_step:
        rows = subject.judge(result.calibration, unseen_work, on_step)
    fit, (tq4, lr4) = sum(learning.fits) / len(learning.fits), rows
    report = {
        "tokens": tokens, "verified_tokens": unseen_work.scored_tokens, "fit": fit,
        "verified": [row.measurements for row in rows],
    }  # fmt: skip
    worse = lr4.kl_mean >= tq4.kl_mean
    if is_written := force or not worse:
        result = subject.calibration_file(learning, report)
        save(out_file, result)
    per_layer, peak = seconds / len(learning.layers), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with unread_is_fine():
        if as_json:
            file = {"calibration": str(out_file) if is_written else None, "digest": result.calibration.digest}
            print(json.dumps({**file, **report, "seconds_per_layer": per_layer, "peak_bytes": peak}))
        else:
            _print(rows, report)
            why = f"on unseen text {lr4.kv} has a mean KL of {lr4.kl_mean:.3g}, no better than tq4's {tq4.kl_mean:.3g}"
            not_written = f"{out_file} is not written: {why}; give more --text, or --force"
            ending = f"written to {out_file}" if is_written else not_written
            print(f"{per_layer:.1f} s a layer, {peak / 2**30:.2f} GiB at most; {ending}")
    return int(not is_written)


def _print(rows: Sequence[FidelityRow], report: dict[str, Any]) -> None:
    """Learned keys beside tq4 of the same bytes, and whether the text was enough."""
    from haarkv.validation.planning.calibrate import ENOUGH

    where = f"{report['verified_tokens']:,} unseen tokens, against the model's own bf16 cache"
    cells = [
        (row.kv, f"{row.bits_per_value:.3f}", f"{row.kl_mean:.3g}", f"{row.kl_median:.3g}", f"{row.kl_p999:.3g}")
        for row in rows
    ]
    print_table(where, ["kv", "bits", "KL mean", "median", "99.9 %"], cells)
    print(
        f"learned from {report['tokens']:,} tokens; errors cost {report['fit']:.2f} times as much on unseen text: "
        + ("the text was enough" if report["fit"] <= ENOUGH else f"above {ENOUGH:g} more text helps")
    )
