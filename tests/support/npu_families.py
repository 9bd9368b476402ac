"""Small layers of other families than Qwen3, for the NPU programs: heads of 64 and 256, biases, windows, norms behind."""

from dataclasses import replace

from small_models import gemma_config, small_config

WINDOW = 40
_SIZES = {"num_layers": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "head_norms": False}


def _gemma3():
    config = gemma_config(hidden_size=128, window=WINDOW)
    return replace(config, layers=tuple(replace(layer, mlp=replace(layer.mlp, width=192)) for layer in config.layers))


CONFIGS = {
    "llama": small_config("llama", hidden_size=192, num_heads=9, num_kv_heads=3, head_dim=64, **_SIZES),
    "qwen2": small_config("qwen2", hidden_size=128, num_heads=14, num_kv_heads=2, head_dim=64, bias=True, **_SIZES),
    "gemma3": _gemma3(),
}
"""By family. The first layer of `gemma3` has a window, the second has none; those of the others are alike."""
