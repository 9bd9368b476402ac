"""`tq diff`: where two executors or KV formats first choose different tokens, and how far apart they are everywhere."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import count_noun
from tq import options
from tq.commands.generate import read_prompt
from tq.groups import Command
from tq.output import loading, print_judged, print_table, telling, unread_is_fine

if TYPE_CHECKING:
    from haarkv.engine.generation import Completion
    from haarkv.models.text import Tokenizer
    from haarkv.validation.fidelity.greedy_diff import Candidate, Divergence, GreedyDiff, PromptDiff

# Python of different lengths, since tiny was trained on Python.
_PROMPTS = (
    "def main(",
    "import os\nimport sys\n\n",
    "class Node:\n    def __init__(self, name, parent=None):\n        self.name = name\n",
    "    try:\n        with open(path) as file:\n            return file.read()\n    except OSError as error:\n",
)
# Characters of a text shown on a line, quotes included.
_TEXT_WIDTH = 56


@click.command("diff", cls=Command)
@click.option("--a", "spec_a", metavar="SIDE", required=True, help="EXECUTOR, FORMAT or EXECUTOR:FORMAT.")
@click.option("--b", "spec_b", metavar="SIDE", required=True, help="The same.")
@options.model_option()
@options.prompt_options
@options.bf16_options
@options.balance_option
@options.run_options()
@options.count("--max-new-tokens", default=64, metavar="N")
@options.json_option
def command(
    spec_a: str, spec_b: str, model: str, prompts: tuple[str, ...], files: tuple[str, ...], device: str | None,
    dtype: str | None, layers: int | None, max_new_tokens: int, balance: str, as_json: bool,
    **kv: Any,
) -> int:  # fmt: skip
    """Show where two executors or KV formats first choose different tokens.

    Both sides continue the same prompts greedily. Then both are fed A's tokens, and their predictions are compared. A SIDE is
    an executor (with tq4), a format of `tq formats` or k=NAME,v=NAME, or both with a colon between. A format alone runs on
    the fastest executor here that reads the formats of both sides:

    \b
      tq diff --a bf16 --b tq4
      tq diff --a reference --b auto
      tq diff --a reference:k=bf16,v=tq4 --b npu:k=bf16,v=tq4 --device sim

    --kv-tail, --kv-sink, --kv-skip-layers and --balance apply to both sides. Without a prompt, four short ones are used.

    Exit code 1 if both sides store the same format and still disagree by more than a near tie. Two formats may differ: the
    exit code is then 0.
    """
    texts = [*prompts, *(read_prompt(file) for file in files)] or list(_PROMPTS)
    options.say_if_interpreted(*(side.partition(":")[0] for side in (spec_a, spec_b)), device=device)
    with loading(model) as progress:
        from haarkv.validation.fidelity.greedy_diff import greedy_diff
        from haarkv.validation.fidelity.setup import load_contenders, parse_contender
        from tq.loading import kv_spec

        spec, sides = kv_spec(kv), (parse_contender(spec_a), parse_contender(spec_b))
        a, b, dtype = load_contenders(
            model, sides, spec, device=device, dtype=dtype, layers=layers, balance=balance == "auto", progress=progress
        )
    done = Counter[str]()
    with telling() as tell:

        def on_step(what: str) -> None:
            done[what] += 1
            tell(f"{what}: {count_noun(done[what], 'token')}")

        diff = greedy_diff(a, b, texts, dtype=dtype, max_new_tokens=max_new_tokens, on_step=on_step)
    with unread_is_fine():
        if as_json:
            print(json.dumps({"model": model, "dtype": dtype, **_as_json(diff, a.tokenizer)}))
        else:
            _print(diff, a.tokenizer, f"{model} in {dtype}, up to {max_new_tokens} new tokens after each prompt")
    return int(diff.faulty)


# -- In words -------------------------------------------------------------------------------------------------------------


def _print(diff: GreedyDiff, tokenizer: Tokenizer, what: str) -> None:
    print(f"A  {diff.a}\nB  {diff.b}\n{what}")
    for number, row in enumerate(diff.prompts, 1):
        _print_prompt(number, row, tokenizer)
    _print_fidelity(diff)


def _token(token: int, tokenizer: Tokenizer) -> str:
    """A token for the reader: its text in quotes, white space visible, and its id."""
    return f"{'end of text' if token in tokenizer.eos_token_ids else repr(tokenizer.decode([token]))} ({token})"


def _short(text: str, *, end: bool = False) -> str:
    """A text quoted, its beginning or end as long as a line allows."""
    part = text
    while len(repr(part)) > _TEXT_WIDTH:
        part = part[-_TEXT_WIDTH:][1:] if end else part[:_TEXT_WIDTH][:-1]
    cut = "…" * (part != text)
    return cut + repr(part) if end else repr(part) + cut


def _print_prompt(number: int, row: PromptDiff, tokenizer: Tokenizer) -> None:
    """The end of the common text, then how each side goes on."""
    divergence, length = row.divergence, len(row.a.token_ids)
    if divergence is None:
        ending = " and the end of text" if row.a.finish == "eos" else ""
        print(f"\n── prompt {number}: the same {count_noun(length, 'token')}{ending}")
    else:
        near_tie = " (near tie)" * divergence.scores.near_tie
        print(f"\n── prompt {number}: new token {divergence.position + 1} differs{near_tie}")
    print(f"   prompt  {_short(row.prompt, end=True)}")
    if divergence is None:
        print(f"   both    {_short(row.text_a)}")
        return
    common = _short(tokenizer.decode(row.a.token_ids[: divergence.position]), end=True)
    common += f" ({count_noun(divergence.position, 'token')})"
    print(f"   both    {common if divergence.position else 'nothing'}")
    for name, side, token in (("A", row.a, divergence.token_a), ("B", row.b, divergence.token_b)):
        rest = tokenizer.decode(side.token_ids[divergence.position + 1 :])
        print(f"   {name}     » {_token(token, tokenizer)}" + f" then {_short(rest)}" * bool(rest))


def _print_fidelity(diff: GreedyDiff) -> None:
    fidelity = diff.fidelity
    right = round(fidelity.top1_agreement * fidelity.positions)
    p999 = "99.9 %" if fidelity.positions >= 1000 else "largest"
    error = f"{fidelity.logit_error:.3g}, or {fidelity.relative_logit_error:.3g} standard deviations of A's logits"
    rows = [
        ("same best token", f"{fidelity.top1_agreement:.2%}, {right:,} of {fidelity.positions:,} positions"),
        ("KL(A‖B) in nats", f"mean {fidelity.kl_mean:.3g}, median {fidelity.kl_median:.3g}, {p999} {fidelity.kl_p999:.3g}"),
        ("largest logit error", error),
    ]
    print()
    print_table("Both fed A's tokens", [], rows)
    identical = not (any(row.divergence for row in diff.prompts) or diff.near_ties or diff.unexplained)
    print_judged(_verdict(diff), False if diff.faulty else True if identical else None)


def _verdict(diff: GreedyDiff) -> str:
    texts = sum(row.divergence is not None for row in diff.prompts)
    if not (texts or diff.near_ties or diff.unexplained):
        return "Identical: every token of every prompt."
    difference = f"{count_noun(texts, 'continuation')} of {len(diff.prompts)} differ{'s' * (texts == 1)}"
    if not diff.same_format:
        return f"{difference}. Between formats that is no fault."
    ties = f"another best token at {count_noun(diff.near_ties, 'near tie')}"
    if not diff.faulty:
        return f"{difference}; {ties} and nowhere else."
    prompt, position = diff.unexplained[0]
    where = f"{count_noun(len(diff.unexplained), 'position')} where no rounding explains it"
    return f"{difference}; {ties}, and at {where}, first at prompt {prompt + 1}, new token {position + 1}."


# -- As JSON --------------------------------------------------------------------------------------------------------------


def _as_json(diff: GreedyDiff, tokenizer: Tokenizer) -> dict[str, Any]:
    fidelity, first = asdict(diff.fidelity), diff.first_divergence
    kl = {name: fidelity.pop(f"kl_{name}") for name in ("mean", "median", "p999")}
    return {
        "a": diff.a,
        "b": diff.b,
        "same_format": diff.same_format,
        "first_divergence": _divergence_json(first, tokenizer) if first else None,
        **fidelity,
        "kl": kl,
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


def _divergence_json(divergence: Divergence, tokenizer: Tokenizer) -> dict[str, Any]:
    def best(candidates: tuple[Candidate, ...]) -> list[dict[str, Any]]:
        return [{"token": token, "text": tokenizer.decode([token]), "logit": logit} for token, logit in candidates]

    entries = asdict(divergence)
    entries |= entries.pop("scores")
    return {
        **entries,
        "margin": divergence.scores.margin,
        "text_a": tokenizer.decode([divergence.token_a]),
        "text_b": tokenizer.decode([divergence.token_b]),
        "top_a": best(divergence.scores.top_a),
        "top_b": best(divergence.scores.top_b),
    }
