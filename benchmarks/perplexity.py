"""Held-out perplexity of the tiny checkpoint with its K and V stored in each format.

`python -m haarkv.benchmarks.perplexity`

Evenly spaced windows of the held-out standard-library files, each prefilled as one sequence through the reference in fp32,
so that every token attends to stored K and V. The formats score the same tokens; ratios are to `bf16`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from haarkv.benchmarks.report import emit, print_rows
from haarkv.engine.session import Session, load
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops import formats, reference


@torch.inference_mode()
def window_losses(model: DecoderModel, session: Session, window: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats of each token of a window [N + 1] given those before it: [N] fp32."""
    cache, paging = session.new_cache(1, len(window) - 1)
    batch = paging.batch([paging.add()], [len(window) - 1])
    hidden = model.embed(window[:-1])
    hidden = session.executor.layers(hidden, range(model.config.num_layers), batch, cache)
    return cross_entropy(model.head(hidden, reference), window[1:], reduction="none")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--save", action="store_true", help="append the JSON line to benchmarks/results")
    args = parser.parse_args(argv)
    model = load_model("tiny")
    sessions = {kv: load("tiny", kv=kv) for kv in formats.names()}
    tokenizer = sessions["bf16"].tokenizer
    stream = torch.tensor(
        [i for text in held_out_texts().values() for i in [*tokenizer.encode(text), *tokenizer.eos_token_ids]]
    )
    losses: dict[str, float] = dict.fromkeys(sessions, 0.0)
    for number in range(args.windows):
        begin = number * (len(stream) - args.tokens - 1) // args.windows
        for kv, session in sessions.items():
            losses[kv] += window_losses(model, session, stream[begin : begin + args.tokens + 1]).mean().item() / args.windows
        print(f"\rwindow {number + 1}/{args.windows}", end="", flush=True)
    print()
    perplexity = {kv: math.exp(loss) for kv, loss in losses.items()}
    rows = [
        (kv, f"{sessions[kv].plan.k(0).bytes_per_vector(128):.0f}", f"{value:.4f}", f"{value / perplexity['bf16'] - 1:+.4%}")
        for kv, value in perplexity.items()
    ]
    title = f"tiny, {args.windows} held-out windows of {args.tokens} tokens"
    print_rows(title, ["format", "bytes a vector", "perplexity", "against bf16"], rows)
    emit("perplexity", {"windows": args.windows, "tokens": args.tokens, "perplexity": perplexity}, save=args.save)


if __name__ == "__main__":
    main()
