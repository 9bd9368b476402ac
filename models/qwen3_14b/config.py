"""Shapes of a dense Qwen3, read from its `config.json` or by the name of a family member."""

from __future__ import annotations

from dataclasses import replace

from haarkv.models.base import DecoderConfig
from haarkv.models.hf_config import HFConfig


def read_config(file: HFConfig) -> DecoderConfig:
    """Shapes from a `config.json`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (sliding windows, attention biases), by name.
    """
    file.refuse(
        {
            "sliding-window attention": file.flag("use_sliding_window") or file.windowed(),
            "attention biases": file.flag("attention_bias"),
        }
    )
    # Qwen3's own default of head_dim, whatever hidden_size / heads may be.
    return file.decoder(head_dim=128, num_kv_heads=32, max_positions=32768)


QWEN3_14B = DecoderConfig(
    model_type="qwen3", hidden_size=5120, num_layers=40, num_heads=40, num_kv_heads=8, head_dim=128,
    intermediate_size=17408, vocab_size=151936, eos_token_ids=(151645, 151643),
)  # fmt: skip

SIZES: dict[str, DecoderConfig] = {
    "0.6b": replace(
        QWEN3_14B, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072, tie_word_embeddings=True
    ),
    "1.7b": replace(
        QWEN3_14B, hidden_size=2048, num_layers=28, num_heads=16, intermediate_size=6144, tie_word_embeddings=True
    ),
    "4b": replace(QWEN3_14B, hidden_size=2560, num_layers=36, num_heads=32, intermediate_size=9728, tie_word_embeddings=True),
    "8b": replace(QWEN3_14B, hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12288),
    "14b": QWEN3_14B,
    "32b": replace(QWEN3_14B, num_layers=64, num_heads=64, intermediate_size=25600),
    "narrow": replace(
        QWEN3_14B, hidden_size=256, num_heads=2, num_kv_heads=1, intermediate_size=512, vocab_size=1024,
        eos_token_ids=(), tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Every dense Qwen3, by the word that `random:SIZE` takes; `narrow` is none: 40 layers that an interpreter runs in minutes."""
