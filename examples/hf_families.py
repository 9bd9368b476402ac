"""Learned keys on models of other families, through transformers: train two small ones, calibrate, and compare caches.

    python examples/hf_families.py FOLDER        # about a quarter of an hour on two cores; resumes what is there

Both are trained on the text that `tiny` was: a Qwen2 (biases of Q, K and V, two query heads a KV head) and a GPT-NeoX (no
shared KV heads, RoPE on a quarter of each head). They are small and under-trained; what is compared is a cache against the
model's own exact one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from haarkv.benchmarks.report import Report
from haarkv.models.catalog import read_config
from haarkv.models.text import load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts, train_texts
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from tq.hf.cache import TQCache
from tq.hf.calibrate import calibrate

LENGTH = 512
CACHES = ("tq2", "tq3", "tq4", "tq5", "k=lr2,v=tq3", "k=lr3,v=tq3", "k=lr4,v=tq4")
COMMON = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 2048, "bos_token_id": 0,
    "eos_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip


def qwen2() -> PreTrainedModel:
    """Qwen2 with fresh weights: head_dim 64, 4 query heads over 2 KV heads."""
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, intermediate_size=640, num_attention_heads=4, num_key_value_heads=2))


def gpt_neox() -> PreTrainedModel:
    """GPT-NeoX with fresh weights: head_dim 64, 4 heads with a K and V of their own."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON, intermediate_size=1024, num_attention_heads=4))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {"qwen2": qwen2, "gpt_neox": gpt_neox}


def tokens_of(texts: Sequence[str]) -> Tensor:
    """All texts in one row of token ids, an end of text after each."""
    tokenizer = load_tokenizer("tiny", read_config("tiny"))
    return torch.tensor([token for text in texts for token in (*tokenizer.encode(text), 0)])


def spread_over(tokens: Tensor, count: int) -> Tensor:
    """Evenly spaced windows [count, LENGTH]."""
    starts = torch.linspace(0, len(tokens) - LENGTH, count).long().tolist()
    return torch.stack([tokens[start : start + LENGTH] for start in starts])


def train(model: PreTrainedModel, tokens: Tensor, steps: int, per_step: int = 4, lr: float = 3e-3) -> None:
    """Run so many steps of `per_step` windows; prints the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - LENGTH - 1, (per_step,), generator=generator).tolist()
        windows = torch.stack([tokens[s : s + LENGTH + 1] for s in starts])
        logits = model(input_ids=windows[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps} loss {loss.item():.3f}", flush=True)


def trained(name: str, folder: Path, steps: int) -> PreTrainedModel:
    """A family's model from a folder, trained and saved there first if it is not."""
    path = folder / name
    if not (path / "model.safetensors").is_file():
        torch.manual_seed(0)
        model = FAMILIES[name]()
        print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
        train(model, tokens_of(train_texts()), steps)
        model.save_pretrained(path)
    return FAMILIES[name]().from_pretrained(path).eval()


@dataclass(frozen=True)
class Row:
    """One cache of one model.

    Attributes:
        family: of the model.
        kv: of the cache.
        bits: a number of K or V, scales included.
        kl: mean KL to the model's own exact cache, in nats a token.
        kl_999: its 99.9th percentile.
    """

    family: str
    kv: str
    bits: float
    kl: float
    kl_999: float


@torch.no_grad()
def compare(family: str, model: PreTrainedModel, windows: Tensor, file: CalibrationFile) -> list[Row]:
    """Every cache of `CACHES` on the same windows [n, LENGTH]; each window is one forward that reads what it has stored."""
    exact = [torch.log_softmax(model(input_ids=window[None]).logits[0], -1) for window in windows]
    rows = []
    for kv in CACHES:
        found = []
        for window, expected in zip(windows, exact, strict=True):
            cache = TQCache(model.config, kv=kv, calibration=file)
            logits = model(input_ids=window[None], past_key_values=cache).logits[0]
            found.append((expected.exp() * (expected - torch.log_softmax(logits, -1))).sum(-1))
        kl, layer = torch.cat(found), cache.stats().layers[0]
        bits = 16 * layer.used / layer.bf16
        rows.append(Row(family, kv, bits, float(kl.mean()), float(kl.quantile(0.999))))
        print(f"{family:9} {kv:16} {bits:6.3f} {rows[-1].kl:.5f} {rows[-1].kl_999:.4f}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is not trained, then print a table and one JSON line a cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="of training, for a model that is not in the folder")
    parser.add_argument("--windows", type=int, default=20, help=f"held-out windows of {LENGTH} tokens to compare on")
    parser.add_argument("--save", action="store_true", help="append the lines to benchmarks/results")
    args = parser.parse_args(argv)
    own, unseen = tokens_of(train_texts()), tokens_of(list(held_out_texts().values()))
    learned_from, windows = spread_over(own, 20), spread_over(unseen, args.windows)
    rows = []
    for name in FAMILIES:
        model = trained(name, args.folder, args.steps)
        file = calibrate(model, learned_from.tolist(), out=args.folder / f"{name}.safetensors")
        rows += compare(name, model, windows, file)
    for row in rows:
        how = {"steps": args.steps, "windows": args.windows}
        report = Report("families", row.family, [LENGTH], [row.kv], how | asdict(row), tables=())
        print(report.line())
        if args.save:
            report.save()


if __name__ == "__main__":
    main()
