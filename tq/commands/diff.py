"""`tq diff`: where two executors or KV formats first choose another token, and how far apart they are everywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tq.commands.generate import read_prompt
from tq.kv_options import kv_options, kv_spec
from tq.output import err, loading, print_table

if TYPE_CHECKING:
    from haarkv.engine.generation import Completion
    from haarkv.models.text import Tokenizer
    from haarkv.validation.fidelity.greedy_diff import Divergence, GreedyDiff, OnStep, PromptDiff
    from haarkv.validation.fidelity.scores import Candidate

# Python, which is what tiny was trained on, of different lengths.
_PROMPTS = (
    "def main(",
    "import os\nimport sys\n\n",
    "class Node:\n    def __init__(self, name, parent=None):\n        self.name = name\n",
    "    try:\n        with open(path) as file:\n            return file.read()\n    except OSError as error:\n",
)
# Columns of a text that a line shows, quotes included.
_SHOWN = 56


@click.command("diff")
@click.option("--a", "spec_a", metavar="SIDE", required=True, help="EXECUTOR, FORMAT or EXECUTOR:FORMAT.")
@click.option("--b", "spec_b", metavar="SIDE", required=True, help="The same.")
@click.option("--model", default="tiny", show_default=True, help="tiny, a Hugging Face folder, or random:SIZE.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Repeat it for a ragged batch [default: four].")
@click.option("--prompt-file", "files", multiple=True, metavar="FILE", help="A UTF-8 file as one prompt; - is stdin.")
@click.option(
    "--device", "--provider", help="Where executors other than the reference run; npu: sim or npu:N; onnx: cpu, cuda or cann."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: bfloat16 if a side is npu, else float32]")
@kv_options(kv=False)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--layers", type=int, help="For random:SIZE: how many of its layers to build.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; 1 is best for tiny on a busy machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    spec_a: str,
    spec_b: str,
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    max_new_tokens: int,
    layers: int | None,
    threads: int | None,
    as_json: bool,
    **kv: Any,
) -> int:
    """Show where two executors or KV formats first choose another token.

    Both continue the same prompts greedily; then both are fed A's tokens and their predictions are compared. A SIDE is
    an executor (with tq4), a format of `tq formats` or k=NAME,v=NAME (on the reference), or both with a colon between:

    \b
      tq diff --a bf16 --b tq4
      tq diff --a reference:k=bf16,v=tq4 --b npu:k=bf16,v=tq4 --device sim

    Tail, sinks and layers left in bf16 are those of both sides.

    Exit code 1 if both sides store the same format and yet disagree by more than a near tie; between formats a
    difference is what one looks for, and the exit code 0.
    """
    texts = [*prompts, *(read_prompt(file) for file in files)] or list(_PROMPTS)
    import torch

    from haarkv.validation.fidelity.greedy_diff import default_dtype, greedy_diff, load_contenders, parse_contender

    if threads is not None:
        torch.set_num_threads(threads)
    side_a, side_b = parse_contender(spec_a), parse_contender(spec_b)
    dtype = dtype or default_dtype(side_a, side_b)
    with loading(model) as progress:
        a, b = load_contenders(
            model, side_a, side_b, dtype=dtype, device=device, layers=layers, spec=kv_spec(kv), progress=progress
        )
    with _counting() as on_step:
        diff = greedy_diff(a, b, texts, dtype=dtype, max_new_tokens=max_new_tokens, on_step=on_step)
    if as_json:
        print(json.dumps({"model": model, "dtype": dtype, **_as_json(diff, a.tokenizer)}))
    else:
        print(f"A  {diff.a}\nB  {diff.b}\n{model} in {dtype}, up to {max_new_tokens} new tokens after each prompt")
        for number, row in enumerate(diff.prompts, 1):
            _print_prompt(number, row, a.tokenizer)
        if first := diff.first_divergence:
            _print_divergence(first, a.tokenizer)
        _print_fidelity(diff)
    return int(diff.faulty)


@contextmanager
def _counting() -> Iterator[OnStep]:
    """Says on a terminal's stderr what is being done and how many tokens of it are."""
    done: dict[str, int] = {}

    def on_step(what: str) -> None:
        done[what] = done.get(what, 0) + 1
        if err().is_terminal:
            print(f"\r\x1b[K{what}: {done[what]} tokens", end="", file=sys.stderr, flush=True)

    try:
        yield on_step
    finally:
        if done and err().is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -- In words -------------------------------------------------------------------------------------------------------------


def _token(token: int, tokenizer: Tokenizer) -> str:
    """A token as it is to be read: its text quoted, white space visible, and its id."""
    return f"{'end of text' if token in tokenizer.eos_token_ids else repr(tokenizer.decode([token]))} ({token})"


def _head(text: str) -> str:
    """As much of a text's beginning as fits, quoted."""
    shown = text[:_SHOWN]
    while len(repr(shown)) > _SHOWN:
        shown = shown[:-1]
    return repr(shown) + "…" * (shown != text)


def _tail(text: str) -> str:
    """As much of a text's end as fits, quoted."""
    shown = text[-_SHOWN:]
    while len(repr(shown)) > _SHOWN:
        shown = shown[1:]
    return "…" * (shown != text) + repr(shown)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _print_prompt(number: int, row: PromptDiff, tokenizer: Tokenizer) -> None:
    """The end of what both have in common, and then each side's own way."""
    found, length = row.divergence, len(row.a.token_ids)
    if found is None:
        ended = " and the end of text" if row.a.finish == "eos" else ""
        print(f"\n── prompt {number}: the same {_count(length, 'token')}{ended}")
    else:
        print(f"\n── prompt {number}: new token {found.position + 1} differs" + " (near tie)" * found.near_tie)
    print(f"   prompt  {_tail(row.prompt)}")
    if found is None:
        print(f"   both    {_head(row.text_a)}")
        return
    common = f"{_tail(tokenizer.decode(row.a.token_ids[: found.position]))} ({_count(found.position, 'token')})"
    print(f"   both    {common if found.position else 'nothing'}")
    for name, side, token in (("A", row.a, found.token_a), ("B", row.b, found.token_b)):
        rest = tokenizer.decode(side.token_ids[found.position + 1 :])
        print(f"   {name}     » {_token(token, tokenizer)}" + f" then {_head(rest)}" * bool(rest))


def _print_divergence(found: Divergence, tokenizer: Tokenizer) -> None:
    here = found.scored
    rows = [
        (_token(token_a, tokenizer), f"{logit_a:.3f}", _token(token_b, tokenizer), f"{logit_b:.3f}")
        for (token_a, logit_a), (token_b, logit_b) in zip(here.top_a, here.top_b, strict=True)
    ]
    print()
    title = f"The five best at prompt {found.prompt + 1}, new token {found.position + 1}"
    print_table(title, ["A", "logit", "B", "logit"], rows)
    preferring = f"A prefers its own token to B's by {here.gap_a:.3f}, B its own to A's by {here.gap_b:.3f}"
    print(f"margin of A's two best {here.margin:.3f}; {preferring}")
    print(f"largest error of any of B's logits {here.logit_error:.3f}; standard deviation of A's {here.spread:.3f}")


def _print_fidelity(diff: GreedyDiff) -> None:
    measured = diff.fidelity
    right = round(measured.top1_agreement * measured.positions)
    p999 = "99.9 %" if measured.positions >= 1000 else "largest"
    error = f"{measured.logit_error:.3g}, or {measured.relative_logit_error:.3g} standard deviations of A's logits"
    rows = [
        ("same best token", f"{measured.top1_agreement:.2%}, {right:,} of {measured.positions:,} positions"),
        ("KL(A‖B) in nats", f"mean {measured.kl_mean:.3g}, median {measured.kl_median:.3g}, {p999} {measured.kl_p999:.3g}"),
        ("largest logit error", error),
    ]
    print()
    print_table("Both fed A's tokens", [], rows)
    print(_verdict(diff))


def _verdict(diff: GreedyDiff) -> str:
    texts = sum(row.divergence is not None for row in diff.prompts)
    if not (texts or diff.near_ties or diff.unexplained):
        return "Identical: every token of every prompt."
    parted = f"{_count(texts, 'continuation')} of {len(diff.prompts)} differ{'s' * (texts == 1)}"
    if not diff.same_format:
        return f"{parted}. Between formats that is no fault."
    ties = f"another best token at {_count(diff.near_ties, 'near tie')}"
    if not diff.faulty:
        return f"{parted}; {ties} and nowhere else."
    prompt, position = diff.unexplained[0]
    where = f"{_count(len(diff.unexplained), 'position')} where no rounding explains it"
    return f"{parted}; {ties}, and at {where}, first at prompt {prompt + 1}, new token {position + 1}."


# -- As JSON --------------------------------------------------------------------------------------------------------------


def _as_json(diff: GreedyDiff, tokenizer: Tokenizer) -> dict[str, Any]:
    measured, first = diff.fidelity, diff.first_divergence
    return {
        "a": diff.a,
        "b": diff.b,
        "same_format": diff.same_format,
        "first_divergence": _divergence_json(first, tokenizer) if first else None,
        "positions": measured.positions,
        "top1_agreement": measured.top1_agreement,
        "kl": {"mean": measured.kl_mean, "median": measured.kl_median, "p999": measured.kl_p999},
        "logit_error": measured.logit_error,
        "relative_logit_error": measured.relative_logit_error,
        "near_ties": diff.near_ties,
        "unexplained": [{"prompt": prompt, "position": position} for prompt, position in diff.unexplained],
        "prompts": [
            {
                "prompt": row.prompt,
                "a": _completion_json(row.a, row.text_a),
                "b": _completion_json(row.b, row.text_b),
                "divergence": _divergence_json(row.divergence, tokenizer) if row.divergence else None,
            }
            for row in diff.prompts
        ],
    }


def _completion_json(completion: Completion, text: str) -> dict[str, Any]:
    return {"text": text, "token_ids": completion.token_ids, "finish": completion.finish}


def _divergence_json(found: Divergence, tokenizer: Tokenizer) -> dict[str, Any]:
    def best(candidates: tuple[Candidate, ...]) -> list[dict[str, Any]]:
        return [{"token": token, "text": tokenizer.decode([token]), "logit": logit} for token, logit in candidates]

    here = found.scored
    return {
        "prompt": found.prompt,
        "position": found.position,
        "token_a": found.token_a,
        "token_b": found.token_b,
        "text_a": tokenizer.decode([found.token_a]),
        "text_b": tokenizer.decode([found.token_b]),
        "margin": here.margin,
        "gap_a": here.gap_a,
        "gap_b": here.gap_b,
        "spread": here.spread,
        "logit_error": here.logit_error,
        "kl": here.kl,
        "near_tie": found.near_tie,
        "top_a": best(here.top_a),
        "top_b": best(here.top_b),
    }
