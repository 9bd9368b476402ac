"""Train `tiny_qwen3_5`, a hybrid of tiny's size with an MTP layer: `python -m lab.training.tiny_qwen3_5`.

The recipe is that of `tiny_qwen3.py` beside it: the same text, tokenizer, windows, optimiser and schedule. The model begins
with parts of tiny: its embedding, MLPs and norms, and for attention some of its heads. Only Gated DeltaNet begins at random.
It learns the token that follows and, half and half, tiny's whole distribution after each token.

`--part mtp` trains the MTP layer of the model in `--out`, which stays as it is: KL(model || MTP) of the first drafted token
and of the second, for which the layer is fed its own result. Each part replaces what is in `--out` only if it is better: a
lower held-out loss; more first drafts that are the model's own most likely token.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from haarkv.models.catalog import TINY
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from lab.training.tiny_qwen3 import (
    EVAL_TOKENS,
    EVAL_WINDOWS,
    held_out_loss,
    into_place,
    recipe_parser,
    token_stream,
    train,
    train_texts,
)  # fmt: skip

SHIPPED_FOLDER = TINY.with_name("tiny_qwen3_5").resolve()
_BEGINS_WITH = (0, 2, 3, 5)
"""Tiny's layers whose MLPs the hybrid's four begin with; the last one's attention is the fourth's and the MTP layer's."""
_DRAFTS = 2
"""Drafted tokens after which the MTP layer learns."""


def new_config() -> Qwen3_5TextConfig:
    """The architecture of models/tiny_qwen3_5/README.md."""
    return Qwen3_5TextConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        mtp_num_hidden_layers=1,
    )  # fmt: skip


class MTP(nn.Module):
    """The layer that drafts: u = layer(fc([norm(embedding of the next token), norm(normed hidden state)])), normed.

    Tensors are named as in a published checkpoint, behind `mtp.`; a norm multiplies with 1 + its weight.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[n, T, hidden] of embeddings of the tokens that follow and of normed hidden states -> normed hidden states."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))
        # Without a mask, attention of several tokens is causal.
        out: Tensor = self.norm(self.layers[0](x, position_embeddings=rope))
        return out


# -- What they begin with --------------------------------------------------------------------------------------------------
@torch.no_grad()
def begin_with(model: Qwen3_5ForCausalLM, tiny: Qwen3ForCausalLM) -> None:
    """Copy tiny's embedding, MLPs and norms, and a part of its last attention, into a new hybrid."""
    model.model.embed_tokens.weight.copy_(tiny.model.embed_tokens.weight)
    model.model.norm.weight.copy_(tiny.model.norm.weight - 1)
    for ours, index in zip(model.model.layers, _BEGINS_WITH, strict=True):
        _copy_layer(ours, tiny.model.layers[index])


def _new_mtp(model: Qwen3_5ForCausalLM) -> MTP:
    mtp = MTP(model.config)
    begin_mtp(mtp, model)
    return mtp


@torch.no_grad()
def begin_mtp(mtp: MTP, model: Qwen3_5ForCausalLM) -> None:
    """Copy the model's last layer and norm; the first projection begins as the mean of both halves."""
    mtp.layers[0].load_state_dict(model.model.layers[-1].state_dict())
    mtp.norm.load_state_dict(model.model.norm.state_dict())
    mtp.fc.weight.copy_(torch.eye(model.config.hidden_size).repeat(1, 2) / 2)


def _copy_layer(ours: Any, theirs: Any) -> None:
    ours.mlp.load_state_dict(theirs.mlp.state_dict())
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(ours, name).weight.copy_(getattr(theirs, name).weight - 1)
    if ours.block_type != "full_attention":
        return
    for name in ("q_norm", "k_norm"):
        getattr(ours.self_attn, name).weight.copy_(getattr(theirs.self_attn, name).weight - 1)
    for name in ("k_proj", "v_proj"):
        getattr(ours.self_attn, name).load_state_dict(getattr(theirs.self_attn, name).state_dict())
    dim, groups = ours.self_attn.head_dim, theirs.self_attn.num_key_value_groups
    heads = [head * groups + i for head in range(2) for i in range(ours.self_attn.num_key_value_groups)]
    queries = theirs.self_attn.q_proj.weight.unflatten(0, (-1, dim))[heads]
    # Each head's gate lies behind its query. A gate of 0 halves what it gates, so the output is doubled.
    ours.self_attn.q_proj.weight.copy_(torch.cat([queries, torch.zeros_like(queries)], 1).flatten(0, 1))
    ours.self_attn.o_proj.weight.copy_(2 * theirs.self_attn.o_proj.weight.unflatten(1, (-1, dim))[:, heads].flatten(1))


# -- Losses ------------------------------------------------------------------------------------------------------------------
def model_loss(model: Qwen3_5ForCausalLM, tiny: Qwen3ForCausalLM, windows: Tensor) -> Tensor:
    """Half the cross entropy of the next tokens and half of KL(tiny || model), in nats a token."""
    with torch.no_grad():
        target_log_probs = log_softmax(tiny(input_ids=windows[:, :-1]).logits.flatten(0, 1).float(), -1)
    log_probs = log_softmax(model(input_ids=windows[:, :-1]).logits.flatten(0, 1).float(), -1)
    follows = cross_entropy(log_probs, windows[:, 1:].flatten())
    return (follows + kl_div(log_probs, target_log_probs, reduction="batchmean", log_target=True)) / 2


def drafts(mtp: MTP, model: Qwen3_5ForCausalLM, windows: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The model's logits [n, T, vocab], and the MTP layer's [n, T - i, vocab] for i = 1, 2.

    Those for i are of the token behind the next i ones. For i = 2 the layer is fed its own hidden states of i = 1.
    """
    with torch.no_grad():
        hidden = model.model(input_ids=windows).last_hidden_state
        logits, embeddings = model.lm_head(hidden), model.model.embed_tokens(windows)
    draft_logits = []
    for _ in range(_DRAFTS):
        hidden, embeddings = hidden[:, :-1], embeddings[:, 1:]
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        hidden = mtp(embeddings, hidden, model.model.rotary_emb(hidden, positions))
        draft_logits.append(model.lm_head(hidden))
    return logits, draft_logits


def mtp_loss(mtp: MTP, model: Qwen3_5ForCausalLM, windows: Tensor) -> Tensor:
    """KL(model || MTP) in nats a draft, the mean over first and second drafts."""
    logits, draft_logits = drafts(mtp, model, windows)
    target_log_probs = log_softmax(logits.float(), -1)
    losses = [
        kl_div(
            log_softmax(one.float(), -1).flatten(0, 1),
            target_log_probs[:, ahead:].flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        for ahead, one in enumerate(draft_logits, 1)
    ]
    return torch.stack(losses).mean()


@torch.no_grad()
def agreement(mtp: MTP, model: Qwen3_5ForCausalLM, tokens: Tensor) -> list[float]:
    """How often the MTP layer's most likely token is the model's, of first and of second drafts after held-out text."""
    same, count = [0] * _DRAFTS, [0] * _DRAFTS
    for j in range(EVAL_WINDOWS):
        start = j * (len(tokens) - EVAL_TOKENS) // EVAL_WINDOWS
        logits, draft_logits = drafts(mtp, model, tokens[start : start + EVAL_TOKENS][None])
        for ahead, one in enumerate(draft_logits, 1):
            hits = one.argmax(-1) == logits[:, ahead:].argmax(-1)
            same[ahead - 1] += int(hits.sum())
            count[ahead - 1] += hits.numel()
    return [hit / all_ for hit, all_ in zip(same, count, strict=True)]


# -- Files -------------------------------------------------------------------------------------------------------------------
def load(folder: Path) -> tuple[Qwen3_5ForCausalLM, MTP]:
    """A stored hybrid in FP32, and its MTP layer."""
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = Qwen3_5ForCausalLM(new_config())
    mtp = MTP(model.config)
    mtp.load_state_dict({name.removeprefix("mtp."): t for name, t in tensors.items() if name.startswith("mtp.")})
    missing = model.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("mtp.")}, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]), missing
    return model, mtp


def save(model: Qwen3_5ForCausalLM, mtp: MTP, out: Path) -> None:
    """Write BF16 weights, config and tiny's tokenizer beside `out`, then move each file into place whole."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"mtp.{name}": tensor for name, tensor in mtp.state_dict().items()}
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        scratch = Path(folder)
        config = model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
        (scratch / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        bf16_tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        save_file(bf16_tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        if out.resolve() != SHIPPED_FOLDER:
            for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                (scratch / name).write_bytes((TINY / name).read_bytes())
        into_place(scratch, out)


def round_to_bf16(module: Any) -> Any:
    """A module with its weights as they are stored."""
    return module.to(torch.bfloat16).float().eval()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = recipe_parser(__doc__, SHIPPED_FOLDER, "the hybrid that ships", "start from the hybrid in --out")
    parser.add_argument("--part", choices=("model", "mtp"), default="model", help="what is trained")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the model as it is after every 50 steps")
    parser.set_defaults(steps=600, tokens_per_step=4096, final_lr=0.05, warmup=40)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokens, held_out = token_stream(tokenizer, train_texts()), token_stream(tokenizer, list(held_out_texts().values()))
    has_weights = (args.out / "model.safetensors").exists()
    if args.part == "mtp":
        _train_mtp(args, tokens, held_out)
        return
    tiny = Qwen3ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval().requires_grad_(False)
    before = math.inf
    if has_weights:
        before = held_out_loss(load(args.out)[0].eval(), held_out)
        print(f"held-out loss of {args.out} now: {before:.4f}", flush=True)
    if args.resume and has_weights:
        model, _ = load(args.out)
    else:
        model = Qwen3_5ForCausalLM(new_config())
        begin_with(model, tiny)

    def keep(steps: int) -> None:
        if args.keep and steps % 50 == 0:
            save(model, _new_mtp(model), args.keep)

    train(model.train(), tokens, args, partial(model_loss, model, tiny), held_out=held_out, on_step=keep)
    after = held_out_loss(round_to_bf16(model), held_out)
    print(f"held-out loss {after:.4f}, {args.steps * args.tokens_per_step} tokens; tiny's {held_out_loss(tiny, held_out):.4f}")
    if after < before:
        save(model, _new_mtp(model), args.out)
        print(f"written to {args.out}; its MTP layer is new")
    else:
        print(f"{args.out} left as it was: its loss of {before:.4f} is lower")


def _train_mtp(args: argparse.Namespace, tokens: Tensor, held_out: Tensor) -> None:
    model, mtp = load(args.out)
    model.eval().requires_grad_(False)
    before = agreement(mtp.eval(), model, held_out)
    print(f"drafts that are the model's most likely token, before: {_shares(before)}", flush=True)
    if not args.resume:
        begin_mtp(mtp, model)
    train(_TrainableModule(mtp.train(), model), tokens, args, partial(mtp_loss, mtp, model), ahead=0)
    after = agreement(round_to_bf16(mtp), model, held_out)
    print(f"after {args.steps * args.tokens_per_step} tokens: {_shares(after)}", flush=True)
    if after > before:
        save(model, mtp, args.out)
        print(f"written to {args.out}")


class _TrainableModule(nn.Module):
    """A module with the device of another, as `train` asks for."""

    def __init__(self, mtp: MTP, model: Qwen3_5ForCausalLM) -> None:
        super().__init__()
        self.mtp, self.device = mtp, model.device


def _shares(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.2%} of the drafts numbered {number}" for number, share in enumerate(shares, 1))


if __name__ == "__main__":
    main()
