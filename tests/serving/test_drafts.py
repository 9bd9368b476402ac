"""Drafts that bring attention layers of their own, whose pages lie beside the model's: the text is the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm_judge import Judge, prompts
from vllm_server import serving

NEW_TOKENS = 48
ASKED = prompts(5, (7, 40, 130, 200, 300))
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 256, 8, 2, 128, 768, 4096


def eagle3(folder: Path) -> Path:
    """An EAGLE-3 head for `tiny` with random weights: nothing that it proposes is any good."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP,
        "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
        # By default the third layer and the middle one, which of six layers are the same.
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draw, queries, keys = torch.Generator().manual_seed(0), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "midlayer.self_attn.q_proj": (queries, 2 * HIDDEN), "midlayer.self_attn.k_proj": (keys, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (keys, 2 * HIDDEN), "midlayer.self_attn.o_proj": (HIDDEN, queries),
        "midlayer.mlp.gate_proj": (MLP, HIDDEN), "midlayer.mlp.up_proj": (MLP, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, MLP), "midlayer.hidden_norm": (HIDDEN,), "midlayer.input_layernorm": (HIDDEN,),
        "midlayer.post_attention_layernorm": (HIDDEN,), "fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,),
        "lm_head": (VOCAB, HIDDEN),
    }  # fmt: skip
    tensors = {
        f"{name}.weight": (torch.randn(shape, generator=draw) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape))
        for name, shape in shapes.items()
    }
    save_file({name: of.bfloat16() for name, of in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.vllm_server
def test_drafts_of_an_eagle_head_change_no_token(tmp_path, judge: Judge, record_property):
    drafts = {"method": "eagle3", "model": str(eagle3(tmp_path / "eagle3")), "num_speculative_tokens": 2}
    with serving(tmp_path / "log", "--speculative-config", json.dumps(drafts)) as server:
        verdict = judge.judge(ASKED, server.complete(ASKED, NEW_TOKENS))
        record_property("eagle3", str(verdict))
        assert verdict.passes, verdict
        assert server.metrics()["vllm:spec_decode_num_draft_tokens_total"] > NEW_TOKENS
