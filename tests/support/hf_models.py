"""Small models of transformers whose text depends on their attention, neither uniform nor one-hot; a layer of a cache."""

import torch
from transformers import AutoModelForCausalLM

from tq.hf.layer import TQLayer

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip


def build_model(config, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    embedding_std = 0.08 if "gemma" in config.model_type else 0.7  # which a Gemma scales
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if name.endswith("weight") else 0.03))
            else:
                embeds = any(word in name for word in ("embed", "wte", "wpe"))
                parameter.normal_(0, embedding_std if embeds else 1.3 * parameter.shape[1] ** -0.5)
    return model.to(dtype)


def tq_layer(k_format, v_format=None, *, sink=0, tail=(0, 0), window=None):
    return TQLayer(k_format, v_format or k_format, 1, sink=sink, tail=tail, window=window)
