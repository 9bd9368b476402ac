"""`tq generate`: continue prompts, stream the text and say what it cost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq.kv_options import kv_options, kv_spec
from tq.output import err, loading, print_table

if TYPE_CHECKING:
    from haarkv.engine.generation import Completion
    from haarkv.engine.session import Result, Session


@click.command("generate")
@click.option("--model", default="tiny", show_default=True, help="tiny, a Hugging Face folder, or random:SIZE.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Repeat it for a ragged batch.")
@click.option("--prompt-file", "files", multiple=True, metavar="FILE", help="A UTF-8 file as one prompt; - is stdin.")
@kv_options()
@click.option("--executor", default="reference", show_default=True)
@click.option("--device", "--provider", help="Where the executor runs; npu: sim or npu:N; onnx: cpu, cuda or cann.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: bfloat16 on npu and cuda, else float32]")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--max-context", type=click.IntRange(min=1), help="Tokens the cache holds for each prompt.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all tokens.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, show_default=True)
@click.option("--chat/--no-chat", default=None, help="Use the chat template, or do not [default: if there is one].")
@click.option("--layers", type=int, help="For random:SIZE: how many of its layers to build.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; 1 is best for tiny on a busy machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    executor: str,
    device: str | None,
    dtype: str | None,
    max_new_tokens: int,
    max_context: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    chat: bool | None,
    layers: int | None,
    threads: int | None,
    as_json: bool,
    **kv: Any,
) -> None:
    """Continue prompts and stream the text.

    The text goes to stdout, what it cost to stderr. --json describes the first prompt at its top level and every prompt
    in `completions`.
    """
    texts = [*prompts, *(read_prompt(file) for file in files)]
    if not texts:
        raise click.UsageError("no prompt: give --prompt TEXT or --prompt-file FILE")
    import torch

    from haarkv.engine.sampling import Sampling
    from haarkv.engine.session import load

    spec = kv_spec(kv)
    if threads is not None:
        torch.set_num_threads(threads)
    sampling = Sampling(temperature, top_k, top_p, seed)
    with loading(model) as progress:
        session = load(model, kv=spec, executor=executor, device=device, dtype=dtype, layers=layers, progress=progress)
    writer = None if as_json else _Writer(session, len(texts))
    result = session.generate(
        texts, max_new_tokens=max_new_tokens, max_context=max_context, sampling=sampling, chat=chat,
        on_token=writer.push if writer else None,
    )  # fmt: skip
    if writer is None:
        print(json.dumps(_as_json(session, result)))
        return
    writer.finish(result)
    _print_cost(session, result)


def read_prompt(file: str, option: str = "--prompt-file") -> str:
    """Text of a prompt file, or of the file that another option names; - is stdin.

    Raises:
        click.ClickException: it cannot be read, or is not UTF-8.
    """
    if file == "-" and sys.stdin is None:
        raise click.UsageError(f"{option} -: stdin is closed")
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return raw.decode()
    except OSError as error:
        raise click.UsageError(f"{option} {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{option} {file} is not UTF-8 (byte {error.start}); convert it first") from None


class _Writer:
    """Streams the text of a single prompt; with several, counts on stderr and prints them one after the other."""

    def __init__(self, session: Session, prompts: int) -> None:
        self._stream = session.tokenizer.stream()
        self._single = prompts == 1
        self._tokens = 0
        self._written = ""

    def push(self, index: int, token: int) -> None:
        if self._single:
            self._write(self._stream.push(token))
        elif err().is_terminal:
            self._tokens += 1
            print(f"\r{self._tokens} tokens", end="", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        self._written += text
        # Not click.echo, which takes colours out of the text when nobody watches.
        print(text, end="", flush=True)

    def finish(self, result: Result) -> None:
        if self._single:
            # A text cut inside a character still owes what the stream held back.
            self._write(result.texts[0].removeprefix(self._written))
            print()
            return
        if self._tokens:
            print(file=sys.stderr)
        for number, text in enumerate(result.texts, 1):
            print(f"── prompt {number}\n{text}")


def _describe(completion: Completion, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "new_tokens": len(completion.token_ids),
        "finish": completion.finish,
    }


def _as_json(session: Session, result: Result) -> dict[str, Any]:
    each = [_describe(c, t) for c, t in zip(result.completions, result.texts, strict=True)]
    return {
        **each[0],
        "prefill_ms": 1e3 * result.timing.prefill_s,
        "decode_ms_per_token": result.timing.decode_ms_per_token,
        "kv": asdict(result.kv),
        "executor": session.executor.name,
        "model": session.name,
        "completions": each,
    }


def _print_cost(session: Session, result: Result) -> None:
    step, kv = result.timing.decode_ms_per_token, result.kv
    rows = [
        ("prompt", f"{sum(c.prompt_tokens for c in result.completions)} tokens in {1e3 * result.timing.prefill_s:.1f} ms"),
        ("new", f"{sum(len(c.token_ids) for c in result.completions)} tokens, "
                + (f"{step:.2f} ms a decode step" if step is not None else "no decode step")
                + f" ({', '.join(str(c.finish) for c in result.completions)})"),
        ("KV cache", f"{kv.format}: {kv.bytes_per_token:,.0f} bytes a token, {kv.bytes:,} allocated; "
                     f"bf16 would take {kv.bf16_bytes:,} ({kv.bf16_bytes / kv.bytes:.2f}x)"),
    ]  # fmt: skip
    print_table(f"{session.name} on {session.executor.description}", [], rows, err())
