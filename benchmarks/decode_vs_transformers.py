"""Decode latency of the reference executor beside transformers' own eager `generate`.

`python -m haarkv.benchmarks.decode_vs_transformers`

Both continue the same prompt of the tiny checkpoint greedily in fp32 and must produce the same tokens. A run's decode
latency is (time of N new tokens - time of 1) / (N - 1), so that prefill and set-up drop out on either side. The sides take
turns within one process; medians and ratios are of those pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from haarkv.benchmarks.report import emit, print_rows
from haarkv.engine.generation import generate
from haarkv.engine.loading import load
from haarkv.models.catalog import TINY
from haarkv.models.tiny_qwen3.corpus import held_out_texts

OURS = ("bf16", "tq4", "fp32")
Call = Callable[[int], list[int]]


def transformers_run(prompt: list[int]) -> Call:
    """transformers' eager `generate` with a `DynamicCache`."""
    model = Qwen3ForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([prompt])

    def run(new_tokens: int) -> list[int]:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=DynamicCache(), do_sample=False,
            max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return [int(i) for i in out[0, len(prompt) :]]

    return run


def our_run(kv: str, prompt: list[int]) -> Call:
    """The reference executor with one KV format."""
    session = load("tiny", kv=kv)

    def run(new_tokens: int) -> list[int]:
        context = len(prompt) + new_tokens
        cache, paging = session.new_cache(1, context)
        done, _ = generate(session.executor, cache, paging, [prompt], max_new_tokens=new_tokens, max_context=context)
        return done[0].token_ids

    return run


def measure(runs: dict[str, Call], new_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Decode ms a token of every side, taking turns; the first turn warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run(1)
            between = time.perf_counter()
            run(new_tokens)
            taken = (time.perf_counter() - between) - (between - began)
            if turn:
                times[name].append(1e3 * taken / (new_tokens - 1))
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="append the JSON line to benchmarks/results")
    args = parser.parse_args(argv)
    tokenizer = load("tiny").tokenizer
    prompt = tokenizer.encode("\n".join(held_out_texts().values()))[: args.context]
    runs = {"transformers": transformers_run(prompt), **{kv: our_run(kv, prompt) for kv in OURS}}
    same = {kv: runs[kv](args.new_tokens) == runs["transformers"](args.new_tokens) for kv in OURS}
    if not same["fp32"]:
        raise SystemExit("the two sides do not generate the same tokens; their times cannot be compared")

    times = measure(runs, args.new_tokens, args.repeats)
    ratios = {kv: statistics.median(a / b for a, b in zip(times[kv], times["transformers"], strict=True)) for kv in OURS}
    rows = [
        (
            f"reference, {name}" if name in OURS else "transformers, eager, DynamicCache",
            f"{statistics.median(ms):.2f}",
            f"{min(ms):.2f} … {max(ms):.2f}",
            f"{ratios[name]:.2f}" if name in OURS else "1",
            str(same.get(name, "–")),
        )
        for name, ms in times.items()
    ]
    title = f"tiny, fp32, batch 1, {args.context} tokens of context, {args.new_tokens} new, {args.repeats} turns"
    print_rows(title, ["decode", "ms/token", "min … max", "ratio", "same tokens"], rows)
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    settings = {"context": args.context, "new_tokens": args.new_tokens, "repeats": args.repeats}
    emit("decode_vs_transformers", {**settings, "ms_per_token": medians, "ratio": ratios, "same": same}, save=args.save)


if __name__ == "__main__":
    main()
