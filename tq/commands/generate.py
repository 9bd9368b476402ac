"""`tq generate`: continue prompts, stream the text and report its cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import count_noun
from haarkv.tq_ops.output_files import check_writable
from tq import options
from tq.groups import Command, tensor_parallel
from tq.output import err, prefilling, print_table, warn

if TYPE_CHECKING:
    from haarkv.engine.loading import Room
    from haarkv.engine.result import KVUsage, Result
    from haarkv.engine.session import Session
    from haarkv.models.config import ModelConfig
    from haarkv.models.parallel import Ranks
    from haarkv.models.text import Tokenizer

_MOST_TEXT = 2**28
"""Most bytes of a prompt: tokenizing takes many times as much."""


@click.command("generate", cls=Command)
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@options.model_option()
@options.prompt_options
@options.session_options
@options.count("--max-new-tokens", default=64, metavar="N")
@options.max_context_option
@click.option("--stop", multiple=True, metavar="TEXT", help="End the text before TEXT. Repeat it for several.")
@options.sampling_options
@options.draft_options
@options.chat_options
@options.file("--load-cache", "Copy what a prompt shares with this stored sequence.")
@options.file("--save-cache", "Store prompt and text, to go on with them later.")
@options.json_option
@tensor_parallel
def command(
    words: tuple[str, ...], prompts: tuple[str, ...], files: tuple[str, ...], load_cache: Path | None,
    save_cache: Path | None, as_json: bool, ranks: Ranks, **args: Any,
) -> None:  # fmt: skip
    """Continue PROMPT and stream the text.

    \b
      tq generate 'def main('
      tq generate -m model.gguf 'Why is the sky blue?' --max-new-tokens 200
      tq generate -p 'import os' -p 'class Node:'      # two prompts in one batch

    The text goes to stdout, its cost to stderr. --json describes the first prompt at its top level, and every prompt in
    `completions`.

    --save-cache stores the tokens, and their K and V as they are. --load-cache computes only what follows the tokens that a
    prompt shares with them; without a prompt, the stored sequence itself goes on.

    Sampling options default to what the model's generation_config.json says. If it says nothing, each next token is the most
    likely one.

    --draft changes how fast text comes, not which text may come.
    """
    if len(words) > 1:
        raise click.UsageError("a prompt of several words stands in quotes: tq generate 'WORDS'; several prompts take -p each")
    if words and (prompts or files):
        raise click.UsageError("give PROMPT, or --prompt and --prompt-file, but not both")
    prompts = prompts or words
    texts = [] if load_cache and not (prompts or files) else read_prompts(prompts, files, ranks)
    if save_cache is not None:
        if len(texts) > 1:
            raise click.UsageError("--save-cache stores one sequence; give one prompt")
        check_writable(save_cache)
    settings = options.sampling_settings(args)
    request = {name: args[name] for name in ("max_new_tokens", "max_context", "stop", *options.CHAT)}
    session = options.open_session(args, ranks=ranks, room=_room(texts, request))
    sequence = session.load_cache(load_cache) if load_cache else None
    is_single = len(texts) < 2  # several are printed at the end

    def show(_: int, text: str) -> None:
        # Not click.echo, which drops colour codes from the text when stdout is not a terminal.
        print(text, end="", flush=True)

    with prefilling() as on_prefill:
        result = session.generate(
            texts, sampling=session.sampling_with(seed=args["seed"], **settings), on_prefill=on_prefill,
            on_text=show if is_single and not as_json else None, on_warning=warn,
            stored=sequence, keep=save_cache is not None, **request,
        )  # fmt: skip
    if save_cache is not None:
        session.save_cache(save_cache, result.stored[0])
    if ranks.rank:  # rank 0 says it for all
        return
    if as_json:
        print(json.dumps(_as_json(session, result)))
        return
    print("" if is_single else "\n".join(f"── prompt {n}\n{text}" for n, text in enumerate(result.texts, 1)), flush=True)
    _print_cost(session, result)


def _room(texts: Sequence[str], request: Mapping[str, Any]) -> Room:

    def room(tokenizer: Tokenizer, config: ModelConfig) -> tuple[int, int]:
        from haarkv.engine.text import Chat, context_for, encode

        chat = Chat(**{name: request[name] for name in options.CHAT})
        if not texts:  # a stored sequence goes on; how long it is stands in its file, which is read later
            chat.require_nothing_said()
            return 1, request["max_context"] or request["max_new_tokens"]
        ids = encode(tokenizer, config.vocab_size, texts, chat)
        return len(ids), context_for(ids, config.max_position_embeddings, request["max_new_tokens"], request["max_context"])

    return room


def read_prompts(prompts: Sequence[str], files: Sequence[str], ranks: Ranks) -> list[str]:
    """Texts of `--prompt` and `--prompt-file`, at least one; rank 0 reads them."""
    texts = [*prompts, *(read_prompt(file) for file in files)] if ranks.rank == 0 else []
    if ranks.rank == 0 and not texts:
        raise click.UsageError("no prompt: give --prompt TEXT or --prompt-file FILE")
    return ranks.share(texts)


def read_prompt(file: str, option: str = "--prompt-file") -> str:
    """UTF-8 text of a file given by an option; - is stdin."""
    if file == "-" and sys.stdin is None:
        raise click.UsageError(f"{option} -: stdin is closed")
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            raw = stream.read(_MOST_TEXT + 1)
        if len(raw) > _MOST_TEXT:
            raise click.UsageError(f"{option} {file} has more than {_MOST_TEXT:,} bytes; give a part of it")
        return raw.decode()
    except OSError as error:
        raise click.UsageError(f"{option} {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{option} {file} is not UTF-8 (byte {error.start}); convert it first") from None


def _as_json(session: Session, result: Result) -> dict[str, Any]:
    each = [
        {
            "text": text, "token_ids": done.token_ids, "prompt_tokens": done.prompt_tokens,
            "reused_tokens": done.reused_tokens, "new_tokens": len(done.token_ids), "finish": done.finish,
        }
        for done, text in zip(result.completions, result.texts, strict=True)
    ]  # fmt: skip
    timing = result.timing
    return {
        **each[0], "load_s": session.load_record.seconds if session.load_record else None,
        "prefill_ms": 1e3 * timing.prefill_s, "prefill_tokens_per_s": timing.prefill_tokens_per_s,
        "decode_ms_per_token": timing.decode_ms_per_token, "decode_tokens_per_s": timing.decode_tokens_per_s,
        "sampling": asdict(result.sampling), "kv": asdict(result.kv), "executor": session.executor.name,
        "model": session.name, "completions": each,
        **({"memory": {f"{name}_bytes": getattr(result.ranks[0], name) for name in ("peak", "mapped")}}
           if len(result.ranks) == 1 else {}),
        **({"draft": result.drafting.as_json()} if result.drafting else {}),
        **({"ranks": list(map(asdict, result.ranks))} if len(result.ranks) > 1 else {}),
    }  # fmt: skip


def _print_cost(session: Session, result: Result) -> None:
    timing, kv, done = result.timing, result.kv, result.completions
    prefix = sum(completion.reused_tokens for completion in done)
    ms = "no decode step" if timing.decode_ms_per_token is None else f"{timing.decode_ms_per_token:.2f} ms a decode step"
    name, seconds = session.executor.name, timing.prefill_s
    prefill_time = f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
    rows = [
        ("executor", f"{name} ({session.passed_over})" if session.passed_over else name),
        *([("loaded", f"in {session.load_record.seconds:.1f} s")] if session.load_record else []),
        ("prompt", f"{count_noun(timing.prefill_tokens, 'token')} in {prefill_time}"
                   f"{_rate(timing.prefill_tokens_per_s)}" + (f"; {prefix:,} more were stored already" if prefix else "")),
        ("new", f"{count_noun(sum(len(c.token_ids) for c in done), 'token')}, {ms}{_rate(timing.decode_tokens_per_s)} "
                f"({', '.join(str(c.finish) for c in done)})"),
        *([("draft", result.drafting.describe())] if result.drafting else []),
        ("sampling", _sampling(session, result)),
        ("KV cache", _cache(session, kv)),
    ]  # fmt: skip
    if len(result.ranks) == 1:
        rows.append(("memory", result.ranks[0].describe()))
    else:
        for rank in result.ranks:
            parts = [(rank.weights, "weights"), (rank.kv, "KV cache"), (rank.peak, "the most at a time, with torch")]
            memory = ", ".join(f"{count / 2**20:,.1f} MiB {what}" for count, what in parts if count)
            rows.append((f"rank {rank.rank}", memory))
    together = f", {session.ranks.size} ranks" if session.ranks.size > 1 else ""
    print_table(f"{session.name} on {session.executor.description}{together}", [], rows, err())


def _cache(session: Session, kv: KVUsage) -> str:
    packed, mebibytes, plain = "packed " * session.plan.has_windows, kv.bytes / 2**20, kv.bf16_bytes / 2**20
    size = f"{kv.bytes_per_token:,.0f} bytes a {packed}token; {mebibytes:,.2f} MiB in all, bf16 {plain:,.2f}"
    return f"{session.plan.summary()}: {size} ({plain / mebibytes:.2f}x)"


def _rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f", {tokens_per_s:,.{1 if tokens_per_s < 100 else 0}f} tokens/s"


def _sampling(session: Session, result: Result) -> str:
    """Effective settings, and whether the model's file has a say in them."""
    sampling, neutral = result.sampling, type(result.sampling)()
    names = [name for name in options.SAMPLING if getattr(sampling, name) != getattr(neutral, name)]
    if not sampling.temperature:
        names = [name for name in names if name == "repetition_penalty"]
    words = [f"{name.replace('_p', '-p').replace('_k', '-k')} {getattr(sampling, name):g}" for name in names]
    text = ", ".join(words if sampling.temperature else ["greedy", *words])
    from_model = [name for name in names if session.generation.get(name) == getattr(sampling, name)]
    return text + "; from the model's settings" * bool(from_model)
