"""Train `tiny_draft`, a two-layer draft for `tiny_qwen3`: `python -m lab.training.tiny_draft`.

The recipe is that of `tiny_qwen3.py` beside it: the same text, windows, optimiser and schedule. Two things differ. The draft
keeps tiny's embedding, which is its head as well, and learns none of it. And it learns tiny's whole distribution after each
token, not the token that follows: KL(tiny || draft).

The result goes to `--out` without the embedding, which a draft takes from the model that it drafts for, if it likes the same
token best as tiny does more often than what is there. The defaults are the recipe of the draft that ships, which is short:
more steps will help it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.functional import kl_div, log_softmax
from transformers import Qwen3Config, Qwen3ForCausalLM

from haarkv.models.catalog import TINY
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.models.weights import EMBEDDING, HEAD
from lab.training.tiny_qwen3 import EVAL_TOKENS, EVAL_WINDOWS, into_place, recipe_parser, token_stream, train, train_texts

SHIPPED_FOLDER = TINY.with_name("tiny_draft").resolve()


def new_draft(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The architecture of models/tiny_draft/README.md with the model's own embedding, which stays as it is, and a part of its
    layers to begin with: of the first and of the last, two query heads over one KV head, and the MLP's largest columns."""
    tiny = model.config
    draft = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tiny.vocab_size, hidden_size=tiny.hidden_size, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=tiny.head_dim, rms_norm_eps=tiny.rms_norm_eps,
            max_position_embeddings=tiny.max_position_embeddings, tie_word_embeddings=True, attention_bias=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=tiny.bos_token_id,
            eos_token_id=tiny.eos_token_id,
        )
    )  # fmt: skip
    draft.model.embed_tokens.weight = model.model.embed_tokens.weight
    draft.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        draft.model.norm.weight.copy_(model.model.norm.weight)
        for ours, theirs in zip(draft.model.layers, (model.model.layers[0], model.model.layers[-1]), strict=True):
            _begin_with(ours, theirs)
    return draft


def _begin_with(ours: Any, theirs: Any) -> None:
    """Copy as much of one layer as fits into a smaller one: leading heads, and the columns of the MLP that weigh most."""
    channel_norms = theirs.mlp.down_proj.weight.norm(dim=0) * theirs.mlp.up_proj.weight.norm(dim=1)
    columns = channel_norms.topk(ours.mlp.up_proj.out_features).indices.sort().values
    weights = dict(theirs.state_dict())
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        weights[name] = weights[name][columns]
    weights["mlp.down_proj.weight"] = weights["mlp.down_proj.weight"][:, columns]
    for name, tensor in ours.state_dict().items():
        tensor.copy_(weights[name][tuple(slice(size) for size in tensor.shape)])


def distillation_loss(draft: Qwen3ForCausalLM, model: Qwen3ForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """KL(model || draft) in nats a token."""
    with torch.no_grad():
        target_log_probs = log_softmax(model(input_ids=windows).logits.flatten(0, 1).float(), -1)
    log_probs = log_softmax(draft(input_ids=windows).logits.flatten(0, 1).float(), -1)
    return kl_div(log_probs, target_log_probs, reduction="batchmean", log_target=True)


@torch.no_grad()
def agreement(draft: Qwen3ForCausalLM, model: Qwen3ForCausalLM, tokens: torch.Tensor) -> float:
    """How often both like the same token best, over evenly spaced windows of held-out text."""
    same = 0
    for j in range(EVAL_WINDOWS):
        start = j * (len(tokens) - EVAL_TOKENS) // EVAL_WINDOWS
        window = tokens[start : start + EVAL_TOKENS][None]
        same += int((draft(input_ids=window).logits.argmax(-1) == model(input_ids=window).logits.argmax(-1)).sum())
    return same / (EVAL_WINDOWS * EVAL_TOKENS)


def save(draft: Qwen3ForCausalLM, out: Path) -> None:
    """Write BF16 weights without the embedding and config beside `out`, then move each file into place whole.

    The draft that ships uses tiny's own tokenizer; any other folder gets a copy.
    """
    out.mkdir(parents=True, exist_ok=True)
    shared = (EMBEDDING, HEAD)
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in draft.state_dict().items() if name not in shared}
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        scratch = Path(folder)
        draft.config.dtype = torch.bfloat16
        draft.config.save_pretrained(scratch)
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        if out.resolve() != SHIPPED_FOLDER:
            (scratch / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
        into_place(scratch, out)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = recipe_parser(__doc__, SHIPPED_FOLDER, "the draft that ships", "start from the draft in --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(steps=120, tokens_per_step=2048, final_lr=0.02, warmup=10)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = Qwen3ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokens, held_out = token_stream(tokenizer, train_texts()), token_stream(tokenizer, list(held_out_texts().values()))
    draft, before = new_draft(model), 0.0
    weights_file = args.out / "model.safetensors"
    if weights_file.exists():
        old_draft = new_draft(model).eval()
        old_draft.load_state_dict(load_file(weights_file), strict=False)
        before = agreement(old_draft, model, held_out)
        print(f"{args.out} now: {before:.2%} of {EVAL_WINDOWS * EVAL_TOKENS} held-out tokens liked best by both", flush=True)
        draft = old_draft if args.resume else draft
    train(draft.train(), tokens, args, partial(distillation_loss, draft, model), ahead=0)
    draft = draft.to(torch.bfloat16).float().eval()  # as it is stored
    after = agreement(draft, model, held_out)
    print(f"{after:.2%} after {args.steps * args.tokens_per_step} tokens", flush=True)
    if after > before:
        save(draft, args.out)
        print(f"written to {args.out}")
    else:
        print(f"{args.out} left as it was: it agrees more often")


if __name__ == "__main__":
    main()
