"""Checkpoints of random weights for vLLM; among them a draft that it takes for `tiny` and that is no good."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

Shapes = Mapping[str, tuple[int, ...]]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 256, 8, 2, 128, 768, 4096


def random_checkpoint(folder: Path, config: Mapping[str, object], shapes: Shapes) -> Path:
    """A folder with tensors of these shapes by module, norms all 1; the same for every config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=draw) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def eagle3(folder: Path) -> Path:
    """An EAGLE-3 head for `tiny` with random weights: nothing that it proposes is any good."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP,
        "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
        # By default the third layer and the middle one, which of six layers are the same.
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    }  # fmt: skip
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "midlayer.self_attn.q_proj": (queries, 2 * HIDDEN), "midlayer.self_attn.k_proj": (keys, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (keys, 2 * HIDDEN), "midlayer.self_attn.o_proj": (HIDDEN, queries),
        "midlayer.mlp.gate_proj": (MLP, HIDDEN), "midlayer.mlp.up_proj": (MLP, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, MLP), "midlayer.hidden_norm": (HIDDEN,), "midlayer.input_layernorm": (HIDDEN,),
        "midlayer.post_attention_layernorm": (HIDDEN,), "fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,),
        "lm_head": (VOCAB, HIDDEN),
    }  # fmt: skip
    return random_checkpoint(folder, config, shapes)
