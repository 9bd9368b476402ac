"""Train `tiny_qwen3`, or train it further: `python -m lab.training.tiny_qwen3`.

Data: `models/tiny_qwen3/corpus.py`. Tokenizer: byte-level BPE of 4,096 with single digits, trained on the same files. Windows
of 512 tokens for the first 70 % of the steps and of 2,048 after; AdamW, warm-up, cosine decay. The defaults are the recipe of
the first checkpoint (1,660 steps of 4,096 tokens, held-out loss 2.81), counted in steps where that run followed the clock;
`--resume` starts from the weights that ship.
The result replaces `--out` only if its held-out loss is below that of the weights already there.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from haarkv.models.catalog import TINY
from haarkv.models.tiny_qwen3.corpus import held_out_names, held_out_texts, read_source, stdlib_root

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
EVAL_WINDOWS, EVAL_TOKENS = 24, 1024
_NOT_SOURCE = {"test", "tests", "site-packages", "idle_test", "lib2to3", "__pycache__"}


def train_texts() -> list[str]:
    """Every standard-library source file but tests and the held-out ones, sorted by path."""
    root, held_out = stdlib_root(), set(held_out_names())
    files = (p.relative_to(root) for p in root.rglob("*.py"))
    train_paths = sorted(p for p in files if not _NOT_SOURCE & set(p.parts) and p.as_posix() not in held_out)
    return [read_source(root / p) for p in train_paths]


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries; every digit is a token of its own."""
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """All texts in one row of token ids [N] int64, an end-of-text after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return torch.tensor([i for e in tokenizer.encode_batch(list(texts)) for i in [*e.ids, end]])


def new_model(end_of_text: int | None) -> Qwen3ForCausalLM:
    """The architecture of models/tiny_qwen3/README.md with fresh weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=10,
            num_key_value_heads=2, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
            bos_token_id=end_of_text, eos_token_id=end_of_text, attention_bias=False,
        )
    )  # fmt: skip


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> float:
    """Mean cross entropy in nats a token over a sample: EVAL_WINDOWS evenly spaced windows of EVAL_TOKENS."""
    device, total = model.device, 0.0
    for j in range(EVAL_WINDOWS):
        start = j * (len(tokens) - EVAL_TOKENS - 1) // EVAL_WINDOWS
        window = tokens[start : start + EVAL_TOKENS + 1].to(device)[None]
        logits = model(input_ids=window[:, :-1]).logits
        total += cross_entropy(logits[0].float(), window[0, 1:]).item()
    return total / EVAL_WINDOWS


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write bf16 weights, config and tokenizer to a folder beside `out`, then move each file into place whole."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(scratch)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
        fast.save_pretrained(scratch)
        into_place(Path(scratch), out)


def into_place(scratch: Path, out: Path) -> None:
    """Move every file of a folder into another on the same disk, each whole."""
    for path in scratch.iterdir():
        path.chmod(0o644)
        path.replace(out / path.name)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine from `--lr` to `--final-lr` of it."""
    warm = min(1.0, (step + 1) / args.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
    return float(args.lr * warm * (args.final_lr + (1 - args.final_lr) * cosine))


def next_token_loss(model: Qwen3ForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the token that follows each."""
    logits = model(input_ids=windows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def train(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, args: argparse.Namespace, loss_fn: Callable[[torch.Tensor], torch.Tensor],
    ahead: int = 1, held_out: torch.Tensor | None = None, on_step: Callable[[int], object] = lambda _: None,
) -> None:  # fmt: skip
    """Run `--steps` optimiser steps in place, printing the loss and, every 200 steps, the held-out loss.

    Args:
        loss_fn: of windows [n, length + ahead].
        held_out: tokens; None prints no held-out loss.
        on_step: called with the number of steps so far, after each.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(args.seed)
    device, began = model.device, time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        length = 512 if step < 0.7 * args.steps else 2048
        count = args.tokens_per_step // length
        starts = torch.randint(0, len(tokens) - length - ahead, (count,), generator=generator).tolist()
        windows = torch.stack([tokens[s : s + length + ahead] for s in starts]).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.autocast):
            loss = loss_fn(windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            rate = (step + 1) * args.tokens_per_step / (time.monotonic() - began)
            print(f"step {step + 1}/{args.steps} loss {loss.item():.3f} {rate:.0f} tokens/s", flush=True)
        if held_out is not None and (step + 1) % 200 == 0:
            print(f"  held-out loss {held_out_loss(model, held_out):.4f}", flush=True)
        on_step(step + 1)


def recipe_parser(description: str | None, out: Path, ships: str, resume: str) -> argparse.ArgumentParser:
    """The options of every training on this text, with the defaults of `tiny_qwen3`.

    Args:
        out: default of `--out`, which `ships` names.
        resume: what `--resume` does.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help=f"folder to write (default: {ships})")
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.add_argument("--steps", type=int, default=1660)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--final-lr", type=float, default=0.1, help="fraction of --lr at the last step")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--autocast", action="store_true", help="bf16 matrix products (a gain where the chip has them)")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    resume = "start from the weights that ship, keep their tokenizer"
    parser = recipe_parser(__doc__, TINY, "the checkpoint that ships", resume)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    texts = train_texts()
    if args.resume:
        tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        model = Qwen3ForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(texts)
        model = new_model(tokenizer.token_to_id(END_OF_TEXT))
    model.to(args.device).train()
    tokens, held_out = token_stream(tokenizer, texts), token_stream(tokenizer, list(held_out_texts().values()))
    print(f"{len(texts)} files, {len(tokens)} tokens to train on, {len(held_out)} held out", flush=True)
    before = math.inf
    if (args.out / "model.safetensors").exists():
        if Tokenizer.from_file(str(args.out / "tokenizer.json")).get_vocab() != tokenizer.get_vocab():
            raise SystemExit(f"{args.out} has another tokenizer, so losses a token cannot be compared; give another --out")
        before = held_out_loss(Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(args.device), held_out)
        print(f"held-out loss of {args.out} now: {before:.4f}", flush=True)
    train(model, tokens, args, partial(next_token_loss, model), held_out=held_out)
    after = held_out_loss(model.to(torch.bfloat16).float(), held_out)  # of the weights as they are stored
    print(f"held-out loss {after:.4f}, {args.steps * args.tokens_per_step} tokens")
    if after < before:
        save(model, tokenizer, args.out)
        print(f"written to {args.out}")
    else:
        print(f"{args.out} left as it was: its loss of {before:.4f} is lower")


if __name__ == "__main__":
    main()
